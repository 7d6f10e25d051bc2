"""Fusion strategies: `create_fusion("mbt", {"image": 512, "text": 384}, 256, 16)`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusionzoo.errors import FusionZooError
from fusionzoo.registry import import_siblings

from .base import FUSIONS, Fusion, FusionEntry
from .late._base import UNIMODAL, LateFusion, TrainedHead

__all__ = [
    "FUSIONS",
    "UNIMODAL",
    "Fusion",
    "FusionEntry",
    "TrainedHead",
    "create_fusion",
    "fixed_rules",
    "fusion_info",
    "list_fusions",
]

import_siblings(__path__, __name__)  # what registers fusions


def create_fusion(
    name: str,
    dims: Mapping[str, int],
    dim: int,
    num_outputs: int,
    *,
    trained_heads: Mapping[str, Mapping[str, Any]] | None = None,
    **hyperparameters: Any,
) -> Fusion:
    """Build the fusion `name`; `dims` holds the feature width of each modality.

    `trained_heads` (modality -> settings of a `TrainedHead`) are what `fusionzoo assemble` writes
    into a model folder: classifiers of models trained apart, which a fixed late fusion joins.
    """
    entry = FUSIONS[name]
    if len(dims) < entry.at_least:
        raise FusionZooError(
            f"fusion {name!r} needs at least {entry.at_least} modalities; there is only"
            f" {', '.join(dims) or 'none'}"
        )
    fusion = FUSIONS.create(name, dims, dim, num_outputs, **hyperparameters)
    if trained_heads is not None:
        if not (isinstance(fusion, LateFusion) and fusion.fixed_rule):
            raise FusionZooError(
                f"fusion {name!r} has weights that only training gives: heads that were trained"
                f" before are joined by {', '.join(fixed_rules())}"
            )
        fusion.join_heads(trained_heads, create_fusion)
    return fusion


def fixed_rules() -> list[str]:
    """Return the names of the late fusions that join trained classifiers without training."""
    return [name for name in list_fusions("late") if getattr(FUSIONS[name].cls, "fixed_rule", 0)]


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
