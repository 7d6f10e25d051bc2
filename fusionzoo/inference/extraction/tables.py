"""Rows of embeddings as an Arrow table: vectors as fixed-size lists.

Shapes: `N` rows of a part, `M` modalities, `D` width.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fusionzoo.datasets import PairedDataset
from fusionzoo.errors import FusionZooError

from .vectors import PROBABILITIES, WEIGHTS

Dtype = Literal["float32", "float16", "int8"]
TYPES = {"float32": pa.float32(), "float16": pa.float16(), "int8": pa.int8()}
LABELS = ("id", "split", "target")  # text columns that are copied from the data set
READABLE = "readable"  # False: nothing of the row could be read, and its vectors are null


def schema_of(
    widths: Mapping[str, int], modalities: Sequence[str], dtype: Dtype, about: Mapping[str, Any]
) -> pa.Schema:
    """Return the columns of a file, and what it says of itself as metadata."""
    fields = [pa.field(name, pa.string()) for name in LABELS]
    fields += [pa.field(f"present_{name}", pa.bool_()) for name in modalities]
    fields.append(pa.field(READABLE, pa.bool_()))
    for name, width in widths.items():
        kind = "float32" if name in (PROBABILITIES, WEIGHTS) else dtype
        fields.append(pa.field(name, pa.list_(TYPES[kind], width)))
        if kind == "int8":
            fields.append(pa.field(f"{name}_scale", pa.float32()))
    schema = pa.schema(fields)
    repeated = [name for name in schema.names if schema.names.count(name) > 1]
    if repeated:
        raise FusionZooError(
            f"two columns of the file would be named {repeated[0]!r}: give the modality another"
            " name (--data.columns)"
        )
    return schema.with_metadata({"fusionzoo": json.dumps(about)})


def table_of(
    schema: pa.Schema,
    dataset: PairedDataset,
    present: np.ndarray[Any, Any],
    columns: Mapping[str, np.ndarray[Any, Any]],
) -> pa.Table:
    """Build the rows of a data set: present (N, M), each column (N, D) float32."""
    readable = present.any(1)
    arrays: dict[str, Any] = {name: _text(dataset.chosen(name)) for name in LABELS}
    flags = [name for name in schema.names if name.startswith("present_")]
    for name, column in zip(flags, present.T, strict=False):
        arrays[name] = pa.array(column)
    arrays[READABLE] = pa.array(readable)
    unreadable = None if readable.all() else pa.array(~readable)
    for name, values in columns.items():
        if pa.types.is_int8(schema.field(name).type.value_type):
            values, scale = quantise(values)
            arrays[f"{name}_scale"] = pa.array(scale, mask=~readable)
        arrays[name] = _lists(values, schema.field(name).type, unreadable)
    return pa.table([arrays[name] for name in schema.names], schema=schema)


def _text(column: Any) -> Any:
    return pc.cast(column, pa.string())


def _lists(values: np.ndarray[Any, Any], kind: Any, unreadable: Any) -> Any:
    flat = pa.array(np.ascontiguousarray(values, kind.value_type.to_pandas_dtype()).ravel())
    return pa.FixedSizeListArray.from_arrays(flat, type=kind, mask=unreadable)


def quantise(vectors: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return int8 (N, D) and a scale per vector (N,), whose product is nearest to the vectors.

    >>> quantise(np.array([[0.5, -1.0, 0.0], [0.0, 0.0, 0.0]], np.float32))[0].tolist()
    [[64, -127, 0], [0, 0, 0]]
    """
    scale = np.abs(vectors).max(1, initial=0.0).astype(np.float32) / np.float32(127)
    rounded = np.rint(vectors / np.where(scale > 0, scale, 1)[:, None])
    return rounded.astype(np.int8), scale
