"""Low-rank bilinear pooling: a Hadamard product of projections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import nn

from fusionzoo.structures import Features, FusionOutput

from ..base import FUSIONS, Fusion, RunningMeans, check_choice, product
from ._factorised import Factors


@FUSIONS.register(family="early", paper="Kim et al. 2017, arXiv:1610.04325", reads="pooled")
class MLB(Fusion):
    """Multiply tanh projections of the modalities elementwise, then map to the embedding.

    embedding = W prod_m tanh(U_m x_m) + c, each U_m to `width` dimensions; `activation="none"` is
    the plain bilinear form. Any number of modalities: the product runs over all.

    Missing: the factor of its training mean; a factor of 1, never met in training, misleads W.
    Pitfall: a product of many tanh values is small: with more than three modalities prefer `mfb`.
    Use when: two or three modalities whose products matter, at linear cost.

    Shapes:
        features[name].pooled: (B, dims[name])
        returns: embedding (B, dim), logits (B, K)
    """

    symmetric = True

    def __init__(
        self,
        dims: Mapping[str, int],
        dim: int,
        num_outputs: int,
        *,
        width: int = 1200,
        activation: Literal["tanh", "none"] = "tanh",
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        check_choice("activation", activation, ("tanh", "none"))
        self.tanh = activation == "tanh"
        self.means = RunningMeans(dims)
        self.factors = Factors(dims, width)
        self.out = nn.Linear(width, dim)
        self.head = nn.Linear(dim, num_outputs)

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        present = self.present(features)
        factors = self.factors(self.means(self.pooled(features), present))
        fused = self.out(product(factors.tanh() if self.tanh else factors))
        embedding = self.or_null(fused, present)
        return FusionOutput(embedding, self.head(embedding), {}, None)
