"""Sum: every modality has its say, in one space."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from fusionzoo.structures import Features, FusionOutput

from ..base import FUSIONS, Fusion


@FUSIONS.register(family="early", paper=None, reads="pooled", synergy=False)
class Sum(Fusion):
    """Add the modalities' aligned vectors.

    embedding = sum_m a_m with a_m = V_m x_m + c_m; with `root_scale`, divided by the root of the
    number present, so that its scale does not grow with it. Linear `concat` is the same function.

    Missing: adds nothing.
    Pitfall: without `root_scale` incomplete samples have shorter embeddings.
    Use when: you need the cheapest baseline, and the answer is a sum of what each modality says.

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
