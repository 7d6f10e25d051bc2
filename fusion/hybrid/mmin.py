"""MMIN: imagine an absent modality's features from those that are there."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from einops import rearrange
from torch import Tensor, nn

from fusionzoo.errors import FusionZooError
from fusionzoo.structures import Features, FusionOutput, Phase, StepContext

from ..base import FUSIONS, Fusion


class Imagination(nn.Module):
    """A cascade of residual autoencoders; it is the identity at the start."""

    def __init__(self, width: int, hidden: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))
            for _ in range(blocks)
        )
        for block in self.blocks:
            nn.init.zeros_(block[2].weight)  # type: ignore[index]
            nn.init.zeros_(block[2].bias)  # type: ignore[index]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


@FUSIONS.register(family="hybrid", paper="Zhao et al. 2021, ACL", reads="pooled", at_least=2)
class MMIN(Fusion):
    """Learn features with all that is there; then hide some, imagine them, and answer all the same.

    a_m = tanh(V_m x_m); h = [a present; 0]; imagined = h + sum of the residual blocks, of which
    only the absent entries are used; embedding = MLP [a; imagined]. Phase "teacher": encoders,
    V_m, MLP and head learn on what each sample has. Phase "imagine": encoders and V_m rest and are
    the teacher; in every step each sample hides a random proper subset of its modalities; loss =
    cross-entropy + `strength` (|imagined - a|^2 over what was hidden + |reverse(imagined) - a|^2
    over what was not), a without gradient. Differs from the paper: one network for all patterns;
    the classifier reads the imagined features beside the given ones, not the autoencoders' hidden
    layers; and what a sample truly lacks is imagined but never a target.

    Missing: imagined from the others. A complete sample bypasses the imagination.
    Pitfall: targets must carry no gradient, or the teacher collapses onto the imagination.
    Use when: much is missing at test time, and training has enough complete samples.

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
        blocks: int = 5,
        hidden: int = 128,
        strength: float = 1.0,
        teacher_share: float = 0.5,
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        if not 0 < teacher_share < 1:
            raise FusionZooError(f"teacher_share={teacher_share} is not within 0 to 1")
        self.strength = strength
        self.phases = (
            Phase("teacher", teacher_share, trains=("project", "join", "head", "null")),
            Phase(
                "imagine",
                1 - teacher_share,
                trains=("forth", "back", "join", "head", "null"),
                encoders=False,
            ),
        )
        self.project = self.align()
        self.forth = Imagination(len(dims) * dim, hidden, blocks)
        self.back = Imagination(len(dims) * dim, hidden, blocks)
        self.join = nn.Sequential(nn.Linear(len(dims) * dim, dim), nn.ReLU(), nn.Linear(dim, dim))
        self.head = nn.Linear(dim, num_outputs)

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        aligned, present = self.aligned(features)
        aligned = aligned.tanh()  # an absent row stays 0
        embedding = self.fuse(aligned, self.imagine(aligned, present), present)
        extra = {"aligned": aligned, "present": present}
        return FusionOutput(embedding, self.head(embedding), {}, None, extra)

    def imagine(self, aligned: Tensor, given: Tensor) -> Tensor:
        """Imagine all features from the given ones: (B, M, dim), (B, M) -> (B, M, dim)."""
        seen = rearrange(aligned.masked_fill(~given[..., None], 0), "b m d -> b (m d)")
        return rearrange(self.forth(seen), "b (m d) -> b m d", m=len(self.dims))

    def fuse(self, aligned: Tensor, imagined: Tensor, given: Tensor) -> Tensor:
        """Join given features with imagined ones: (B, M, dim) x 2, (B, M) -> (B, dim)."""
        whole = torch.where(given[..., None], aligned, imagined)
        return self.or_null(self.join(rearrange(whole, "b m d -> b (m d)")), given)

    def loss(self, output: FusionOutput, target: Tensor, context: StepContext) -> Tensor:
        if context.phase == 0:
            return context.criterion(output.logits, target)
        aligned, present = output.extra["aligned"].detach(), output.extra["present"]
        given = keep_some(present)
        hidden = present & ~given
        imagined = self.imagine(aligned, given)
        logits = self.head(self.fuse(aligned, imagined, given))
        again = rearrange(
            self.back(rearrange(imagined, "b m d -> b (m d)")), "b (m d) -> b m d", m=len(self.dims)
        )
        errors = squared_error(imagined, aligned, hidden) + squared_error(again, aligned, given)
        return context.criterion(logits, target) + self.strength * errors


def keep_some(present: Tensor) -> Tensor:
    """Draw a proper subset of each row's modalities, never empty: (B, M) -> (B, M).

    A row with one modality or none keeps what it has.
    """
    order = torch.rand(present.shape, device=present.device).masked_fill(~present, 2.0)
    rank = order.argsort(1).argsort(1)
    count = present.sum(1)
    share = torch.rand(len(present), device=present.device)
    kept = 1 + (share * (count - 1).clamp(min=0)).floor().long().clamp(max=present.shape[1] - 1)
    return present & (rank < kept[:, None])


def squared_error(found: Tensor, wanted: Tensor, counted: Tensor) -> Tensor:
    """Average the squared error over the counted modalities: (B, M, D) x 2, (B, M) -> (B,)."""
    error = (found - wanted).float().square().mean(-1).masked_fill(~counted, 0)
    return error.sum(1) / counted.sum(1).clamp(min=1)
