"""Max: element-wise maximum of the aligned modalities."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from fusionzoo.structures import Features, FusionOutput

from ..base import FUSIONS, Fusion


@FUSIONS.register(family="early", paper=None, reads="pooled")
class Max(Fusion):
    """Take the element-wise maximum of the modalities' aligned vectors.

    embedding = max_m a_m over the present modalities, a_m = V_m x_m + c_m.

    Missing: treated as -infinity, so it is never the maximum.
    Pitfall: each dimension sends its gradient to one modality only; one with large values can keep
    the others from learning.
    Use when: any single modality may hold the decisive evidence (one detector firing is enough).

    Shapes:
        features[name].pooled: (B, dims[name])
        returns: embedding (B, dim), logits (B, K)
    """

    symmetric = True

    def __init__(self, dims: Mapping[str, int], dim: int, num_outputs: int) -> None:
        super().__init__(dims, dim, num_outputs)
        self.project = self.align()
        self.head = nn.Linear(dim, num_outputs)

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        aligned, present = self.aligned(features)
        lowest = torch.finfo(aligned.dtype).min
        # With ties, max over a dim sends the gradient to one entry; amax would split it.
        largest = aligned.masked_fill(~present[..., None], lowest).max(1).values
        embedding = self.or_null(largest, present)
        return FusionOutput(embedding, self.head(embedding), {}, None)
