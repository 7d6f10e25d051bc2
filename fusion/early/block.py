"""BLOCK: bilinear pooling of chunks, a block-term decomposition of the bilinear tensor."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from einops import rearrange
from torch import Tensor, nn

from fusionzoo.errors import FusionZooError
from fusionzoo.structures import Features, FusionOutput

from ..base import FUSIONS, Fusion, RunningMeans, power_norm
from ._bilinear import Factors, SlicedProduct


@FUSIONS.register(family="early", paper="Ben-younes et al. 2019, arXiv:1902.00038", reads="pooled")
class Block(Fusion):
    """Split the projected modalities into chunks and fuse each chunk by its own bilinear form.

    y_m = A_m x_m has `width` dimensions and is split into `chunks` pieces of ceil(width / chunks),
    the last one possibly shorter. z_q = norm(sum_r prod_m (y_mq M_mq^r)), where norm is the signed
    square root followed by L2 normalisation of the chunk. embedding = W [z_1; ...; z_Q] + c.
    Differs from the authors' code: the M_mq^r start sqrt(3) times as large and their biases at 0,
    and there is no dropout (theirs: 0.1 on y_m for VQA). A classifier follows.

    Missing: replaced by its training mean, in every slice of every chunk.
    Pitfall: `normalise` acts per chunk; normalising the whole vector would let one chunk dominate.
    Use when: `mutan` is too costly at the width you need.

    Settings:
        width: dimensions each modality is projected to
        chunks: number of chunks Q, 1 to `width`, such that every chunk has at least one dimension
        rank: number R of summed slices per chunk, at least 1
        normalise: whether to apply the signed square root and L2 normalisation to each chunk

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
        width: int = 1600,
        chunks: int = 20,
        rank: int = 15,
        normalise: bool = True,
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        size = -(-width // max(chunks, 1))
        if min(chunks, rank, width) < 1 or (chunks - 1) * size >= width:
            raise FusionZooError(
                f"width={width} does not split into chunks={chunks} of {size}, the last shorter;"
                f" chunks={max(1, -(-width // max(size, 1)))} does"
            )
        self.normalise = normalise
        full_chunks, remainder = divmod(width, size)
        self.sizes = [full_chunks * size, remainder]
        self.means = RunningMeans(dims)
        self.factors = Factors(dims, width)
        self.slices = nn.ModuleList([SlicedProduct(dims, full_chunks, size, rank)])
        if remainder:
            self.slices.append(SlicedProduct(dims, 1, remainder, rank))
        self.out = nn.Linear(width, dim)
        self.head = nn.Linear(dim, num_outputs)

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        present = self.present(features)
        z = self.chunks(self.factors(self.means(self.pooled(features), present)))
        embedding = self.or_null(self.out(z), present)
        return FusionOutput(embedding, self.head(embedding), {}, None)

    def chunks(self, projected: Tensor) -> Tensor:
        """Fuse the projected modalities chunk by chunk: (B, M, width) -> (B, width)."""
        fused = []
        for part, slices in zip(projected.split(self.sizes, dim=-1), self.slices, strict=False):
            z = slices(rearrange(part, "b m (q s) -> b m q s", s=slices.size))
            z = power_norm(z) if self.normalise else z
            fused.append(rearrange(z, "b q s -> b (q s)"))
        return torch.cat(fused, dim=-1)
