"""EmbraceNet: each dimension of the embedding is taken from one modality, drawn at random."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from fusionzoo.structures import Features, FusionOutput

from ..base import FUSIONS, Fusion, equal_weights


@FUSIONS.register(
    family="early", paper="Choi and Lee 2019, arXiv:1904.09078", reads="pooled", synergy=False
)
class EmbraceNet(Fusion):
    """Draw for each dimension which modality it comes from; in evaluation, take the expectation.

    d_m = ReLU(V_m x_m + c_m); embedding_i = d_(m_i),i with m_i drawn evenly from what is present.
    Differs from the paper: evaluation uses the mean of the draw, not a draw, so that a result does
    not depend on chance.

    Missing: never drawn.
    Pitfall: the expectation is a mean, so it cannot express synergy; the draw is a regulariser.
    Use when: any modality may fail at test time, and robustness matters more than the last point.

    Shapes:
        features[name].pooled: (B, dims[name])
        returns: embedding (B, dim), logits (B, K), weights (B, M) equal
    """

    symmetric = True

    def __init__(self, dims: Mapping[str, int], dim: int, num_outputs: int) -> None:
        super().__init__(dims, dim, num_outputs)
        self.project = self.align()
        self.head = nn.Linear(dim, num_outputs)

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        aligned, present = self.aligned(features)
        docked = aligned.relu()
        weights = equal_weights(present, docked)
        shares = weights[..., None]
        if self.training:
            shares = self._draw(present).to(docked.dtype)
        embedding = self.or_null((shares * docked).sum(1), present)
        return FusionOutput(embedding, self.head(embedding), {}, weights)

    def _draw(self, present: Tensor) -> Tensor:
        """Pick a present modality for each dimension, one-hot: (B, M) -> (B, M, dim)."""
        chances = torch.where(present.any(1, keepdim=True), present, True).float()
        chosen = torch.multinomial(chances, self.dim, replacement=True)
        return rearrange(F.one_hot(chosen, len(self.dims)), "b d m -> b m d")
