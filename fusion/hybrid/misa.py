"""MISA: what the modalities share, and what each keeps to itself, in separate vectors."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

import torch
from torch import Tensor, nn

from fusionzoo.structures import Features, FusionOutput, StepContext

from ..attention._blocks import Block
from ..base import FUSIONS, Fusion


@FUSIONS.register(family="hybrid", paper="Hazarika et al. 2020, arXiv:2005.03545", reads="pooled")
class MISA(Fusion):
    """Split each modality into a shared and a private vector, attend over all 2M, and join them.

    a_m = V_m x_m; private P_m(a_m), shared S(a_m) with one S; [P_1, S_1, ...] through one
    transformer block, joined by a perceptron. Loss: cross-entropy + `similarity` CMD_5 between the
    shared vectors of pairs + `difference` orthogonality of private to shared and to one another +
    `reconstruction` |D_m(P_m + S_m) - a_m|^2. Pair terms are taken over the rows that have both
    (0 below two rows) and over the batch of one process.

    Missing: its vectors are no keys and 0 in the join; no term of the loss counts it.
    Pitfall: moment matching compares batches: below a few dozen rows it is noise.
    Use when: modalities overlap strongly and you want to see what each adds.

    Shapes:
        features[name].pooled: (B, dims[name])
        returns: embedding (B, dim), logits (B, K)
    """

    def __init__(
        self,
        dims: Mapping[str, int],
        dim: int,
        num_outputs: int,
        *,
        similarity: float = 1.0,
        difference: float = 0.3,
        reconstruction: float = 1.0,
        num_heads: int = 2,
        dropout: float = 0.1,
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        self.strengths = (similarity, difference, reconstruction)
        self.project = self.align()
        self.private = nn.ModuleDict({name: nn.Linear(dim, dim) for name in dims})
        self.shared = nn.Linear(dim, dim)
        self.decode = nn.ModuleDict({name: nn.Linear(dim, dim) for name in dims})
        self.block = Block(dim, num_heads, dropout)
        self.join = nn.Sequential(
            nn.Linear(2 * len(dims) * dim, 3 * dim),
            nn.Dropout(dropout),
            nn.ReLU(),
            nn.Linear(3 * dim, dim),
        )
        self.head = nn.Linear(dim, num_outputs)

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        aligned, present = self.aligned(features)
        private = torch.stack(
            [
                own(a).sigmoid()
                for own, a in zip(self.private.values(), aligned.unbind(1), strict=True)
            ],
            dim=1,
        )
        shared = self.shared(aligned).sigmoid()
        vectors, real = torch.cat([private, shared], dim=1), torch.cat([present, present], dim=1)
        vectors = self.block(vectors, real).masked_fill(~real[..., None], 0)
        embedding = self.or_null(self.join(vectors.flatten(1)), present)
        extra = {"aligned": aligned, "private": private, "shared": shared, "present": present}
        return FusionOutput(embedding, self.head(embedding), {}, None, extra)

    def loss(self, output: FusionOutput, target: Tensor, context: StepContext) -> Tensor:
        similarity, difference, reconstruction = self.strengths
        aligned, present = output.extra["aligned"], output.extra["present"]
        private, shared = output.extra["private"].float(), output.extra["shared"].float()
        pairs = list(combinations(range(len(self.dims)), 2))
        near = apart = shared.new_zeros(())
        for m in range(len(self.dims)):
            apart = apart + overlap(private[:, m], shared[:, m], present[:, m])
        for m, n in pairs:
            both = present[:, m] & present[:, n]
            near = near + moment_discrepancy(shared[:, m], shared[:, n], both) / len(pairs)
            apart = apart + overlap(private[:, m], private[:, n], both)
        back = torch.stack(
            [
                decode(x)
                for decode, x in zip(
                    self.decode.values(),
                    (output.extra["private"] + output.extra["shared"]).unbind(1),
                    strict=True,
                )
            ],
            dim=1,
        )
        error = (back - aligned).float().square().mean(-1).masked_fill(~present, 0)
        rebuilt = error.sum(1) / len(self.dims)
        batch = similarity * near + difference * apart
        return context.criterion(output.logits, target) + batch + reconstruction * rebuilt


def moment_discrepancy(x: Tensor, y: Tensor, rows: Tensor, orders: int = 5) -> Tensor:
    """Central moment discrepancy (Zellinger et al. 2017) over some rows: (B, D) x 2, (B,) -> ()."""
    count = rows.sum().clamp(min=1)

    def mean(z: Tensor) -> Tensor:
        return z.masked_fill(~rows[:, None], 0).sum(0) / count

    centre_x, centre_y = mean(x), mean(y)
    gaps = [centre_x - centre_y]
    for order in range(2, orders + 1):
        gaps.append(mean((x - centre_x) ** order) - mean((y - centre_y) ** order))
    # The root has no slope at 0, where the moments are equal.
    norms = torch.stack([(gap.square().sum() + 1e-12).sqrt() - 1e-6 for gap in gaps])
    return torch.where(rows.sum() >= 2, norms.sum(), 0)


def overlap(x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
    """Return |X^T Y|^2 / rows^2, from 0 (orthogonal columns) to 1: (B, D) x 2, (B,) -> ().

    Rows are centred and scaled to unit length. Differs from the reference, which divides by D^2, so
    that the strength grows with the square of the batch, and which detaches the lengths: then
    shrinking all rows towards their mean lowers the loss, and private vectors die out (exclusive or
    at chance; 1.0 with lengths that carry gradient).
    """
    count = rows.sum().clamp(min=1)

    def unit(z: Tensor) -> Tensor:
        kept = z.masked_fill(~rows[:, None], 0)
        centred = (kept - kept.sum(0) / count).masked_fill(~rows[:, None], 0)
        return centred / ((centred.square().sum(1, keepdim=True) + 1e-12).sqrt())

    inner = unit(x).T @ unit(y)
    return torch.where(rows.sum() >= 2, inner.square().sum() / count**2, 0)
