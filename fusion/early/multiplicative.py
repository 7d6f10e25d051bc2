"""Multiplicative interactions: a learned multilinear form of the modalities."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import combinations
from typing import Literal

import torch
from einops import einsum
from torch import Tensor, nn

from fusionzoo.errors import check_choice
from fusionzoo.structures import Features, FusionOutput

from ..base import FUSIONS, Fusion, RunningMeans
from ._bilinear import check_budget, narrow, with_ones


@FUSIONS.register(family="early", paper="Jayakumar et al. 2020, ICLR", reads="pooled")
class Multiplicative(Fusion):
    """Apply a full multilinear form to the modalities: x W y + x U + y V + b for two.

    `order="full"`: one tensor over [1; x_1], ..., [1; x_M], which includes all lower orders.
    `order="pairwise"`: the sum of two-modality forms over all pairs. Tensors are initialised with
    standard deviation prod(D_m + 1)^-1/2, because Xavier initialisation computes wrong fans for
    more than two axes.

    Missing: x_m is replaced by its training mean.
    Pitfall: the full tensor grows as D^M; for four or more modalities use "pairwise".
    Use when: one modality modulates another (hypernetworks, gates and FiLM are special cases).

    Settings:
        order: "full", one tensor over all modalities, or "pairwise", one tensor per pair
        proj_dim: modalities wider than this are first projected to it, at least 1
        budget: largest number of weights in one tensor; a larger one is an error

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
        order: Literal["full", "pairwise"] = "full",
        proj_dim: int = 16,
        budget: int = 20_000_000,
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        check_choice("order", order, ("full", "pairwise"))
        single = order == "full" or len(dims) == 1
        groups = [tuple(dims)] if single else list(combinations(dims, 2))
        for group in groups:
            check_budget("multiplicative", {m: dims[m] for m in group}, proj_dim, dim, budget)
        self.groups = groups
        self.means = RunningMeans(dims)
        self.narrow = narrow(dims, proj_dim)
        sizes = [[min(dims[m], proj_dim) + 1 for m in group] for group in groups]
        self.forms = nn.ParameterList(
            torch.randn(*size, dim) * math.prod(size) ** -0.5 for size in sizes
        )
        self.head = nn.Linear(dim, num_outputs)

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        present = self.present(features)
        inputs = with_ones(self.means(self.pooled(features), present), self.narrow)
        vectors = dict(zip(self.dims, inputs, strict=True))
        fused = [
            self._contract(form, [vectors[m] for m in group])
            for form, group in zip(self.forms, self.groups, strict=True)
        ]
        embedding = self.or_null(torch.stack(fused).sum(0), present)
        return FusionOutput(embedding, self.head(embedding), {}, None)

    def _contract(self, form: Tensor, vectors: list[Tensor]) -> Tensor:
        """Contract the tensor with one vector per axis: (D_1, ..., D_M, dim) -> (B, dim)."""
        first, *others = vectors
        out = einsum(first, form, "b i, i ... -> b ...")
        for x in others:
            out = einsum(x, out, "b i, b i ... -> b ...")
        return out
