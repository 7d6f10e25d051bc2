"""MUTAN: a Tucker decomposition of the bilinear tensor with a low-rank core."""

from __future__ import annotations

from collections.abc import Mapping

from einops import rearrange
from torch import nn

from fusionzoo.errors import check_number
from fusionzoo.structures import Features, FusionOutput

from ..base import FUSIONS, Fusion, RunningMeans
from ._bilinear import Factors, SlicedProduct


@FUSIONS.register(family="early", paper="Ben-younes et al. 2017, arXiv:1705.06676", reads="pooled")
class MUTAN(Fusion):
    """Project the modalities, then sum R element-wise products of linear maps of them.

    y_m = A_m x_m in `width` dimensions; z = sum_r prod_m (y_m M_m^r); embedding = W z + c. The
    default width and rank lie in the region of good results in the paper. Differs from the authors'
    code: the M_m^r start sqrt(3) times as large and their biases at 0, and there is no dropout
    (theirs: 0.1 on y_m for VQA). A classifier follows.

    Missing: the factors of its training mean, one in each of the R slices.
    Pitfall: cost grows as width^2 * rank for each modality; `block` splits the width into chunks.
    Use when: you want a full bilinear form of two modalities with a controlled rank.

    Settings:
        width: dimensions each modality is projected to, at least 1
        rank: number R of summed products, at least 1

    Shapes:
        features[name].pooled: (B, dims[name])
        returns: embedding (B, dim), logits (B, K)
    """

    def __init__(
        self,
        dims: Mapping[str, int],
        dim: int,
        num_outputs: int,
        *,
        width: int = 360,
        rank: int = 10,
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        check_number("rank", rank, 1)
        self.means = RunningMeans(dims)
        self.factors = Factors(dims, width)
        self.slices = SlicedProduct(dims, 1, width, rank)
        self.out = nn.Linear(width, dim)
        self.head = nn.Linear(dim, num_outputs)

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        present = self.present(features)
        projected = self.factors(self.means(self.pooled(features), present))
        z = rearrange(self.slices(rearrange(projected, "b m t -> b m 1 t")), "b 1 t -> b t")
        embedding = self.or_null(self.out(z), present)
        return FusionOutput(embedding, self.head(embedding), {}, None)
