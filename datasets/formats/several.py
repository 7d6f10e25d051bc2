"""Columns of pictures and clips with several items per cell: lists, and patterns `frames/*.jpg`."""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from fusionzoo.errors import FusionZooError

from ..arrow import is_list_of_text
from ..budgets import check_budget
from ..failures import OnError
from ..provenance import Provenance
from ..refusals import is_collecting, refuse
from ..stretch import spread

SEVERAL = ("image", "audio")  # kinds of which a sample may have several items
WILDCARDS = "*?"


def without_empty(values: Mapping[str, Any], kinds: Mapping[str, str]) -> dict[str, Any]:
    """Return the modalities' columns; lists lose empty entries, and empty lists become null."""
    return {
        name: _without_empty(column, name) if kinds[name] in SEVERAL else column
        for name, column in values.items()
    }


def _without_empty(column: Any, name: str) -> Any:
    kind = column.type
    if pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        column = column.cast(pa.list_(kind.value_type))
    if not pa.types.is_list(column.type):
        return column
    if pa.types.is_null(column.type.value_type):
        return pa.nulls(len(column), pa.string())
    if not is_list_of_text(column.type):
        raise FusionZooError(
            f"{name} is of pictures or clips, and its cells are lists of {column.type.value_type}:"
            " expected paths (--data.kinds says which kind a column is of)"
        )
    cells = [[x for x in cell or () if x and x.strip()] or None for cell in column.to_pylist()]
    return pa.array(cells, pa.list_(pa.string()))


def with_slashes(
    values: Mapping[str, Any], path_columns: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """Return the modalities with slashes in paths for backslashes, and notes of this."""
    columns, notes = dict(values), []
    for name in path_columns:
        column = columns[name]
        is_text = pa.types.is_string(column.type)
        if not is_text and not is_list_of_text(column.type):
            continue
        texts = column if is_text else pc.list_flatten(column)
        if pc.any(pc.match_substring(texts, "\\")).as_py():
            if is_text:
                columns[name] = pc.replace_substring(column, "\\", "/")
            else:
                cells = column.to_pylist()
                cells = [cell and [path.replace("\\", "/") for path in cell] for cell in cells]
                columns[name] = pa.array(cells, pa.list_(pa.string()))
            notes.append(f"backslashes in {name} as slashes")
    return columns, notes


def expand_patterns(
    table: pa.Table,
    kinds: Mapping[str, str],
    provenance: Provenance,
    *,
    source: str,
    root: Path | None,
    frames: int | None,
    on_error: OnError,
) -> tuple[pa.Table, Provenance]:
    """Replace patterns in cells of pictures and clips by lists of the files that match, sorted.

    `*` stands for any letters and `?` for one, within a folder; numbers in names are sorted by
    value. A pattern that matches nothing is an error or, unless `on_error` is `raise`, a file that
    is not there. Of more than `frames` pictures as many are taken, uniformly spaced.
    """
    place = partial(_place, source, table, provenance)
    must_match = on_error == "raise"
    notes = []
    for name, kind in kinds.items():
        column = table[name]
        is_text = pa.types.is_string(column.type)
        if kind not in SEVERAL or not (is_text or is_list_of_text(column.type)):
            continue
        texts = column if is_text else pc.list_flatten(column)
        if not pc.any(pc.match_substring_regex(texts, f"[{WILDCARDS}]")).as_py():
            continue
        count = frames if kind == "image" else None
        known: dict[str, list[str]] = {}
        cells: list[list[str] | None] = []
        for row, cell in enumerate(column.to_pylist()):
            patterns = [cell] if isinstance(cell, str) else cell or []
            files = []
            for pattern in patterns:
                if pattern not in known:
                    known[pattern] = _matches(pattern, root or Path())
                matches = spread(known[pattern], count)
                if not matches:
                    message = f"{name} cell {pattern!r} matches no file"
                    _no_match(message, row, name, must_match, place)
                    matches = [] if is_collecting() else [pattern]
                files += matches
            check_budget("items", len(files), f"{place(row)}: {name}")
            cells.append(files or None)
        position = table.column_names.index(name)
        table = table.set_column(position, name, pa.array(cells, pa.list_(pa.string())))
        some = f", at most {count} of each, uniformly spaced (--data.frames)" if count else ""
        notes.append(f"files that match the patterns in {name}{some}")
    return table, replace(provenance, reading=(*provenance.reading, *notes))


def _matches(pattern: str, root: Path) -> list[str]:
    """Return the files that match a cell, or the cell itself if it names a file."""
    if not set(WILDCARDS) & set(pattern) or (root / pattern).is_file():
        return [pattern]
    escaped = pattern.replace("[", "[[]")  # brackets are part of names
    files = (path for path in glob.glob(escaped, root_dir=root) if (root / path).is_file())
    return sorted(files, key=_by_number)


def _by_number(path: str) -> list[tuple[bool, int, str]]:
    """Return a key that sorts 2.jpg before 10.jpg."""
    parts = re.split(r"([0-9]+)", path)
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]


def _place(source: str, rows: pa.Table, provenance: Provenance, row: int) -> str:
    """Return the place of a row for messages, with the id of its sample."""
    numbers = provenance.row_numbers
    where = f"{source}, row {numbers.number(row)}" if numbers else source
    return f"{where}, sample {rows['id'][row].as_py()!r}"


def _no_match(
    message: str, row: int, name: str, must_match: bool, place: Callable[[int], str]
) -> None:
    if is_collecting():
        refuse(message, "path", row=row, column=name)
    elif must_match:
        raise FusionZooError(
            f"{place(row)}: {message} (--data.on_error missing or skip continues without it)"
        )
