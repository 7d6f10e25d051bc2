"""Polynomial tensor pooling: products, up to a given order, of all concatenated features."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

import torch
import torch.nn.functional as F
from einops import einsum
from torch import nn

from fusionzoo.errors import check_number
from fusionzoo.structures import Features, FusionOutput

from ..base import FUSIONS, Fusion


@FUSIONS.register(family="early", paper="Hou et al. 2019, NeurIPS", reads="pooled")
class HPFN(Fusion):
    """Multiply `order` linear forms of the concatenated features and sum `rank` such products.

    f = [1; x_1; ...; x_M]; embedding_o = sum_r prod_q (f A_q[r, :, o]). Unlike in `lmf`, a modality
    may be multiplied with itself. The factors are initialised with standard deviation
    dim(f)^-1/2, because their product grows exponentially with the order. Differs from the paper:
    without its hierarchy over time windows.

    Missing: its block of f is 0.
    Pitfall: order 1 is linear; above 3 the scale of the products makes training unstable.
    Use when: interactions within a modality matter as much as those across modalities.

    Settings:
        order: number of multiplied linear forms, the polynomial degree, at least 1
        rank: number of summed products, at least 1

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
        order: int = 3,
        rank: int = 4,
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        check_number("order", order, 1)
        check_number("rank", rank, 1)
        width = sum(dims.values()) + 1
        self.factors = nn.Parameter(torch.randn(order, rank, width, dim) * width**-0.5)
        self.head = nn.Linear(dim, num_outputs)

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        with_one = F.pad(torch.cat(list(self.pooled(features).values()), dim=-1), (1, 0), value=1.0)
        forms = einsum(with_one, self.factors, "b i, q r i o -> q b r o")
        fused = reduce(torch.mul, forms.unbind(0)).sum(1)
        embedding = self.or_null(fused, self.present(features))
        return FusionOutput(embedding, self.head(embedding), {}, None)
