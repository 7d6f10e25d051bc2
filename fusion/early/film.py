"""FiLM: all other modalities scale and shift the features of one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from fusionzoo.errors import check_modality
from fusionzoo.structures import Features, FusionOutput

from ..base import FUSIONS, Fusion


@FUSIONS.register(family="early", paper="Perez et al. 2018, arXiv:1709.07871", reads="pooled")
class FiLM(Fusion):
    """Scale and shift the features of one modality, conditioned on all others.

    embedding = (1 + dgamma) * a_b + beta, (dgamma, beta) = sum_{c != b} f_c(x_c). The f_c are
    linear and initialised to zero, so that the base modality b initially passes unchanged. Differs
    from the paper: one linear layer instead of one for each block of a CNN, and any number of
    conditioning modalities.

    Missing: an absent conditioning modality adds 0; an absent base becomes a learned vector.
    Pitfall: predicting gamma instead of 1 + dgamma would zero the base at the start.
    Use when: one modality carries the content and the others determine how to interpret it.

    Settings:
        base: name of the modality that is scaled and shifted; None for the first

    Shapes:
        features[name].pooled: (B, dims[name])
        returns: embedding (B, dim), logits (B, K)
    """

    def __init__(
        self, dims: Mapping[str, int], dim: int, num_outputs: int, *, base: str | None = None
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        self.base = check_modality("base", base, dims)
        self.project = nn.Linear(dims[self.base], dim)
        self.absent_base = nn.Parameter(torch.zeros(dim))
        self.conditions = nn.ModuleDict(
            {name: nn.Linear(width, 2 * dim) for name, width in dims.items() if name != self.base}
        )
        for condition in self.conditions.values():
            for parameter in condition.parameters():
                nn.init.zeros_(parameter)
        self.head = nn.Linear(dim, num_outputs)

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        pooled, present = self.pooled(features), self.present(features)
        column = dict(zip(self.dims, present.unbind(1), strict=True))
        projected = self.project(pooled[self.base])
        absent_base = self.absent_base.to(projected.dtype)
        base = torch.where(column[self.base][:, None], projected, absent_base)
        scale, shift = torch.ones_like(base), torch.zeros_like(base)
        for name, condition in self.conditions.items():
            change = condition(pooled[name]).masked_fill(~column[name][:, None], 0)
            more_scale, more_shift = change.chunk(2, dim=-1)
            scale, shift = scale + more_scale, shift + more_shift
        embedding = self.or_null(scale * base + shift, present)
        return FusionOutput(embedding, self.head(embedding), {}, None)
