"""Shared by the bilinear fusions: factorised, full and Tucker products."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from torch import Tensor, nn

from fusionzoo.errors import FusionZooError, check_number

from ..base import product


class Factors(nn.Module):
    """Project each modality to one width: {modality: (B, D_m)} -> (B, M, width)."""

    def __init__(self, dims: Mapping[str, int], width: int) -> None:
        super().__init__()
        check_number("width", width, 1)
        self.maps = nn.ModuleDict({name: nn.Linear(d, width) for name, d in dims.items()})

    def forward(self, pooled: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([self.maps[name](x) for name, x in pooled.items()], dim=1)


def narrow(dims: Mapping[str, int], proj_dim: int) -> nn.ModuleDict:
    """Return a linear projection to `proj_dim` for each modality that is wider than that."""
    check_number("proj_dim", proj_dim, 1)
    wider = {m: nn.Linear(w, proj_dim) for m, w in dims.items() if w > proj_dim}
    return nn.ModuleDict(wider)


def with_ones(vectors: Mapping[str, Tensor], maps: nn.ModuleDict) -> list[Tensor]:
    """Return [1; x_m] for each modality, projected first if `maps` has it: (B, D_m + 1)."""
    projected = (maps[m](x) if m in maps else x for m, x in vectors.items())
    return [F.pad(x, (1, 0), value=1.0) for x in projected]


def check_budget(name: str, dims: Mapping[str, int], proj_dim: int, out: int, budget: int) -> int:
    """Return the outer product's size; raise if its weight would exceed `budget` entries.

    The size is the product of all min(D_m, proj_dim) + 1. Called before anything is allocated.
    """

    def size(width: int) -> int:
        return math.prod(min(w, width) + 1 for w in dims.values())

    if size(proj_dim) * out <= budget:
        return size(proj_dim)
    largest = max((w for w in range(1, proj_dim) if size(w) * out <= budget), default=None)
    advice = (
        f"proj_dim={largest} fits" if largest else "no proj_dim fits: use lmf, its low-rank form"
    )
    raise FusionZooError(
        f"{name}: the outer product of {len(dims)} modalities has {size(proj_dim):,} entries,"
        f" times {out} outputs = {size(proj_dim) * out:,} weights, above budget={budget:,}."
        f" {advice}"
    )


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
