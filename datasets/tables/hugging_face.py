"""Data sets of Hugging Face, also streaming; what is passed in has imported their library."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from fusionzoo.errors import FusionZooError, explained

from ..media.decode import MediaCells
from .arrow import plain_column, row_numbers, values_and_paths
from .provenance import MEDIA, SPLIT_RULE, LoadedTable

LIBRARY = "datasets"
BATCH = 1000  # rows looked at together, to see which have a value


def is_hugging_face(data: Any) -> bool:
    """Whether data is a data set of the library, or its mapping of splits to data sets."""
    roots = {cls.__module__.partition(".")[0] for cls in type(data).__mro__}
    names = {cls.__name__ for cls in type(data).__mro__}
    known = {"Dataset", "DatasetDict", "IterableDataset", "IterableDatasetDict"}
    return LIBRARY in roots and bool(known & names)


def is_stream(data: Any) -> bool:
    """Whether a data set of the library, or one of its splits, is a stream without a length."""
    parts = data.values() if isinstance(data, Mapping) else [data]
    return any(not hasattr(part, "__len__") for part in parts)


def read_hugging_face(
    data: Any,
    read_stream: Callable[[Any, str], list[Any]],
    read_rows: Callable[[list[Any], str], LoadedTable],
) -> LoadedTable:
    """Read a data set whose media stay undecoded; `read_stream` returns the rows of a stream, of
    which `read_rows` makes a table."""
    source = f"the {type(data).__name__}"
    parts: dict[str, Any] = dict(data) if isinstance(data, Mapping) else {"": data}
    if not parts:
        raise FusionZooError(f"{source} has no split")
    rule = SPLIT_RULE if isinstance(data, Mapping) else ""
    if is_stream(data):
        rows = []
        for split, part in parts.items():
            extra = {"split": split} if rule else {}
            rows += [{**row, **extra} for row in read_stream(undecoded_stream(part), source)]
        loaded = read_rows(rows, source)
        table = loaded.table.replace_schema_metadata(_metadata(next(iter(parts.values()))))
        return replace(loaded, table=table, split_rule=rule)
    dataset = next(iter(parts.values()))
    if rule:
        dataset = _concatenate(parts, source)
    loaded = _read(dataset, source)
    if rule:
        names = np.repeat(list(parts), [len(part) for part in parts.values()])
        splits = pa.array(names.tolist(), pa.string())
        table = loaded.table.append_column("split", splits)
        loaded = LoadedTable(table=table, source=source, memory=loaded.memory, split_rule=rule)
    return loaded


def _concatenate(parts: Mapping[str, Any], source: str) -> Any:
    """Return the samples of all splits as one data set; a column `split` gives way to the keys."""
    plain = [
        part.remove_columns("split") if "split" in part.column_names else part
        for part in parts.values()
    ]
    with explained(f"the splits of {source} differ", ValueError):
        return sys.modules[LIBRARY].concatenate_datasets(plain)


def _read(dataset: Any, source: str) -> LoadedTable:
    media = [name for name, feature in dataset.features.items() if _is_media(feature)]
    others = [name for name in dataset.column_names if name not in media]
    columns: dict[str, Any] = {}
    if others and len(dataset):
        plain = dataset.select_columns(others).with_format("arrow")[:]
        columns = {name: plain_column(plain.column(name)) for name in others}
    memory = {}
    for name in media:
        column = dataset.with_format(None).select_columns([name])
        column = column.cast_column(name, _undecoded(dataset.features[name]))
        memory[name] = MediaCells(column, name)
        columns[name] = row_numbers(_present(column, name))
    table = pa.table({name: columns[name] for name in dataset.column_names if name in columns})
    table = table.replace_schema_metadata(_metadata(dataset))
    return LoadedTable(table=table, source=source, memory=dict(memory))


def _present(column: Any, name: str) -> np.ndarray:
    """Return which rows have bytes or a path, bool (N,)."""
    valid = [np.zeros(0, bool)]
    for batch in column.with_format("arrow").iter(batch_size=BATCH):
        for chunk in batch.column(name).chunks:
            valid.append(values_and_paths(getattr(chunk, "storage", chunk))[0])
    return np.concatenate(valid)


def undecoded_stream(stream: Any) -> Any:
    """Return a stream whose images and clips are not decoded."""
    for name, feature in (stream.features or {}).items():
        if _is_media(feature):
            stream = stream.cast_column(name, _undecoded(feature))
    return stream


def _undecoded(feature: Any) -> Any:
    feature = copy.copy(feature)
    feature.decode = False
    return feature


def _is_media(feature: Any) -> bool:
    return type(feature).__name__ in MEDIA


def _metadata(dataset: Any) -> dict[bytes, bytes] | None:
    return dataset.features.arrow_schema.metadata if dataset.features else None
