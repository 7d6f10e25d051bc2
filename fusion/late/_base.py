"""What the late fusions share: a classifier per modality, and an embedding beside it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fusionzoo.structures import Features, FusionOutput, StepContext

from ..base import Fusion, present_mean


class LateFusion(Fusion):
    """Let each modality vote: z_m = head_m(a_m) with a_m = V_m x_m; a strategy combines the votes.

    The embedding is the mean of the a_m that are present. A sample with no modality is answered
    with the learned `prior_logits`.
    """

    def __init__(self, dims: Mapping[str, int], dim: int, num_outputs: int) -> None:
        super().__init__(dims, dim, num_outputs)
        self.project = self.align()
        self.heads = nn.ModuleDict({name: nn.Linear(dim, num_outputs) for name in dims})
        self.prior_logits = nn.Parameter(torch.zeros(num_outputs))

    def votes(self, features: Mapping[str, Features]) -> tuple[Tensor, Tensor, Tensor]:
        """Return embedding (B, dim), votes (B, M, K) with zeros where absent, presence (B, M)."""
        aligned, present = self.aligned(features)
        rows = zip(self.heads.values(), aligned.unbind(1), strict=True)
        votes = torch.stack([head(a) for head, a in rows], dim=1)
        votes = votes.masked_fill(~present[..., None], 0)
        return self.or_null(present_mean(aligned, present), present), votes, present

    def output(
        self,
        embedding: Tensor,
        logits: Tensor,
        votes: Tensor,
        present: Tensor,
        weights: Tensor | None,
        **extra: Tensor,
    ) -> FusionOutput:
        """Answer with the prior where nothing is there, and hand out the votes by modality."""
        prior = self.prior_logits.to(logits.dtype)
        logits = torch.where(present.any(1)[:, None], logits, prior)
        unimodal = dict(zip(self.dims, votes.unbind(1), strict=True))
        return FusionOutput(embedding, logits, unimodal, weights, {"present": present, **extra})


class VotersAlone(LateFusion):
    """Train each modality's classifier on its own loss, (B,); the prior where nothing is there."""

    def loss(self, output: FusionOutput, target: Tensor, context: StepContext) -> Tensor:
        present = output.extra["present"]
        each = [context.criterion(vote, target) for vote in output.unimodal.values()]
        own = torch.stack(each, dim=1).masked_fill(~present, 0).sum(1)
        return torch.where(present.any(1), own, context.criterion(output.logits, target))
