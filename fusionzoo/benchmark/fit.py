"""Train the models of one or several seeds on data in memory, with early stopping."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fusionzoo.errors import FusionZooError
from fusionzoo.training.optim.optimizers import set_rates
from fusionzoo.training.optim.schedules import phased

from .trainers import Feed, StackedTrainer, Trainer, Weights

StopEarly = Callable[[int, float], bool]  # epochs done, validation loss -> whether to stop


class FitResult(NamedTuple):
    """The result of training with one seed."""

    weights: Weights  # of the best epoch
    best_epoch: int
    epochs: int  # until the patience ran out
    loss: float  # of the best epoch, on the validation split


def fit(
    trainer: Trainer,
    feed: Feed,
    targets: Tensor,
    train: Tensor,
    val: Tensor,
    seeds: Sequence[int],
    stop_early: StopEarly | None = None,
) -> list[FitResult]:
    """Train until the patience of every seed has run out; each keeps its best epoch.

    `targets` are those of all rows; `train` and `val` are rows. Every seed has its own order of
    samples. A fusion that trains in phases is validated in the last one only. `stop_early` is asked
    after each validation, with the mean loss over the seeds.
    """
    cfg = trainer.cfg
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    steps = math.ceil(len(train) / cfg.batch_size)
    plan = phased(cfg.optim, trainer.phases, cfg.epochs * steps, steps)
    best: list[FitResult | None] = [None] * len(seeds)
    last_epochs = [cfg.epochs] * len(seeds)
    alone = not isinstance(trainer, StackedTrainer)
    for epoch in range(cfg.epochs):
        order = torch.stack([torch.randperm(len(train), generator=g) for g in generators])
        chunks = order.split(cfg.batch_size, dim=1)
        rows = [train[chunk[0] if alone else chunk] for chunk in chunks]
        restarts = trainer.begin_epoch(epoch, epoch * steps)
        current_phase = -1
        for number, model_input in enumerate(feed(rows, epoch)):
            phase, factors = plan(epoch * steps + number, restarts=restarts)
            if phase != current_phase:
                trainer.train(True, phase)
                current_phase = phase
            set_rates(trainer.optimizer, factors)
            target = targets[train[chunks[number]]]
            train_rows = chunks[number].to(target.device)
            trainer.step(model_input, train_rows, target, epoch + number / steps, phase)
        if current_phase < len(trainer.phases) - 1:
            continue
        losses = validate(trainer, feed, targets, val, len(seeds))
        _keep_best(trainer, losses, epoch, best, last_epochs)
        if all(last_epoch <= epoch + 1 for last_epoch in last_epochs):
            break
        if stop_early is not None and stop_early(epoch + 1, sum(losses) / len(losses)):
            break
    return _finish(best, last_epochs, seeds)


def _keep_best(
    trainer: Trainer,
    losses: Sequence[float],
    epoch: int,
    best: list[FitResult | None],
    last_epochs: list[int],
) -> None:
    """Update each seed's best epoch, and its last one where the patience has run out."""
    patience = trainer.cfg.patience
    for index, loss in enumerate(losses):
        previous = best[index]
        if last_epochs[index] <= epoch:
            continue
        if previous is None or loss < previous.loss:
            best[index] = FitResult(trainer.weights(index), epoch + 1, 0, loss)
        elif patience is not None and epoch + 1 - previous.best_epoch >= patience:
            last_epochs[index] = min(last_epochs[index], epoch + 1)


def _finish(
    best: Sequence[FitResult | None], last_epochs: Sequence[int], seeds: Sequence[int]
) -> list[FitResult]:
    results = [
        result._replace(epochs=last_epoch)
        for result, last_epoch in zip(best, last_epochs, strict=True)
        if result
    ]
    for seed, result in zip(seeds, results, strict=True):
        if not math.isfinite(result.loss):
            raise FusionZooError(
                f"seed {seed}: the validation loss is {result.loss}; a lower --optim.lr may help"
            )
    return results


@torch.no_grad()
def validate(
    trainer: Trainer, feed: Feed, targets: Tensor, val: Tensor, num_seeds: int
) -> list[float]:
    """Return each seed's mean loss on the validation split, in which every row has a label."""
    trainer.train(False)
    total = torch.zeros(num_seeds, dtype=torch.float64)
    chunks = val.split(512)
    alone = not isinstance(trainer, StackedTrainer)
    rows = [chunk if alone else chunk.expand(num_seeds, -1) for chunk in chunks]
    for chunk, model_input in zip(chunks, feed(rows, -1), strict=True):
        target = targets[chunk]
        losses = [trainer.tasks.criterion(x, target) for x in trainer.logits(model_input)]
        total += torch.stack([loss.double().sum() for loss in losses])
    return (total / len(val)).tolist()
