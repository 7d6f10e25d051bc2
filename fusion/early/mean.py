"""Mean: average of the aligned modalities that are present."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from fusionzoo.structures import Features, FusionOutput

from ..base import FUSIONS, Fusion, equal_weights, present_mean


@FUSIONS.register(family="early", paper=None, reads="pooled", synergy=False)
class Mean(Fusion):
    """Average the aligned vectors of the present modalities.

    embedding = sum_m p_m a_m / sum_m p_m with a_m = V_m x_m + c_m, p_m = 1 if m is present, else 0.

    Missing: left out of the average.
    Pitfall: a weak modality counts as much as a strong one; `attn_pool` learns the weights.
    Use when: modalities are often missing and carry largely the same information.

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
        embedding = self.or_null(present_mean(aligned, present), present)
        return FusionOutput(embedding, self.head(embedding), {}, equal_weights(present, embedding))
