"""Low-rank bilinear pooling: the Hadamard product of projected modalities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import nn

from fusionzoo.errors import check_choice
from fusionzoo.structures import Features, FusionOutput

from ..base import FUSIONS, Fusion, RunningMeans, product
from ._bilinear import Factors


@FUSIONS.register(
    family="early", paper="Kim et al. 2017, arXiv:1610.04325", reads="pooled", linear_skip=True
)
class MLB(Fusion):
    """Multiply tanh projections of the modalities element-wise, then apply a linear map.

    embedding = W prod_m tanh(U_m x_m) + c, where each U_m projects to `width` dimensions. The
    product runs over any number of modalities.

    Missing: the factor of its training mean; W was never trained on a factor of 1.
    Pitfall: a product of many tanh values is small: with more than three modalities prefer `mfb`.
    Use when: products of two or three modalities matter and the cost must be linear.

    Settings:
        width: dimensions each modality is projected to, at least 1
        activation: applied to each projection, "tanh" or "none" (plain bilinear form)

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
