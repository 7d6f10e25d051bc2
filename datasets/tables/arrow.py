"""Operations on whole columns of a table, by Arrow; checks of tables of any format."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fusionzoo.errors import FusionZooError, explained

if TYPE_CHECKING:
    from torch import Tensor

BINARY_TYPES = (
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_binary_view,
    pa.types.is_fixed_size_binary,
)
ArrowColumn: TypeAlias = pa.Array | pa.ChunkedArray  # a column, in one piece or in several
MAX_DEPTH = 64  # of lists and objects in a row of JSON; Arrow's parser crashes from about 10,000
OPENING, CLOSING = b"[{", b"]}"
TEXT = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?', re.S)  # of JSON


def flat(column: ArrowColumn) -> pa.Array:
    """Return a column in one piece."""
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def row_numbers(has_value: np.ndarray) -> pa.Array:
    """Return the numbers of the rows, null where a row has no value."""
    return pa.array(np.arange(len(has_value)), mask=~has_value)


def count_values(column: ArrowColumn) -> dict[Any, int]:
    """Return how often each value occurs, in the order of first occurrence.

    >>> count_values(pa.chunked_array([["train", "test", "train"]]))
    {'train': 2, 'test': 1}
    """
    return {entry["values"]: entry["counts"] for entry in pc.value_counts(column).to_pylist()}


def rows_equal_to(column: ArrowColumn, value: str) -> Tensor:
    """Return the positions of a value, int64."""
    import torch

    return torch.from_numpy(np.flatnonzero(pc.equal(column, value).to_numpy()))


def positions_in(column: ArrowColumn, values: Sequence[str]) -> Tensor:
    """Return the index in `values` of each cell, int64; -1 where it is not among them.

    >>> positions_in(pa.chunked_array([["b", "a", "c"]]), ["a", "b"]).tolist()
    [1, 0, -1]
    """
    import torch

    indices = pc.index_in(column, value_set=pa.array(values, column.type))
    return torch.from_numpy(pc.fill_null(indices, -1).to_numpy().astype(np.int64))


def cell_lengths(column: ArrowColumn) -> Tensor | None:
    """Return the length of each text or list, float64; None: the column holds neither."""
    import torch

    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        lengths = pc.utf8_length(column)
    elif pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        lengths = pc.list_value_length(column)
    else:
        return None
    return torch.from_numpy(pc.fill_null(lengths, 0).to_numpy().astype(np.float64))


def is_list(kind: pa.DataType) -> bool:
    """Return whether the cells of a column of this type are lists."""
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def is_text(kind: pa.DataType) -> bool:
    """Return whether the cells of a column of this type are text."""
    types = pa.types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def is_list_of_text(kind: pa.DataType) -> bool:
    """Return whether the cells of a column of this type are lists of text.

    >>> is_list_of_text(pa.list_(pa.string())), is_list_of_text(pa.string())
    (True, False)
    """
    return pa.types.is_list(kind) and is_text(kind.value_type)


def values_and_paths(column: ArrowColumn) -> tuple[np.ndarray, list[tuple[int, str]]]:
    """Return which cells of media have a value, bool (N,), and row and path of those in files.

    A value is what is not null; of structs bytes or a path, of lists any item.
    """
    if pa.types.is_list(column.type):
        rows = pc.list_parent_indices(column).to_pylist()
        _, files = values_and_paths(pc.list_flatten(column))
        lengths = pc.fill_null(pc.list_value_length(column), 0)
        return lengths.to_numpy(zero_copy_only=False) > 0, [(rows[item], x) for item, x in files]
    names = {field.name for field in column.type} if pa.types.is_struct(column.type) else set()
    if not names & {"bytes", "path"}:
        return column.is_valid().to_numpy(zero_copy_only=False), []
    has_value, paths = np.zeros(len(column), bool), []
    if "bytes" in names:
        is_valid = pc.struct_field(column, "bytes").is_valid()
        has_value |= is_valid.to_numpy(zero_copy_only=False)
    if "path" in names:
        paths = pc.struct_field(column, "path").to_pylist()
    files = [(row, x) for row, x in enumerate(paths) if x is not None and not has_value[row]]
    has_value[[row for row, _ in files]] = True
    return has_value, files


def first_true(mask: ArrowColumn) -> int | None:
    """Return the position of the first True in a column, or None; a null is False.

    >>> first_true(pa.chunked_array([[False, None], [True]]))
    2
    """
    position = pc.index(mask, True).as_py()
    return None if position < 0 else position


def read_each(
    cells: Iterable[Any],
    read: Callable[[Any], Any],
    place: Callable[[int], str],
    missing: Any = None,
) -> list[Any]:
    """Return what `read` makes of each cell, `missing` of null; an error begins with its place."""
    values = []
    for row, cell in enumerate(cells):
        try:
            values.append(missing if cell is None else read(cell))
        except FusionZooError as error:
            raise FusionZooError(f"{place(row)}: {error}") from None
    return values


def check_depth(lines: Iterable[str], source: str) -> None:
    """Raise an error for a row of JSON lines that is nested too deeply; text does not count."""
    for row, line in enumerate(lines, start=1):
        if line.count("[") + line.count("{") <= MAX_DEPTH:
            continue
        letters = np.frombuffer(TEXT.sub("", line).encode(errors="replace"), np.uint8)
        opened = np.isin(letters, np.frombuffer(OPENING, np.uint8))
        closed = np.isin(letters, np.frombuffer(CLOSING, np.uint8))
        depth = (opened.astype(np.int32) - closed).cumsum(dtype=np.int32).max(initial=0)
        if depth > MAX_DEPTH:
            raise FusionZooError(f"{source}, row {row} is nested {depth} deep, above {MAX_DEPTH}")


def check_unicode(table: pa.Table, source: str) -> pa.Table:
    """Return a table whose names and texts are valid UTF-8, which Arrow's readers do not check."""
    with explained(f"{source}: the name of a column is not UTF-8", UnicodeDecodeError):
        names = table.column_names
    for name, column in zip(names, table.columns, strict=True):
        where = f"{source}, column {name!r}"
        with explained(f"{where} holds text that is not UTF-8: save the file so", pa.ArrowInvalid):
            column.validate(full=True)
    return table


def with_text_of_uuids(table: pa.Table) -> pa.Table:
    """Return a table with the usual text of UUIDs, `9f000000-...`, for their 16 bytes."""
    for position, field in enumerate(table.schema):
        if getattr(field.type, "extension_name", "") == "arrow.uuid":
            stored = plain_column(table.column(position)).to_pylist()
            texts = [None if x is None else str(UUID(bytes=x)) for x in stored]
            table = table.set_column(position, field.name, pa.array(texts, pa.string()))
    return table


def plain_column(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a column of an extension type as the plain type it is stored in."""
    if not isinstance(column.type, pa.BaseExtensionType):
        return column
    chunks = [chunk.storage for chunk in column.chunks]
    return pa.chunked_array(chunks, column.type.storage_type)
