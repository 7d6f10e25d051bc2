"""EmbraceNet: each dimension of the embedding comes from one randomly drawn modality."""

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
    """Draw the source modality of each dimension at random; use the expectation in evaluation.

    d_m = ReLU(V_m x_m + c_m); embedding_i = d_(m_i),i, where m_i is drawn uniformly from the
    present modalities. Differs from the paper: evaluation uses the mean over the draws instead of
    one draw, so that results are deterministic.

    Missing: never drawn.
    Pitfall: the expectation is a mean and cannot express synergy; the draw acts as a regulariser.
    Use when: any modality may fail at test time and robustness matters more than peak accuracy.

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
        selection = weights[..., None]
        if self.training:
            selection = self._draw(present).to(docked.dtype)
        embedding = self.or_null((selection * docked).sum(1), present)
        return FusionOutput(embedding, self.head(embedding), {}, weights)

    def _draw(self, present: Tensor) -> Tensor:
        """Draw a present modality for each dimension, one-hot: (B, M) -> (B, M, dim)."""
        probabilities = torch.where(present.any(1, keepdim=True), present, True).float()
        source = torch.multinomial(probabilities, self.dim, replacement=True)
        return rearrange(F.one_hot(source, len(self.dims)), "b d m -> b m d")
