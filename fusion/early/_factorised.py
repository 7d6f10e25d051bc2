"""Shared by the factorised bilinear fusions: a projection of each modality to a common width."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fusionzoo.errors import FusionZooError


class Factors(nn.Module):
    """Project each modality to one width: {modality: (B, D_m)} -> (B, M, width)."""

    def __init__(self, dims: Mapping[str, int], width: int) -> None:
        super().__init__()
        if width < 1:
            raise FusionZooError(f"factors of width {width}; it must be at least 1")
        self.maps = nn.ModuleDict({name: nn.Linear(d, width) for name, d in dims.items()})

    def forward(self, pooled: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([self.maps[name](x) for name, x in pooled.items()], dim=1)
