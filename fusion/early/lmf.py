"""Low-rank multimodal fusion: tensor fusion with a low-rank weight, at linear cost."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, einsum, nn

from fusionzoo.errors import check_number
from fusionzoo.structures import Features, FusionOutput

from ..base import FUSIONS, Fusion, RunningMeans


@FUSIONS.register(
    family="early", paper="Liu et al. 2018, arXiv:1806.00064", reads="pooled", linear_skip=True
)
class LMF(Fusion):
    """Multiply low-rank projections of the modalities: tensor fusion at linear cost.

    embedding = sum_r w_r prod_m ([1; x_m] F_m[r]) + b. This equals a linear layer on the outer
    product of all [1; x_m] with weight sum_r w_r F_1[r] x ... x F_M[r]. The factors are initialised
    with standard deviation (D_m + 1)^-1/2 and w with R^-1/2, so that the output has unit scale for
    any width and rank. Differs from the authors' code: it draws all of them from Xavier's normal
    distribution (factors 0.070 wide instead of 0.220 at D = 20, 30, 12, dim 16 and R = 4), its
    output is the answer, without a classifier behind it, and its networks before the product (batch
    norm and three layers, an LSTM for text) are left to the encoders.

    Missing: x_m is replaced by its training mean.
    Pitfall: the original training script left w and b out of the optimiser.
    Use when: `tfn` would be too large.

    Settings:
        rank: number R of summed products, at least 1

    Shapes:
        features[name].pooled: (B, dims[name])
        returns: embedding (B, dim), logits (B, K)
    """

    symmetric = True

    def __init__(
        self, dims: Mapping[str, int], dim: int, num_outputs: int, *, rank: int = 4
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        check_number("rank", rank, 1)
        self.means = RunningMeans(dims)
        self.factors = nn.ParameterDict(
            {m: torch.randn(rank, w + 1, dim) * (w + 1) ** -0.5 for m, w in dims.items()}
        )
        self.rank_weights = nn.Parameter(torch.full((rank,), rank**-0.5))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.head = nn.Linear(dim, num_outputs)

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        present = self.present(features)
        product: Tensor | None = None
        for name, x in self.means(self.pooled(features), present).items():
            with_one = F.pad(x, (1, 0), value=1.0)
            factor = einsum("bi,rio->bro", with_one, self.factors[name])
            product = factor if product is None else product * factor
        assert product is not None
        fused = einsum("bro,r->bo", product, self.rank_weights) + self.bias
        embedding = self.or_null(fused, present)
        return FusionOutput(embedding, self.head(embedding), {}, None)
