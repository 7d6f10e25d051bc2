"""Fusion strategies: `create_fusion("mbt", {"image": 512, "text": 384}, 256, 16)`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusionzoo.errors import FusionZooError
from fusionzoo.ground.registry import import_siblings

from .base import FUSIONS, Fusion, FusionEntry

__all__ = [
    "FUSIONS",
    "Fusion",
    "FusionEntry",
    "create_fusion",
    "fusion_info",
    "list_fusions",
]

import_siblings(__path__, __name__)  # what registers fusions


def create_fusion(
    name: str,
    dims: Mapping[str, int],
    dim: int,
    num_outputs: int,
    **hyperparameters: Any,
) -> Fusion:
    """Build the fusion `name`; `dims` holds the feature width of each modality."""
    entry = FUSIONS[name]
    if len(dims) < entry.at_least:
        raise FusionZooError(
            f"fusion {name!r} needs at least {entry.at_least} modalities; there is only"
            f" {', '.join(dims) or 'none'}"
        )
    return FUSIONS.create(name, dims, dim, num_outputs, **hyperparameters)


def list_fusions(pattern: str | None = None, /, *, family: str | None = None) -> list[str]:
    """Return the names of all fusions, or of those that match, sorted.

    `pattern` is a shell pattern, or the name of a family: early, late, attention or hybrid. A word
    that is both a family and a fusion is the family.

    >>> list_fusions("mm*"), list_fusions("g*", family="attention"), list_fusions("x*")
    (['mmdynamics', 'mmin', 'mmtm'], ['gated_xattn'], [])
    """
    return FUSIONS.names(pattern, family)


def fusion_info(name: str) -> FusionEntry:
    """Return the registry entry of a fusion: family, paper, inputs, settings."""
    return FUSIONS[name]
