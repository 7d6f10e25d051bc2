"""Gradient blending: weight each head by its generalisation against its overfitting."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn

from fusionzoo.machine.distributed import total
from fusionzoo.structures import Batch, StepContext

from ..loaders import chunks
from ..optim import autocast
from ._shared import ModalityHeads
from .base import BALANCE, Balance, LossTerm, RunningTrainer, StrategyInputs


@BALANCE.register(family="loss", paper="Wang et al. 2020, CVPR, arXiv:1905.12681")
class GBlend(Balance):
    """Weight the losses of the fusion and of each modality's head by G / O^2.

    For each head k (one per modality, and the fusion's) a copy of the model is trained on that loss
    only: G_k = decrease of its validation loss, O_k = increase of (validation - training loss).
    w_k = G_k / O_k^2, normalised to sum 1; the model is trained on sum_k w_k L_k. G is at least 0;
    if no head gains, the weights are equal. Measuring takes M + 1 times `epochs` passes over the
    training split. It leaves weights, optimiser, random generators and the order of samples
    unchanged; the copies are trained without other strategies. Differs from popular code (that of
    the authors reads w_k): differences instead of final losses, and no absolute values. Differs
    from the paper, which trains each head for longer and has no floor for O.

    Missing: a row counts for the heads of the modalities it has.
    Pitfall: one epoch on a small validation split measures noise, and O is squared: with a floor of
    0.1, one head of four got half to three quarters of the weight on `digits`, depending on the
    seed (results/LOG.md). Test data must not be used.
    Use when: modalities overfit at very different rates and training time is not a concern.

    Settings:
        every: epochs between measurements of the weights; 0 to measure once, before the first epoch
        epochs: epochs each copy is trained, at least 1 (paper: more)
        floor: smallest O as a share of the largest, above 0 to 1 (paper: no floor)

    Shapes: G (M + 1,), O (M + 1,) -> w (M + 1,), the fusion last
    """

    encoders_only = True
    validates = True
    raw_inputs = False
    shards = False  # copies of the model
    weights: Tensor
    measured: Tensor

    def __init__(
        self,
        inputs: StrategyInputs,
        *,
        every: int = 0,
        epochs: int = 1,
        floor: float = 0.5,
        start: float = 0.0,
        end: float | None = None,
    ) -> None:
        super().__init__(inputs, start=start, end=end)
        self.require(every >= 0, f"every={every}; it must be at least 0 (0: once)")
        self.require(epochs >= 1, f"epochs={epochs}; it must be at least 1")
        self.require(0 < floor <= 1, f"floor={floor:g}; it must be in (0, 1]")
        self.every, self.epochs, self.floor = every, epochs, floor
        self.heads = ModalityHeads(self.widths, self.fusion.num_outputs)
        count = len(self.widths) + 1
        self.register_buffer("weights", torch.full((count,), 1 / count))
        self.register_buffer("measured", torch.tensor(0))

    def begin_epoch(
        self, trainer: RunningTrainer, loaders: Mapping[str, Any], context: StepContext
    ) -> None:
        since_start = int(context.epoch) - ceil(self.start)
        if since_start % self.every if self.every else int(self.measured):
            return
        heads = (*self.widths, None)
        with preserved_generators():
            measured = [self.measure(head, trainer, loaders, context) for head in heads]
        losses = torch.tensor(measured, dtype=torch.float64)  # (M + 1, start or end, train or val)
        gap = losses[..., 1] - losses[..., 0]
        gains, overfits = losses[:, 0, 1] - losses[:, 1, 1], gap[:, 1] - gap[:, 0]
        self.weights.copy_(blend(gains, overfits, self.floor))
        self.measured += 1

    def measure(
        self,
        head: str | None,
        trainer: RunningTrainer,
        loaders: Mapping[str, Any],
        context: StepContext,
    ) -> list[tuple[float, float]]:
        """Train a copy by one head; return (training, validation) loss before and after."""

        def learn_by_one_head(module: Any) -> None:
            copied = module.balance[self.name]
            module.balance = nn.ModuleDict({self.name: _OneHead(self, copied, head)})

        copy = trainer.copy(learn_by_one_head)
        splits = (loaders["train"], loaders["val"])
        before = [mean_loss(copy, loader, context) for loader in splits]
        for epoch in range(self.epochs):
            number = int(context.epoch) + epoch
            for batches in chunks(loaders["train"], copy.cfg.train.accumulate, number):
                copy.step(batches, context)
        after = [mean_loss(copy, loader, context) for loader in splits]
        return [(before[0], before[1]), (after[0], after[1])]

    def main_loss(self, context: StepContext, loss: LossTerm) -> LossTerm:
        return loss._replace(weight=loss.weight * self.weights[-1])

    def extra_losses(self, context: StepContext) -> dict[str, LossTerm]:
        weights = dict(zip(self.widths, self.weights.unbind(), strict=False))
        return self.heads.losses(context, self.name, weights)


class _OneHead(Balance):
    """Train on the loss of one modality's head only, or on the fusion's if `head` is None."""

    def __init__(self, source: GBlend, copied: GBlend, head: str | None) -> None:
        targets = torch.zeros(0, dtype=torch.int64)
        super().__init__(StrategyInputs(copied.model, targets, source.seed, source.world))
        self.heads, self.head = copied.heads, head

    def edit_batch(self, batch: Batch, rows: Tensor, context: StepContext) -> Batch:
        if self.head is None:
            return batch
        only = torch.tensor([name == self.head for name in self.widths])
        return batch._replace(present=batch.present & only.to(batch.present.device))

    def main_loss(self, context: StepContext, loss: LossTerm) -> LossTerm:
        if self.head is None:
            return loss
        (term,) = self.heads.losses(context, "", {self.head: 1.0}).values()
        # The fused loss with weight 0, because under DDP every parameter needs a gradient.
        return term._replace(values=term.values + 0.0 * loss.values)


@torch.no_grad()
def mean_loss(trainer: RunningTrainer, loader: Any, context: StepContext) -> float:
    """Return the loss that a copy learns by, in evaluation mode, over a split and all processes."""
    module, device = trainer.module, trainer.world.device
    module.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for batch in loader:
        rows = module.rows(batch)
        for strategy in module.strategies(context):
            batch = strategy.edit_batch(batch, rows, context)
        with autocast(trainer.cfg.train, device):
            batch = batch.to(device)
            term = module(batch, context._replace(rows=rows.to(device))).main_loss
        weight = module.sample_weight(batch)  # that the values are multiplied by
        counts = term.mask if weight is None else weight * term.mask
        sums += torch.stack([term.values.where(term.mask, 0).sum(), counts.sum()]).double()
    loss, count = total(sums, trainer.world).tolist()
    return float(loss / count) if count else 0.0


def blend(gains: Tensor, overfits: Tensor, floor: float) -> Tensor:
    """Return the weights w that maximise (sum w G)^2 / sum w^2 O^2: (k,), (k,) -> (k,).

    O is at least `floor` times its largest value.
    """
    largest = overfits.max()
    floored = overfits.clamp(min=floor * largest) if largest > 0 else torch.ones_like(overfits)
    weights = gains.clamp(min=0) / floored.square()
    equal = torch.full_like(weights, 1 / len(weights))
    return weights / weights.sum() if weights.sum() > 0 else equal


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Restore the state of the global random generators on exit."""
    state = random.getstate()
    with torch.random.fork_rng():
        yield
    random.setstate(state)
