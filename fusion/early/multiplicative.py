"""Multiplicative interactions: a learned form that is linear in each modality."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import combinations
from typing import Literal

import torch
from einops import einsum
from torch import Tensor, nn

from fusionzoo.structures import Features, FusionOutput

from ..base import FUSIONS, Fusion, RunningMeans, check_choice
from ._outer import check_budget, narrow, with_ones


@FUSIONS.register(family="early", paper="Jayakumar et al. 2020, ICLR", reads="pooled")
class Multiplicative(Fusion):
    """Apply a full multilinear form to the modalities: x W y + x U + y V + b for two.

    `order="full"`: one tensor over [1; x_1], ..., [1; x_M], which holds every lower order too.
    `order="pairwise"`: a sum of two-modality forms over all pairs. Modalities wider than `proj_dim`
    are projected to it first, and a tensor above `budget` weights is refused. A tensor starts at
    standard deviation prod(D_m + 1)^-1/2: Xavier's fans are wrong beyond two axes.

    Missing: [1; its training mean].
    Pitfall: the full tensor grows as D^M; from four modalities on use "pairwise".
    Use when: one modality modulates another (hypernetworks, gates and FiLM are special cases).

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
        whole = order == "full" or len(dims) == 1
        groups = [tuple(dims)] if whole else list(combinations(dims, 2))
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
            self._form(form, [vectors[m] for m in group])
            for form, group in zip(self.forms, self.groups, strict=True)
        ]
        embedding = self.or_null(torch.stack(fused).sum(0), present)
        return FusionOutput(embedding, self.head(embedding), {}, None)

    def _form(self, form: Tensor, given: list[Tensor]) -> Tensor:
        """Contract one axis of the tensor after another."""
        first, *others = given
        out = einsum(first, form, "b i, i ... -> b ...")
        for x in others:
            out = einsum(x, out, "b i, b i ... -> b ...")
        return out
