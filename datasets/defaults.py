"""Default encoders, for modalities for which neither user nor data set names one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

ENCODERS: dict[str, dict[str, Any]] = {  # by kind of modality
    "image": {"name": "timm/resnet18"},
    "text": {"name": "hf/sentence-transformers/all-MiniLM-L6-v2"},
    "audio": {"name": "mel/resnet18"},
    "vector": {"name": "vector/mlp"},
    "sequence": {"name": "sequence/transformer"},
}


def fill_encoders(
    encoders: Mapping[str, Mapping[str, Any]],
    kinds: Mapping[str, str],
    width: Callable[[str], int],
) -> dict[str, dict[str, Any]]:
    """Return the encoder settings of each modality; vectors and sequences get their `in_dim`.

    `width` returns the width of a modality of vectors or sequences.
    """
    filled = {name: dict(encoders.get(name, ENCODERS[kind])) for name, kind in kinds.items()}
    for name, kind in kinds.items():
        if kind in ("vector", "sequence"):
            filled[name].setdefault("in_dim", width(name))
    return filled
