"""What the fusions that build the whole outer product share: narrow inputs, and a budget."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from fusionzoo.errors import FusionZooError


def narrow(dims: Mapping[str, int], proj_dim: int) -> nn.ModuleDict:
    """Return a linear map to `proj_dim` for each modality that is wider."""
    if proj_dim < 1:
        raise FusionZooError(f"proj_dim={proj_dim}; it must be at least 1")
    wider = {m: nn.Linear(w, proj_dim) for m, w in dims.items() if w > proj_dim}
    return nn.ModuleDict(wider)


def with_ones(vectors: Mapping[str, Tensor], maps: nn.ModuleDict) -> list[Tensor]:
    """Return [1; x_m] for each modality, narrowed where there is a map for it: (B, D_m + 1)."""
    narrowed = (maps[m](x) if m in maps else x for m, x in vectors.items())
    return [F.pad(x, (1, 0), value=1.0) for x in narrowed]


def check_budget(name: str, dims: Mapping[str, int], proj_dim: int, out: int, budget: int) -> int:
    """Return the product of all D_m + 1; refuse it before anything that large is allocated."""

    def size(width: int) -> int:
        return math.prod(min(w, width) + 1 for w in dims.values())

    if size(proj_dim) * out <= budget:
        return size(proj_dim)
    fits = max((w for w in range(1, proj_dim) if size(w) * out <= budget), default=None)
    advice = f"proj_dim={fits} fits" if fits else "no proj_dim fits: use lmf, its low-rank form"
    raise FusionZooError(
        f"{name}: the outer product of {len(dims)} modalities has {size(proj_dim):,} entries,"
        f" times {out} outputs = {size(proj_dim) * out:,} weights, above budget={budget:,}."
        f" {advice}"
    )
