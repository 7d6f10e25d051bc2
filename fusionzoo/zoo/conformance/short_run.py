"""A few training steps on a small model, with or without a strategy: what its checks compare.

All of it that depends on the trainer stands here: how an objective, its loaders and a trainer are
built, how a step is made, and what a checkpoint holds.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fusionzoo.config import RunConfig, from_tree, merge
from fusionzoo.datasets import PairedDataset, create_dataset
from fusionzoo.distributed.fsdp import full_state_dict
from fusionzoo.distributed.process_group import World, wrap
from fusionzoo.model import FusionModel
from fusionzoo.plugins import is_reference
from fusionzoo.sources import definition_of, source_of
from fusionzoo.structures import Batch, Features, StepContext
from fusionzoo.training.balance import BALANCE, Balance, StrategyInputs
from fusionzoo.training.build import build_objective, choose_encoders
from fusionzoo.training.data import build_loader, chunks
from fusionzoo.training.objective import Objective
from fusionzoo.training.optim.optimizers import build_optimizer
from fusionzoo.training.optim.param_groups import param_groups
from fusionzoo.training.trainer import Trainer

from .targets import find

State = dict[str, Tensor]
SAMPLES = 40  # 24, 8 and 8 in train, val and test
BATCH, EPOCH_STEPS = 12, 2
DATA = {"task": "copy", "num_modalities": 3, "width": 4, "missing": 0.3}
SINGLE_PROCESS = World()


@dataclass
class Strategy:
    """A training strategy to be checked."""

    target: str  # a name, `module:Class` or `file.py:Class`
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cls: type[Balance] = find(self.target, BALANCE)

    @property
    def reference(self) -> str:
        """A target that another process finds too, where no plugin is imported."""
        found_anywhere = is_reference(self.target) or source_of(self.cls) is None
        return self.target if found_anywhere else definition_of(self.cls)

    def build(self, inputs: StrategyInputs, settings: Mapping[str, Any]) -> Balance:
        """Build it as a run would: without drawing from the global generators.

        Active from the start, which some are not by default.
        """
        from_start = {"start": 0.0} if "start" in inspect.signature(self.cls).parameters else {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(inputs.seed)
            return self.cls(inputs, **{**from_start, **self.settings, **settings})


class ShortRun:
    """Training of three small modalities `a`, `b`, `c`, each missing in 30 % of the samples.

    In float64, by the fusion `mean`, without dropout unless asked for. `settings` go to the
    strategy, `config` to the run. `absent` overwrites the features of missing modalities.
    """

    def __init__(
        self,
        strategy: Strategy | None,
        settings: Mapping[str, Any] | None = None,
        *,
        world: World = SINGLE_PROCESS,
        config: Mapping[str, Any] | None = None,
        dropout: float = 0.0,
        absent: float | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        data = create_dataset("interactions", samples=SAMPLES, **DATA)
        cfg = from_tree(RunConfig, merge(_small(data, BATCH // world.size), config or {}))
        torch.manual_seed(0)
        train_set = data.split("train")
        self.objective, _ = build_objective(cfg, train_set, world)
        model = self.objective.model
        if strategy is not None:
            inputs = StrategyInputs(model, train_set.targets, cfg.seed, world)
            built = strategy.build(inputs, settings or {})
            self.objective.balance = nn.ModuleDict({built.name: built})
        self.objective.to(dtype)
        for module in self.objective.modules():
            if isinstance(module, nn.Dropout):
                module.p = dropout
        if absent is not None:
            _overwrite_absent(model, absent)
        collate = _Collate(self.objective, dtype)
        self.loaders = {
            name: build_loader(data.split(name), collate, cfg, world, name)
            for name in ("train", "val")
        }
        groups = param_groups(model, self.objective.heads, cfg.optim, self.objective.balance)
        optimizer = build_optimizer(groups, cfg.optim)
        self.trainer = Trainer(wrap(self.objective, cfg.dist, world), optimizer, cfg, world)

    def steps(self, first: int, last: int) -> ShortRun:
        """Make the steps `first` to `last` - 1 of the run; an epoch has `EPOCH_STEPS`."""
        for step in range(first, last):
            epoch, place = divmod(step, EPOCH_STEPS)
            context = StepContext(step=step, epoch=step / EPOCH_STEPS)
            if place == 0:
                self.trainer.begin_epoch(self.loaders, context)
            batches = next(chunks(self.loaders["train"], 1, epoch, skip=place))
            self.step(batches, context)
        return self

    def step(self, batches: Sequence[Batch], context: StepContext) -> None:
        """Make one step; a loss or gradient that is not finite is an error."""
        result = self.trainer.step(batches, context)
        assert not result.skipped, f"step {context.step}: {result.skipped}"
        assert result.loss.isfinite(), f"step {context.step}: the loss is not finite"

    def batches(self) -> list[Batch]:
        """Return the batches of the first epoch."""
        return [batches[0] for batches in chunks(self.loaders["train"], 1, 0)]

    def weights(self) -> State:
        """Return the parameters of the model and of its heads, without those of the strategy."""
        state = {name: x.clone() for name, x in full_state_dict(self.objective).items()}
        return {name: x for name, x in state.items() if not name.startswith("balance.")}

    def state(self) -> State:
        """Return all parameters and buffers, those of the strategy included."""
        return {name: x.clone() for name, x in full_state_dict(self.objective).items()}

    def checkpoint(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what a checkpoint holds of weights and optimiser."""
        return self.state(), copy.deepcopy(self.trainer.optimizer.state_dict())

    def restore(self, checkpoint: tuple[dict[str, Any], dict[str, Any]]) -> ShortRun:
        """Go on from a checkpoint."""
        self.objective.load_state_dict(checkpoint[0])
        self.trainer.optimizer.load_state_dict(checkpoint[1])
        return self


