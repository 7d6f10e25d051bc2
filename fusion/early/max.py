"""Max: for each dimension, the modality that is surest of it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from fusionzoo.structures import Features, FusionOutput

from ..base import FUSIONS, Fusion


@FUSIONS.register(family="early", paper=None, reads="pooled")
class Max(Fusion):
    """Take the largest value of each dimension over the modalities' aligned vectors.

    embedding = max_m a_m over what is present, a_m = V_m x_m + c_m.

    Missing: taken as -infinity, so it is never the largest.
    Pitfall: only one modality learns from each dimension, and a loud one can keep the others mute.
    Use when: any one modality may hold the decisive cue (one detector firing is enough).

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
        # max over a dim gives the whole gradient to one of several equals; amax would share it.
        largest = aligned.masked_fill(~present[..., None], lowest).max(1).values
        embedding = self.or_null(largest, present)
        return FusionOutput(embedding, self.head(embedding), {}, None)
