"""Multimodal learning with alternating unimodal adaptation: one modality at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fusionzoo.distributed.fsdp import like, whole
from fusionzoo.structures import Batch, StepContext

from .base import BALANCE, Balance, BatchSum, LossTerm, StrategyInputs, pooled_of


@BALANCE.register(family="schedule", paper="Zhang et al. 2024, CVPR, arXiv:2311.10707")
class MLA(Balance):
    """Let the modalities learn in turn through the shared head, without forgetting each other.

    Each step makes one update per modality, in which only this modality is present and only its
    encoder learns. Before it, the gradient of the fusion's head is projected, W.grad <- W.grad P,
    away from what earlier turns fed it: P <- P - (P r)(P r)' / (alpha + r' P r), r the mean
    embedding of the turn, P = I at first, alpha = 0.1^(1 + share of the epoch done), or `alpha`.
    `joint` adds a turn with everything, unprojected, for fusions whose joint answer is not that of
    its parts. Differs from the reference: the recursive-least-squares denominator is the scalar
    that it must be, not an outer product; P is not normed unless `normalise`; one's own turn is
    projected by the past only. At test time the fusion answers as it is.

    Missing: a row takes part in the turns of the modalities it has.
    Pitfall: P only ever shrinks: in long runs the head stops along every common direction.
    Use when: joint training lets one modality win, and a linear head is shared (`mean`, `sum`).

    Shapes: r (dim,), P (dim, dim), head.weight (K, dim)
    """

    surgery = True
    projector: Tensor

    def __init__(
        self,
        inputs: StrategyInputs,
        *,
        alpha: float | None = None,
        normalise: bool = False,
        joint: bool = False,
        start: float = 0.0,
        end: float | None = None,
    ) -> None:
        super().__init__(inputs, start=start, end=end)
        self.require(alpha is None or alpha > 0, f"alpha={alpha}; it must be positive")
        head = getattr(self.fusion, "head", None)
        self.require(
            isinstance(head, nn.Linear) and head.in_features == self.fusion.dim,
            f"{type(self.fusion).__name__} has no linear head that all modalities share: take a"
            " fusion that has one, say --fusion.name mean",
        )
        self.alpha, self.normalise, self.joint = alpha, normalise, joint
        self.register_buffer("projector", torch.eye(self.fusion.dim))
        self.tally = BatchSum()  # sum of embeddings, and rows: (dim + 1,)

    def turns(self, context: StepContext) -> Sequence[str | None]:
        return (*self.widths, None) if self.joint else tuple(self.widths)

    def edit_batch(self, batch: Batch, rows: Tensor, context: StepContext) -> Batch:
        if context.turn is None:
            return batch
        column = list(self.widths).index(context.turn)
        present = torch.zeros_like(batch.present)
        present[:, column] = batch.present[:, column]
        return batch._replace(present=present)

    def main_loss(self, context: StepContext, loss: LossTerm) -> LossTerm:
        if context.turn is None:
            return loss
        present = pooled_of(context.features, context.turn)[1]
        fed = context.output.embedding.detach().where(present[:, None], 0).to(self.projector)
        self.tally.add(torch.cat([fed.sum(0), present.sum()[None].to(fed)]), context)
        return loss._replace(mask=loss.mask & present)

    def edit_gradients(
        self, encoders: Mapping[str, Sequence[nn.Parameter]], context: StepContext
    ) -> None:
        if context.turn is None:
            return
        weight = self.fusion.head.weight  # type: ignore[union-attr]
        assert isinstance(weight, nn.Parameter)
        if weight.grad is not None:
            given = whole(weight.grad)
            weight.grad.copy_(like(given @ self.projector.to(given), weight.grad))
        fed = self.tally.take(self.world)
        if fed[-1] > 0:
            alpha = 0.1 ** (1 + context.epoch % 1) if self.alpha is None else self.alpha
            self.projector.copy_(shrink(self.projector, fed[:-1] / fed[-1], alpha))
            if self.normalise:
                self.projector.div_(self.projector.norm())


def shrink(projector: Tensor, direction: Tensor, alpha: float) -> Tensor:
    """Make one step of recursive least squares: (D, D), (D,) -> (D, D)."""
    seen = projector @ direction
    return projector - torch.outer(seen, seen) / (alpha + direction @ seen)
