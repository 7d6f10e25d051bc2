"""Bilinear form with a tensor that is a sum of R slices, applied to equal chunks of the inputs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from einops import einsum, rearrange
from torch import Tensor, nn

from ..base import product


class SlicedProduct(nn.Module):
    """Map each modality R times, multiply over modalities, sum over R: (B, M, Q, S) -> (B, Q, S).

    z_q = sum_r prod_m (x_mq W_mqr + b_mqr), computed for all Q chunks of width S at once. Has
    M Q (S^2 R + S R) parameters.
    """

    def __init__(self, dims: Mapping[str, int], chunks: int, size: int, rank: int) -> None:
        super().__init__()
        self.size, self.rank = size, rank
        scale = size**-0.5
        self.weight = nn.Parameter(torch.randn(len(dims), chunks, size, size * rank) * scale)
        self.bias = nn.Parameter(torch.zeros(len(dims), chunks, size * rank))

    def forward(self, x: Tensor) -> Tensor:
        mapped = einsum(x, self.weight, "b m q s, m q s r -> b m q r") + self.bias
        slices = rearrange(mapped, "b m q (s r) -> b m q s r", r=self.rank)
        return product(slices).sum(-1)