def _small(data: PairedDataset, batch_size: int) -> dict[str, Any]:
    """Return the settings of a run of small encoders."""
    small = {name: {"dim": 6, "hidden": 8} for name in data.modalities}
    return {
        "fusion": {"name": "mean", "dim": 8},
        "encoders": choose_encoders(data, small),
        "optim": {"lr": 0.01},
        "train": {"batch_size": batch_size, "num_workers": 0},
    }


class _Absent(FusionModel):
    """Overwrites the features of missing modalities."""

    content: float

    def encode(self, batch: Batch) -> dict[str, Features]:
        return {
            name: Features(
                torch.where(x.mask[..., None], x.tokens, self.content),
                x.mask,
                torch.where(x.mask.any(1)[:, None], x.pooled, self.content),
            )
            for name, x in super().encode(batch).items()
        }


def _overwrite_absent(model: FusionModel, content: float) -> None:
    """From now on, let the features of missing modalities be `content`; copies do so too."""
    model.__class__ = _Absent
    assert isinstance(model, _Absent)
    model.content = content


class _Collate:
    """Collate samples, with inputs in the precision of the run."""

    def __init__(self, objective: Objective, dtype: torch.dtype) -> None:
        self.collate, self.dtype = objective.model.collate(), dtype

    def __call__(self, samples: Sequence[Any]) -> Batch:
        batch: Batch = self.collate(samples)
        cast = batch.map(lambda tensor: tensor.to(self.dtype))
        return batch._replace(inputs=cast.inputs)


def assert_equal(state: State, expected: State, why: str, tolerance: float = 0.0) -> None:
    """Require equal tensors, to the bit where `tolerance` is 0."""
    assert state.keys() == expected.keys(), f"{why}: other names of weights"
    for name, x in expected.items():
        if not torch.allclose(state[name], x, rtol=tolerance, atol=tolerance):
            off = (state[name].double() - x.double()).abs().max().item()
            raise AssertionError(f"{why}: {name} differs by {off:.2g}")


def strategy(target: str, settings: Mapping[str, Any] | None = None) -> Strategy:
    """Return the training strategy of a name, `module:Class` or `file.py:Class`."""
    return Strategy(target, settings or {})
