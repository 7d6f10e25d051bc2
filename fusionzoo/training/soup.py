"""Greedy soup: average the weights of the best epochs, as far as validation does not get worse.

Wortsman et al. 2022, arXiv:2203.05482, with the epochs of one run as ingredients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fusionzoo.fsdp import full_state_dict, load_full_state_dict, shard_like

from .checkpoint import State, write_from_main
from .run_folder import read
from .trainer import Trainer

Metrics = dict[str, Any]
Weights = dict[str, Tensor]


def add_candidate(trainer: Trainer, state: State, val: Metrics, folder: Path) -> None:
    """Keep the weights of an epoch if it is among the best so far; called by all processes.

    The module holds the weights that were evaluated, with `--train.ema` the averaged ones.
    """
    most, tasks = trainer.cfg.train.soup, trainer.module.tasks
    if most is None:
        return
    others = [x for x in state.soup if x["epoch"] != state.evaluated]
    candidates = [*others, {**val, "epoch": state.evaluated}]
    state.soup = sorted(candidates, key=tasks.rank, reverse=True)[:most]
    if any(x["epoch"] == state.evaluated for x in state.soup):
        contents = {"weights": _changing_weights(trainer)}
        write_from_main(contents, _path(folder, state.evaluated), trainer.world)


def remove_rejected(trainer: Trainer, state: State, folder: Path) -> None:
    """Remove the files of epochs that are no candidates; called once `last.pt` is written, so that
    a killed run finds the files that its checkpoint names."""
    if trainer.world.main:
        names = {_path(folder, x["epoch"]).name for x in state.soup}
        for path in folder.glob("soup-*.pt"):
            if path.name not in names:
                with suppress(OSError):
                    path.unlink()


def mix(
    trainer: Trainer, state: State, folder: Path, evaluate: Callable[[], Metrics]
) -> Metrics | None:
    """Load the greedy soup and return its metrics; None if no epoch joins the best one.

    From the best epoch on, each further one joins the average if the leading validation metric does
    not fall. Running statistics are averaged like weights.
    """
    tasks = trainer.module.tasks
    candidates = sorted(state.soup, key=tasks.rank, reverse=True)
    if len(candidates) < 2:
        return None
    metrics, epochs = candidates[0], [candidates[0]["epoch"]]
    weights = read(_path(folder, epochs[0]))["weights"]
    for candidate in candidates[1:]:
        added = read(_path(folder, candidate["epoch"]))["weights"]
        mixed = weighted_mean(weights, added, 1 / (len(epochs) + 1))
        _load(trainer, mixed)
        mixed_metrics = evaluate()
        if tasks.leading_value(mixed_metrics) >= tasks.leading_value(metrics):
            weights, metrics = mixed, mixed_metrics
            epochs.append(candidate["epoch"])
    _load(trainer, weights)
    return {**metrics, "soup": epochs} if len(epochs) > 1 else None


def weighted_mean(first: Weights, second: Weights, share: float) -> Weights:
    """Return the mean with the `share` of the second; counters are those of the first.

    >>> first, second = {"a": torch.zeros(1)}, {"a": torch.ones(1)}
    >>> weighted_mean(first, second, 0.25)
    {'a': tensor([0.2500])}
    """
    return {
        name: torch.lerp(x, second[name], share) if x.is_floating_point() else x
        for name, x in first.items()
    }


def _path(folder: Path, epoch: int) -> Path:
    return folder / f"soup-{epoch}.pt"


def _changing_weights(trainer: Trainer) -> Weights:
    """Return full copies of everything that training changes: trainable parameters and buffers."""
    frozen = {n for n, p in trainer.module.named_parameters() if not p.requires_grad}
    state = full_state_dict(trainer.module)
    return {name: x for name, x in state.items() if name not in frozen}


def _load(trainer: Trainer, weights: Mapping[str, Tensor]) -> None:
    """Load weights into the module and, since evaluation uses it, into the moving average."""
    load_full_state_dict(trainer.module, {**full_state_dict(trainer.module), **weights})
    if trainer.ema:
        for name, mean in trainer.ema.means.items():
            mean.copy_(shard_like(weights[name], mean))
