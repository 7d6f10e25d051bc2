"""Multimodal factorised high-order pooling: a cascade of factorised bilinear poolings."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from einops import reduce
from torch import Tensor, nn

from fusionzoo.errors import check_number
from fusionzoo.structures import Features, FusionOutput

from ..base import FUSIONS, Fusion, RunningMeans, power_norm, product
from ._bilinear import Factors


@FUSIONS.register(
    family="early", paper="Yu et al. 2018, arXiv:1708.03619", reads="pooled", linear_skip=True
)
class MFH(Fusion):
    """Cascade factorised bilinear poolings, so that block i has order i in each modality.

    e_i = e_(i-1) * prod_m U_m^i x_m with e_0 = 1, passed on after dropout and before pooling;
    z_i = sum_k e_i in groups of k; embedding = W [norm(z_1); ...; norm(z_q)] + c, where norm is the
    signed square root followed by L2 normalisation.

    Missing: the factors of its training mean, one in every block.
    Pitfall: each order adds the cost of one `mfb`; gains beyond q = 2 are small in the paper.
    Use when: `mfb` underfits.

    Settings:
        width: dimensions of each block's pooled product z_i, at least 1
        k: number of products summed into each dimension, at least 1
        order: number of blocks q, at least 1
        normalise: whether to apply the signed square root and L2 normalisation to each z_i
        dropout: dropout rate on each product e_i, 0 to below 1

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
        order: int = 2,
        normalise: bool = True,
        dropout: float = 0.1,
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        check_number("order", order, 1)
        self.width, self.normalise = width, normalise
        self.means = RunningMeans(dims)
        self.factors = nn.ModuleList(Factors(dims, width * k) for _ in range(order))
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(order * width, dim)
        self.head = nn.Linear(dim, num_outputs)

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        present = self.present(features)
        vectors = self.means(self.pooled(features), present)
        cascade: Tensor | None = None  # e_i
        blocks = []
        for factors in self.factors:
            block = product(factors(vectors))
            block = self.dropout(block if cascade is None else cascade * block)
            z = reduce(block, "b (o k) -> b o", "sum", o=self.width)
            blocks.append(power_norm(z) if self.normalise else z)
            cascade = block
        embedding = self.or_null(self.out(torch.cat(blocks, dim=-1)), present)
        return FusionOutput(embedding, self.head(embedding), {}, None)
