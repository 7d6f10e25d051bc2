"""What training strategies are built from, read and return.

Shapes: `B` batch, `N` samples of the training split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from fusionzoo.config import RunConfig
from fusionzoo.distributed.process_group import World
from fusionzoo.model import FusionModel
from fusionzoo.structures import Batch, StepContext

from ..optim.ema import EMA


class StrategyInputs(NamedTuple):
    """Constructor arguments shared by all strategies."""

    model: FusionModel
    targets: Tensor  # (N,) of the training split
    seed: int
    world: World


class LossTerm(NamedTuple):
    """A loss: the mean of `values` where `mask` holds, over the rows of all processes."""

    values: Tensor  # (B,) float32
    mask: Tensor  # (B,) bool
    weight: float | Tensor = 1.0


class MeanLoss(NamedTuple):
    """A loss of the batch after averaging, as `Balance.weigh` receives it."""

    value: Tensor  # this process's share: its mean over processes is the mean over all rows
    rows: Tensor  # number of rows behind it on all processes, float64; 0: the value is 0


@runtime_checkable
class RestartsSchedule(Protocol):
    """A strategy that may restart the learning-rate schedule of a modality's encoder."""

    def restarts(self) -> Mapping[str, int]:
        """Return modality -> epoch of the last restart: read in each step, so from plain numbers.

        Part of the strategy's state, and equal on all processes.
        """


class RunningTrainer(Protocol):
    """What a strategy may use of the trainer before an epoch (`training.trainer.Trainer`)."""

    cfg: RunConfig
    world: World
    module: Any  # the Objective
    optimizer: torch.optim.Optimizer
    ema: EMA | None

    def step(self, batches: Sequence[Batch], context: StepContext) -> Any:
        """Make an optimiser step."""

    def share_statistics(self) -> None:
        """Give every process the running statistics of the main one, before evaluation mode."""

    def copy(self, edit: Callable[[Any], None]) -> RunningTrainer:
        """Return a trainer of copies of module and optimiser, the module changed by `edit`."""
