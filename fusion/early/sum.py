"""Sum: add the aligned modalities."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from fusionzoo.structures import Features, FusionOutput

from ..base import FUSIONS, Fusion


@FUSIONS.register(family="early", paper=None, reads="pooled", synergy=False)
class Sum(Fusion):
    """Add the modalities' aligned vectors.

    embedding = sum_m a_m over present m, a_m = V_m x_m + c_m. `concat` without hidden layers and
    presence bits computes the same function.

    Missing: adds nothing.
    Pitfall: without `root_scale`, embeddings of incomplete samples have a smaller norm.
    Use when: you need the cheapest baseline and the contributions of the modalities are additive.

    Settings:
        root_scale: whether to divide the sum by the square root of the number of present
            modalities, so that its scale does not grow with that number

    Shapes:
        features[name].pooled: (B, dims[name])
        returns: embedding (B, dim), logits (B, K)
    """

    symmetric = True

    def __init__(
        self, dims: Mapping[str, int], dim: int, num_outputs: int, *, root_scale: bool = False
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        self.root_scale = root_scale
        self.project = self.align()
        self.head = nn.Linear(dim, num_outputs)

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        aligned, present = self.aligned(features)
        total = aligned.sum(1)
        if self.root_scale:
            total = total / present.sum(1, keepdim=True).clamp(min=1).to(total.dtype).sqrt()
        embedding = self.or_null(total, present)
        return FusionOutput(embedding, self.head(embedding), {}, None)
