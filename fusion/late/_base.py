"""What the late fusions share: a classifier per modality, and an embedding beside it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ...structures import Features, FusionOutput
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
        present = self.present(features)
        aligned = {name: self.project[name](x) for name, x in self.pooled(features).items()}
        votes = torch.stack([self.heads[name](a) for name, a in aligned.items()], dim=1)
        embedding = present_mean(torch.stack(list(aligned.values()), dim=1), present)
        votes = votes.masked_fill(~present[..., None], 0)
        return self.or_null(embedding, present), votes, present

    def output(
        self,
        embedding: Tensor,
        logits: Tensor,
        votes: Tensor,
        present: Tensor,
        weights: Tensor | None,
    ) -> FusionOutput:
        """Answer with the prior where nothing is there, and hand out the votes by modality."""
        prior = self.prior_logits.to(logits.dtype)
        logits = torch.where(present.any(1)[:, None], logits, prior)
        unimodal = dict(zip(self.dims, votes.unbind(1), strict=True))
        return FusionOutput(embedding, logits, unimodal, weights)
