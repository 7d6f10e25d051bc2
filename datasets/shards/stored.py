"""Where the values of a data set lie: in files, in shards, in memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from ..join import SourceValues
from ..media.audio import Segment, is_video
from ..tables.arrow import is_list_of_text
from ..tables.paths import holds_paths
from ..tables.table import Samples
from .blocks import StoredCells


def in_files(dataset: Samples, name: str) -> bool:
    """Whether every value of a modality is a file."""
    values = dataset.memory.get(name)
    if isinstance(values, SourceValues):
        return in_files(values.source, values.modality)
    if isinstance(values, StoredCells):
        return False
    if values is None:
        return name in dataset.paths and holds_paths(
            dataset.modalities[name], dataset.table[name].type
        )
    return all(
        isinstance(file, Path) for value in dataset.references(name) for file in files_of(value)
    )


def files_of(value: Any) -> list[Any]:
    """Return the files of an undecoded value, or the value in a list if it is none."""
    if isinstance(value, list):
        return [file for item in value for file in files_of(item)]
    return [] if value is None else [value.source if isinstance(value, Segment) else value]


def has_several(dataset: Samples, name: str, *, decoded: bool) -> bool:
    """Whether a sample has several items; if `decoded`, the images of a video count as such."""
    values = dataset.memory.get(name)
    if isinstance(values, SourceValues):
        return has_several(values.source, values.modality, decoded=decoded)
    if isinstance(values, StoredCells) and not decoded:
        return values.has_lists
    is_listed = is_list_of_text(dataset.table[name].type)
    if is_listed or (name not in dataset.memory and not decoded):
        return is_listed
    has_images = dataset.modalities[name] == "image"
    return any(
        isinstance(value, list) or (decoded and has_images and is_video(value))
        for value in (dataset.reference(name, row) for row in dataset.rows.tolist())
    )


def segment_columns(dataset: Samples, types: Mapping[str, pa.DataType]) -> dict[str, pa.DataType]:
    """Return the columns of segments, for files of which only a part is used."""
    columns: dict[str, pa.DataType] = {}
    for name, kind in types.items():
        modality_kind = dataset.modalities[name]
        if modality_kind in ("image", "audio") and holds_paths(modality_kind, kind):
            values = (
                x for v in dataset.references(name) for x in (v if isinstance(v, list) else [v])
            )
            if any(isinstance(x, Segment) and (x.start or x.end is not None) for x in values):
                columns |= {f"{name}_start": pa.float64(), f"{name}_end": pa.float64()}
    return columns
