"""MMIN: predict ("imagine") the features of absent modalities from those of present ones."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from einops import rearrange
from torch import Tensor, nn

from fusionzoo.errors import FusionZooError
from fusionzoo.structures import Features, FusionOutput, Phase, StepContext

from ..base import FUSIONS, Fusion, linear_of


class Imagination(nn.Module):
    """Cascade of residual autoencoders, initialised to the identity."""

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
    """Predict the features of absent modalities by autoencoders, trained on hidden modalities.

    a_m = tanh(V_m x_m); h = [a of present modalities; 0]; imagined = h + sum of the residual
    blocks; embedding = MLP [a of present modalities; imagined ones of the others]. Phase "teacher"
    trains encoders, V_m, MLP and head. Phase "imagine" freezes encoders and V_m; in every step a
    random proper subset of each sample's modalities is hidden, and loss = cross-entropy + strength
    (|imagined - a|^2 over hidden modalities + |reverse(imagined) - a|^2 over the others), where
    reverse is a second cascade of autoencoders and a has no gradient. Differs from the paper and
    its code: the classifier reads features, not the autoencoders' hidden layers, and complete
    samples bypass these; an autoencoder has one hidden layer and starts as the identity (theirs:
    128, 64, 32 and back, and an MLP behind all); only hidden modalities are targets of `imagined`,
    and those that a sample truly lacks never are.

    Missing: predicted from the others. Complete samples bypass the autoencoders.
    Pitfall: targets must have no gradient, or the teacher's features collapse.
    Use when: much is missing at test time and training has enough complete samples.

    Settings:
        blocks: residual autoencoders per cascade, at least 1
        hidden: hidden width of each autoencoder, at least 1
        strength: weight of the two reconstruction losses, at least 0
        teacher_share: share of the training steps spent in phase "teacher", between 0 and 1
            (exclusive)

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

    def imagine(self, aligned: Tensor, visible: Tensor) -> Tensor:
        """Predict all features from the visible ones: (B, M, dim), (B, M) -> (B, M, dim)."""
        masked = rearrange(aligned.masked_fill(~visible[..., None], 0), "b m d -> b (m d)")
        return rearrange(self.forth(masked), "b (m d) -> b m d", m=len(self.dims))

    def fuse(self, aligned: Tensor, imagined: Tensor, visible: Tensor) -> Tensor:
        """Embed visible features with imagined ones: (B, M, dim) x 2, (B, M) -> (B, dim)."""
        completed = torch.where(visible[..., None], aligned, imagined)
        return self.or_null(self.join(rearrange(completed, "b m d -> b (m d)")), visible)

    def loss(self, output: FusionOutput, target: Tensor, context: StepContext) -> Tensor:
        if context.phase == 0:
            return context.criterion(output.logits, target)
        aligned, present = output.extra["aligned"].detach(), output.extra["present"]
        visible = random_subset(present)
        hidden = present & ~visible
        imagined = self.imagine(aligned, visible)
        logits = self.head(self.fuse(aligned, imagined, visible)) + linear_of(output, visible)
        reverse = rearrange(
            self.back(rearrange(imagined, "b m d -> b (m d)")), "b (m d) -> b m d", m=len(self.dims)
        )
        errors = squared_error(imagined, aligned, hidden) + squared_error(reverse, aligned, visible)
        return context.criterion(logits, target) + self.strength * errors


def random_subset(present: Tensor) -> Tensor:
    """Draw a non-empty proper subset of each row's modalities: (B, M) -> (B, M).

    Rows with at most one modality stay unchanged.
    """
    order = torch.rand(present.shape, device=present.device).masked_fill(~present, 2.0)
    rank = order.argsort(1).argsort(1)
    count = present.sum(1)
    share = torch.rand(present.shape[0], device=present.device)
    size = 1 + (share * (count - 1).clamp(min=0)).floor().long().clamp(max=present.shape[1] - 1)
    return present & (rank < size[:, None])


def squared_error(predicted: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """Average the squared error over the masked-in modalities: (B, M, D) x 2, (B, M) -> (B,)."""
    error = (predicted - target).float().square().mean(-1).masked_fill(~mask, 0)
    return error.sum(1) / mask.sum(1).clamp(min=1)
