"""Vectors and sequences that are written into cells of text: `[0.5, 1, 2]`, `[[1, 2], [3, 4]]`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from fusionzoo.errors import FusionZooError

from ..arrays import DIMENSIONS
from .columns import Columns

LIST = r"^\s*\[[\s\S]*\]\s*$"
NUMBERS = pa.float64()


def read_list_cells(
    table: Columns, values: Mapping[str, Any], kinds: Mapping[str, str]
) -> tuple[dict[str, Any], list[str]]:
    """Return the modalities with lists of numbers for text in brackets, and notes of this.

    A column in which some cells are lists has no other cells.
    """
    columns, notes = dict(values), []
    for name, column in values.items():
        if kinds[name] not in DIMENSIONS or not pa.types.is_string(column.type):
            continue
        is_list = pc.match_substring_regex(column, LIST)
        if not pc.any(is_list).as_py():
            continue
        columns[name] = _read(table, name, column, DIMENSIONS[kinds[name]])
        notes.append(f"text in {name} as lists of numbers")
    return columns, notes


def _read(table: Columns, name: str, column: Any, ndim: int) -> pa.Array:
    cells: list[Any] = []
    for row, text in enumerate(column.to_pylist()):
        cell = None if text is None else _parse(text)
        if text is not None and not _is_array(cell, ndim):
            shape = "[0.5, 1, 2]" if ndim == 1 else "[[0.5, 1], [2, 3]]"
            shown = text if len(text) <= 60 else f"{text[:57]}..."
            raise FusionZooError(
                f"{table.where(row)}, column {table.name(name)!r}: {shown!r} is no list of numbers"
                f" such as {shape}: write it so, with commas, or store arrays in a file (.npy)"
            )
        cells.append(cell)
    kind = pa.list_(NUMBERS) if ndim == 1 else pa.list_(pa.list_(NUMBERS))
    return pa.array(cells, kind)


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _is_array(cell: Any, ndim: int) -> bool:
    """Return whether a cell is a list of numbers, or of such lists."""
    if not isinstance(cell, list):
        return False
    if ndim > 1:
        return all(_is_array(item, ndim - 1) for item in cell)
    return all(isinstance(x, float) or _is_integer(x) for x in cell)


def _is_integer(value: Any) -> bool:
    """Return whether a value is an integer that float64 can hold."""
    return isinstance(value, int) and not isinstance(value, bool) and value.bit_length() < 1024
