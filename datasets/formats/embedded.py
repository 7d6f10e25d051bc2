"""Values outside of a table: bytes, `{bytes, path}` and objects, decoded when they are read."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fusionzoo.errors import FusionZooError

from ..paths import PathChecker
from ..shards.blocks import StoredCells
from ..table import SampleTable

BINARY_TYPES = (
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_binary_view,
    pa.types.is_fixed_size_binary,
)


class ArrowCells:
    """A column of bytes or structs, by row; its paths start from `root`."""

    def __init__(self, column: pa.ChunkedArray, root: Path | None) -> None:
        self.column, self.root = column, root

    def __len__(self) -> int:
        return len(self.column)

    def __getitem__(self, row: int) -> Any:
        return media_value(self.column[row].as_py(), self.root)

    def paths(self) -> list[tuple[int, str]]:
        """Return row and path of the cells that have a path and no bytes."""
        if pa.types.is_list(self.column.type):
            rows = pc.list_parent_indices(self.column).to_pylist()
            inner = ArrowCells(pc.list_flatten(self.column), self.root).paths()
            return [(rows[position], path) for position, path in inner]
        if "path" not in _field_names(self.column.type):
            return []
        paths = pc.struct_field(self.column, "path")
        if "bytes" in _field_names(self.column.type):
            empty = pc.struct_field(self.column, "bytes").is_null()
            paths = pc.if_else(empty, paths, pa.scalar(None, paths.type))
        return [(row, path) for row, path in enumerate(paths.to_pylist()) if path is not None]


class ObjectCells:
    """Objects in memory, by row: PIL pictures, arrays, tensors, `(samples, rate)`, dicts."""

    def __init__(self, values: Sequence[Any] | np.ndarray) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, row: int) -> Any:
        return media_value(self.values[row], None)


def media_value(value: Any, root: Path | None) -> Any:
    """Return a value that `media.decode` reads.

    Of `{bytes, path}` the bytes, else the path; of `{array, sampling_rate}`, or of an audio decoder
    of torchcodec, `(samples, rate)`. Of a list, each of its values.
    """
    if isinstance(value, list) and value and not isinstance(value[0], str | float | int):
        return [media_value(item, root) for item in value]
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    if hasattr(value, "get_all_samples"):
        clip = value.get_all_samples()
        return clip.data.mean(0), int(clip.sample_rate)
    if not isinstance(value, Mapping):
        return value
    if value.get("bytes") is not None:
        return bytes(value["bytes"])
    if value.get("path") is not None:
        return (root or Path()) / value["path"]
    if value.get("array") is not None and "sampling_rate" in value:
        return np.asarray(value["array"]), value["sampling_rate"]
    if value and not {"bytes", "path"} & set(value):
        raise FusionZooError(
            f"a mapping of {', '.join(map(str, value))} is no value: expected bytes and path, or"
            " array and sampling_rate"
        )
    return None


def take_out(
    table: pa.Table, root: Path | None, kept: Collection[str] = ()
) -> tuple[pa.Table, dict[str, ArrowCells]]:
    """Replace columns of bytes and structs with row numbers, null where a cell has no value.

    Those that are `kept` stay as they are.
    """
    cells = {}
    for position, field in enumerate(table.schema):
        inner = field.type.value_type if pa.types.is_list(field.type) else field.type
        is_binary = any(is_type(inner) for is_type in BINARY_TYPES)
        if field.name in kept or not (is_binary or pa.types.is_struct(inner)):
            continue
        column = table.column(position)
        cells[field.name] = ArrowCells(column, root)
        numbers = row_numbers(_has_value(column).to_numpy(zero_copy_only=False))
        table = table.set_column(position, field.name, numbers)
    return table, cells


def row_numbers(has_value: np.ndarray) -> pa.Array:
    """Return the numbers of the rows, null where a row has no value."""
    return pa.array(np.arange(len(has_value)), mask=~has_value)


def check_cell_paths(dataset: SampleTable, must_exist: bool) -> None:
    """Raise an error for the path of a struct that leaves the folder or, if it must, is no file.

    Text is in its cell: a struct there would name a file that no setting says is to be read.
    """
    for name, cells in dataset.memory.items():
        if dataset.modalities[name] == "text" and isinstance(cells, ArrowCells):
            raise FusionZooError(
                f"{dataset.source}: column {name!r} is of kind text, and holds {cells.column.type}:"
                " store text in it"
            )
    if dataset.allow_outside and not must_exist:
        return
    checker = PathChecker(
        dataset.root or Path(), allow_outside=dataset.allow_outside, must_exist=must_exist
    )
    for name, cells in dataset.memory.items():
        for row, path in cells.paths() if isinstance(cells, ArrowCells | StoredCells) else ():
            problem = checker.problem(path)
            if problem:
                raise FusionZooError(f"{dataset.sample_place(row)}: {name} {problem}")


def _has_value(column: pa.ChunkedArray) -> Any:
    """Return which cells are not null and, if they are `{bytes, path}`, have one of the two.

    A list has a value if it is not empty.
    """
    if pa.types.is_list(column.type):
        return pc.fill_null(pc.greater(pc.list_value_length(column), 0), False)
    fields = [name for name in ("bytes", "path") if name in _field_names(column.type)]
    if not fields:
        return column.is_valid()
    valid = [pc.struct_field(column, name).is_valid() for name in fields]
    return pc.or_(valid[0], valid[-1])


def _field_names(struct: pa.DataType) -> list[str]:
    return [field.name for field in struct] if pa.types.is_struct(struct) else []
