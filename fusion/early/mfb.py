"""Multimodal factorised bilinear pooling: multiply projections, sum in groups of k, normalise."""

from __future__ import annotations

from collections.abc import Mapping

from einops import reduce
from torch import nn

from fusionzoo.structures import Features, FusionOutput

from ..base import FUSIONS, Fusion, RunningMeans, power_norm, product
from ._bilinear import Factors


@FUSIONS.register(
    family="early", paper="Yu et al. 2017, arXiv:1708.01471", reads="pooled", linear_skip=True
)
class MFB(Fusion):
    """Multiply wide projections of the modalities, sum them in groups of k, and normalise.

    e = prod_m U_m x_m, of width * k dimensions; z_o = sum_k e_(o k); embedding = W norm(z) + c,
    where norm is the signed square root followed by L2 normalisation. Differs from the paper: a
    linear map to `dim` follows, as in the authors' networks.

    Missing: the factor of its training mean.
    Pitfall: the group layout is (width, k) here and (k, width) in MUTAN; weights ported without
    reordering give wrong results without an error.
    Use when: as `mlb`, with more capacity and an output scale that is independent of k.

    Settings:
        width: dimensions of the pooled product z, at least 1
        k: number of products summed into each dimension, at least 1
        normalise: whether to apply the signed square root and L2 normalisation to z
        dropout: dropout rate on the product e, 0 to below 1

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
        width: int = 1000,
        k: int = 5,
        normalise: bool = True,
        dropout: float = 0.1,
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        self.width, self.normalise = width, normalise
        self.means = RunningMeans(dims)
        self.factors = Factors(dims, width * k)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(width, dim)
        self.head = nn.Linear(dim, num_outputs)

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        present = self.present(features)
        factors = self.factors(self.means(self.pooled(features), present))
        products = self.dropout(product(factors))
        z = reduce(products, "b (o k) -> b o", "sum", o=self.width)
        embedding = self.or_null(self.out(power_norm(z) if self.normalise else z), present)
        return FusionOutput(embedding, self.head(embedding), {}, None)
