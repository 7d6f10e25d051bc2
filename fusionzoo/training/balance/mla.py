"""Multimodal learning with alternating unimodal adaptation: train one modality at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fusionzoo.machine.fsdp import full_tensor, shard_like
from fusionzoo.structures import Batch, StepContext

from ._shared import BatchSum
from .base import BALANCE, Balance, LossTerm, StrategyInputs, pooled_of


@BALANCE.register(family="schedule", paper="Zhang et al. 2024, CVPR, arXiv:2311.10707")
class MLA(Balance):
    """Train the modalities in turn with a shared head whose gradient is projected.

    Each step makes one update per modality, with only this modality present and only its encoder
    trained. Before the update the gradient of the fusion's head is projected away from the
    embeddings of earlier turns: W.grad <- W.grad P. Afterwards P <- P - (P r)(P r)' / (alpha +
    r' P r), r the mean embedding of the turn, P = I initially. Evaluation uses the fusion
    unchanged. Differs from the authors' code: the denominator of this recursive least-squares step
    is the scalar above instead of an outer product, and a turn is projected by earlier turns only.

    Missing: a row takes part in the turns of the modalities it has.
    Pitfall: P only ever shrinks: in long runs the head stops learning along common directions.
    Use when: one modality dominates joint training and all share a linear head (`mean`, `sum`).

    Settings:
        alpha: regulariser of the least-squares step, above 0; None for 0.1^(1 + fraction of the
            epoch done)
        normalise: whether to divide P by its Frobenius norm after each update (authors' code: True)
        joint: whether to add a turn with all modalities and no projection, for fusions whose
            prediction is not the sum of unimodal ones

    Shapes: r (dim,), P (dim, dim), head.weight (K, dim)
    """

    raw_inputs = False
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
        embedding = context.output.embedding.detach().where(present[:, None], 0).to(self.projector)
        rows = present[:, None].to(embedding)
        if context.sample_weight is not None:
            weight = context.sample_weight[:, None].to(embedding)
            embedding, rows = weight * embedding, weight * rows
        self.tally.add(torch.cat([embedding.sum(0), rows.sum(0)]), context)
        return loss._replace(mask=loss.mask & present)

    def edit_gradients(
        self, encoders: Mapping[str, Sequence[nn.Parameter]], context: StepContext
    ) -> None:
        if context.turn is None:
            return
        weight = self.fusion.head.weight  # type: ignore[union-attr]
        assert isinstance(weight, nn.Parameter)
        if weight.grad is not None:
            gradient = full_tensor(weight.grad)
            weight.grad.copy_(shard_like(gradient @ self.projector.to(gradient), weight.grad))
        sums = self.tally.take(self.world)  # of embeddings, then the number of rows
        if sums[-1] > 0:
            alpha = 0.1 ** (1 + context.epoch % 1) if self.alpha is None else self.alpha
            self.projector.copy_(shrink(self.projector, sums[:-1] / sums[-1], alpha))
            if self.normalise:
                self.projector.div_(self.projector.norm())


def shrink(projector: Tensor, direction: Tensor, alpha: float) -> Tensor:
    """Apply one recursive least-squares step to the projector: (D, D), (D,) -> (D, D)."""
    projected = projector @ direction
    return projector - torch.outer(projected, projected) / (alpha + direction @ projected)
