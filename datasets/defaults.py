"""Default encoders, for modalities for which neither user nor data set names one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .table import SampleTable
from .tabular import learn_columns

ENCODERS: dict[str, dict[str, Any]] = {  # by kind of modality
    "image": {"name": "timm/resnet18"},
    "text": {"name": "hf/sentence-transformers/all-MiniLM-L6-v2"},
    "audio": {"name": "mel/resnet18"},
    "vector": {"name": "vector/mlp"},
    "sequence": {"name": "sequence/transformer"},
    "tabular": {"name": "tabular/ft-transformer"},
}


def fill_encoders(
    data: SampleTable, encoders: Mapping[str, Mapping[str, Any]], width: Callable[[str], int]
) -> dict[str, dict[str, Any]]:
    """Return the encoder settings of each modality, with those that follow from the data.

    `width` returns the `in_dim` of a modality of vectors or sequences. Tabular modalities get the
    statistics of their columns.
    """
    filled = {
        name: dict(encoders.get(name, ENCODERS[kind])) for name, kind in data.modalities.items()
    }
    for name, kind in data.modalities.items():
        if kind in ("vector", "sequence"):
            filled[name].setdefault("in_dim", width(name))
        if kind == "tabular" and "columns" not in filled[name]:
            filled[name]["columns"] = learn_columns(data, name)
    return filled
