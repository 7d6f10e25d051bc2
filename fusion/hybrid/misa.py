"""MISA: separate modality-invariant (shared) and modality-specific (private) vectors."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

import torch
from torch import Tensor, nn

from fusionzoo.structures import Features, FusionOutput, StepContext

from ..attention._blocks import TransformerBlock
from ..base import FUSIONS, Fusion


@FUSIONS.register(family="hybrid", paper="Hazarika et al. 2020, arXiv:2005.03545", reads="pooled")
class MISA(Fusion):
    """Split each modality into a shared and a private vector and fuse all 2M by a transformer.

    a_m = V_m x_m; private P_m(a_m), shared S(a_m) with the same S for all modalities; embedding =
    MLP of the concatenated outputs of one transformer block over [P_1, ..., P_M, S_1, ..., S_M].
    Loss: cross-entropy + similarity CMD_5 of the shared vectors, over pairs + difference
    orthogonality of private to shared vectors and among private ones + reconstruction
    |D_m(P_m + S_m) - a_m|^2. Terms over pairs use the rows of this process's batch that have both
    modalities (0 below two rows). Differs from the authors' code, whose a_m pass a ReLU
    and a layer norm: the reconstruction's target a_m is detached, because shrinking it would lower
    the loss. Its block is post-norm, with a ReLU MLP 2048 wide (here pre-norm, GELU, 4 dim); the
    last layer of its MLP gives the logits, here a classifier follows; dropout in it is 0.5.

    Missing: its vectors are masked as keys, 0 in the concatenation, and left out of the loss.
    Pitfall: CMD matches the moments of batches, which are noise below a few dozen rows. Where
    the answer is only in the combination, `difference` delays learning: an exclusive or of three
    modalities takes 60 epochs instead of 20.
    Use when: modalities overlap strongly and you want to see what each adds.

    Settings:
        similarity: weight of the central moment discrepancy of shared vectors, at least 0
        difference: weight of the orthogonality loss, at least 0 (paper: 0.3 of a mean over D x D,
            which is 0.3 (64 / 128)^2 of ours at the authors' batch of 64 and width of 128)
        reconstruction: weight of the reconstruction loss, at least 0
        num_heads: attention heads of the transformer block; must divide `dim`
        dropout: dropout rate in the transformer block and the MLP, 0 to below 1

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
        difference: float = 0.075,
        reconstruction: float = 1.0,
        num_heads: int = 2,
        dropout: float = 0.1,
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        self.loss_weights = (similarity, difference, reconstruction)
        self.project = self.align()
        self.private = nn.ModuleDict({name: nn.Linear(dim, dim) for name in dims})
        self.shared = nn.Linear(dim, dim)
        self.decode = nn.ModuleDict({name: nn.Linear(dim, dim) for name in dims})
        self.block = TransformerBlock(dim, num_heads, dropout)
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
                network(a).sigmoid()
                for network, a in zip(self.private.values(), aligned.unbind(1), strict=True)
            ],
            dim=1,
        )
        shared = self.shared(aligned).sigmoid()
        vectors, mask = torch.cat([private, shared], dim=1), torch.cat([present, present], dim=1)
        vectors = self.block(vectors, mask).masked_fill(~mask[..., None], 0)
        embedding = self.or_null(self.join(vectors.flatten(1)), present)
        extra = {"aligned": aligned, "private": private, "shared": shared, "present": present}
        return FusionOutput(embedding, self.head(embedding), {}, None, extra)

    def loss(self, output: FusionOutput, target: Tensor, context: StepContext) -> Tensor:
        similarity, difference, reconstruction = self.loss_weights
        aligned, present = output.extra["aligned"], output.extra["present"]
        private, shared = output.extra["private"].float(), output.extra["shared"].float()
        pairs = list(combinations(range(len(self.dims)), 2))
        discrepancy = overlaps = shared.new_zeros(())
        for m in range(len(self.dims)):
            overlaps = overlaps + overlap(private[:, m], shared[:, m], present[:, m])
        for m, n in pairs:
            both_present = present[:, m] & present[:, n]
            distance = moment_discrepancy(shared[:, m], shared[:, n], both_present)
            discrepancy = discrepancy + distance / len(pairs)
            overlaps = overlaps + overlap(private[:, m], private[:, n], both_present)
        summed = (output.extra["private"] + output.extra["shared"]).unbind(1)
        decoded = torch.stack(
            [decode(x) for decode, x in zip(self.decode.values(), summed, strict=True)], dim=1
        )
        error = (decoded - aligned.detach()).float().square().mean(-1).masked_fill(~present, 0)
        reconstruction_loss = error.sum(1) / len(self.dims)
        batch_loss = similarity * discrepancy + difference * overlaps
        task_loss = context.criterion(output.logits, target)
        return task_loss + batch_loss + reconstruction * reconstruction_loss


def moment_discrepancy(x: Tensor, y: Tensor, rows: Tensor, orders: int = 5) -> Tensor:
    """Return the central moment discrepancy (Zellinger et al. 2017): (B, D) x 2, (B,) -> ().

    `rows` is the mask of the rows to compare; the result is 0 for fewer than two.
    """
    count = rows.sum().clamp(min=1)

    def mean(z: Tensor) -> Tensor:
        return z.masked_fill(~rows[:, None], 0).sum(0) / count

    centre_x, centre_y = mean(x), mean(y)
    gaps = [centre_x - centre_y]
    for order in range(2, orders + 1):
        gaps.append(mean((x - centre_x) ** order) - mean((y - centre_y) ** order))
    # Smoothed, because the square root has no finite slope at 0, where the moments are equal.
    norms = torch.stack([(gap.square().sum() + 1e-12).sqrt() - 1e-6 for gap in gaps])
    return torch.where(rows.sum() >= 2, norms.sum(), 0)


def overlap(x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
    """Return |X^T Y|^2 / rows^2, from 0 (orthogonal columns) to 1: (B, D) x 2, (B,) -> ().

    X and Y are x and y over the rows of the mask `rows`, centred and L2-normalised per row. Differs
    from the authors' code, which divides by D^2, so that the weight grows with the square of the
    batch size, and detaches the norms, so that shrinking all rows towards their mean lowers the
    loss and private vectors collapse (measured: exclusive or at chance; solved with gradients
    through the norms).
    """
    count = rows.sum().clamp(min=1)

    def unit(z: Tensor) -> Tensor:
        masked = z.masked_fill(~rows[:, None], 0)
        centred = (masked - masked.sum(0) / count).masked_fill(~rows[:, None], 0)
        return centred / ((centred.square().sum(1, keepdim=True) + 1e-12).sqrt())

    inner = unit(x).T @ unit(y)
    return torch.where(rows.sum() >= 2, inner.square().sum() / count**2, 0)
