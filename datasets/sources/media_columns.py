"""Columns of media: bytes and objects, several items per cell, parts of clips."""

from __future__ import annotations

import glob
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fusionzoo.errors import FusionZooError, located

from ..media.audio import spread
from ..media.budgets import check_budget
from ..media.decode import media_value
from ..media.formats import VIDEOS
from ..tables.arrow import (
    BINARY_TYPES,
    ArrowColumn,
    first_true,
    is_list_of_text,
    row_numbers,
    values_and_paths,
)
from ..tables.paths import PathChecker, is_collecting, refuse
from ..tables.provenance import LoadedTable, Provenance
from ..tables.table import EDGES, Samples
from .columns import Columns, one_column
from .table_settings import Roles, TableSettings

SEVERAL = ("image", "audio")  # kinds of which a sample may have several items
WILDCARDS = "*?"


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
        return values_and_paths(self.column)[1]


def take_out(
    table: pa.Table, root: Path | None, cell_names: Collection[str] = ()
) -> tuple[pa.Table, dict[str, ArrowCells]]:
    """Replace columns of bytes and structs, but for `cell_names`, with row numbers or null."""
    cells = {}
    for position, field in enumerate(table.schema):
        inner = field.type.value_type if pa.types.is_list(field.type) else field.type
        is_binary = any(is_type(inner) for is_type in BINARY_TYPES)
        if field.name in cell_names or not (is_binary or pa.types.is_struct(inner)):
            continue
        column = table.column(position)
        cells[field.name] = ArrowCells(column, root)
        numbers = row_numbers(values_and_paths(column)[0])
        table = table.set_column(position, field.name, numbers)
    return table, cells


def check_cell_paths(dataset: Samples, must_exist: bool) -> None:
    """Raise an error for the path of a struct that leaves the folder or, if it must, is no file.

    Text is in its cell: a struct there would name a file that no setting says is to be read.
    """
    for name, cells in dataset.memory.items():
        if dataset.modalities[name] == "text" and isinstance(cells, ArrowCells):
            raise FusionZooError(f"column {name!r} is of kind text, and holds {cells.column.type}")
    if dataset.allow_outside and not must_exist:
        return
    checker = PathChecker(
        dataset.root or Path(), allow_outside=dataset.allow_outside, must_exist=must_exist
    )
    for name, cells in dataset.memory.items():
        for row, path in getattr(cells, "paths", tuple)():
            problem = checker.problem(path)
            if problem:
                raise FusionZooError(f"{dataset.sample_place(row)}: {name} {problem}")


def without_empty(
    values: Mapping[str, ArrowColumn], kinds: Mapping[str, str]
) -> dict[str, ArrowColumn]:
    """Return the modalities' columns; lists lose empty entries, and empty lists become null."""
    return {
        name: _without_empty(column, name) if kinds[name] in SEVERAL else column
        for name, column in values.items()
    }


def _without_empty(column: ArrowColumn, name: str) -> ArrowColumn:
    kind = column.type
    if pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        column = column.cast(pa.list_(kind.value_type))
    if not pa.types.is_list(column.type):
        return column
    if pa.types.is_null(column.type.value_type):
        return pa.nulls(len(column), pa.string())
    if not is_list_of_text(column.type):
        raise FusionZooError(f"{name} holds {column.type}, expected paths of images or clips")
    cells = [[x for x in cell or () if x and x.strip()] or None for cell in column.to_pylist()]
    return pa.array(cells, pa.list_(pa.string()))


def with_slashes(
    values: Mapping[str, ArrowColumn], path_columns: Sequence[str]
) -> tuple[dict[str, ArrowColumn], list[str]]:
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
    loaded: LoadedTable, kinds: Mapping[str, str], settings: TableSettings, *, must_match: bool
) -> LoadedTable:
    """Replace patterns in cells of images and clips by lists of the files that match, sorted.

    `*` stands for any letters and `?` for one, within a folder; numbers in names are sorted by
    value. A pattern that matches nothing is an error or, unless it `must_match`, a file that is not
    there. Of more than `settings.frames` images as many are taken, uniformly spaced.
    """
    table, root = loaded.table, loaded.root or Path()
    place = partial(_place, loaded.source, table, loaded.provenance)
    notes = []
    for name, kind in kinds.items():
        column = table[name]
        is_text = pa.types.is_string(column.type)
        if kind not in SEVERAL or not (is_text or is_list_of_text(column.type)):
            continue
        texts = column if is_text else pc.list_flatten(column)
        if not pc.any(pc.match_substring_regex(texts, f"[{WILDCARDS}]")).as_py():
            continue
        count = settings.frames if kind == "image" else None
        known: dict[str, list[str]] = {}
        cells: list[list[str] | None] = []
        for row, cell in enumerate(column.to_pylist()):
            files = []
            with located(partial(place, row)):
                for pattern in [cell] if isinstance(cell, str) else cell or []:
                    if pattern not in known:
                        known[pattern] = _matches(pattern, root)
                    matches = spread(known[pattern], count)
                    if not matches and (must_match or is_collecting()):
                        advice = "matches no file (--data.on_error missing)"
                        refuse(f"{name} cell {pattern!r} {advice}", "path", row=row, column=name)
                    files += matches or ([] if is_collecting() else [pattern])
                check_budget("items", len(files), name)
            cells.append(files or None)
        position = table.column_names.index(name)
        table = table.set_column(position, name, pa.array(cells, pa.list_(pa.string())))
        limit = f", at most {count} of each, uniformly spaced (--data.frames)" if count else ""
        notes.append(f"files that match the patterns in {name}{limit}")
    reading = (*loaded.provenance.reading, *notes)
    return replace(loaded, table=table, provenance=replace(loaded.provenance, reading=reading))


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


def split_roles(settings: TableSettings) -> tuple[Roles, dict[str, str]]:
    """Return the roles without those of segments (`start`, `audio_end`), and these."""
    columns = settings.columns or {}
    segments = {}
    for role, column in columns.items():
        is_edge = role in EDGES or role.endswith(tuple(f"_{edge}" for edge in EDGES))
        if is_edge and role not in (settings.kinds or {}):
            segments[role] = one_column(role, column)
    return {role: name for role, name in columns.items() if role not in segments}, segments


def read_segments(
    table: Columns,
    kinds: Mapping[str, str],
    values: Mapping[str, ArrowColumn],
    roles: Mapping[str, str],
    taken: Collection[int],
) -> tuple[dict[str, ArrowColumn], list[str]]:
    """Return columns `<modality>_start` and `<modality>_end`, float64, and notes of them.

    For a modality `audio` the column is that of the role `audio_start`, else that of `start`. A
    column that only has the name, and neither numbers nor clips beside it, stays unused; `taken`
    are the positions of columns that are something else.
    """
    columns: dict[str, ArrowColumn] = {}
    notes = []
    for role in roles:
        table.require(roles[role], f"--data.columns.{role}")
    for name, kind in kinds.items():
        named = any(f"{name}_{edge}" in roles or f"{name}_{edge}" in table for edge in EDGES)
        if kind == "audio" or (kind == "image" and (named or _has_videos(values[name]))):
            edges = {edge: _read_edge(table, name, edge, roles, taken) for edge in EDGES}
            known = {edge: x for edge, x in edges.items() if x is not None}
            if known:
                _check(table, name, {edge: x for edge, (x, _) in known.items()})
                names = " and ".join(repr(column) for _, column in known.values())
                notes.append(f"segments of {name} by {names}, in seconds")
            columns |= {f"{name}_{edge}": x for edge, (x, _) in known.items()}
    lost = [role for role in roles if not any(role in (x, x.rpartition("_")[2]) for x in columns)]
    if lost:
        raise FusionZooError(f"--data.columns.{lost[0]} is for neither clips nor videos")
    return columns, notes


def _has_videos(column: ArrowColumn) -> bool:
    """Whether any cell names a video; of values outside of the table that is not known."""
    if pa.types.is_list(column.type):
        column = pc.list_flatten(column)
    if not pa.types.is_string(column.type):
        return False
    pattern = rf"(?i)\.({'|'.join(suffix[1:] for suffix in sorted(VIDEOS))})$"
    return bool(pc.any(pc.match_substring_regex(column, pattern)).as_py())


def _read_edge(
    table: Columns, name: str, edge: str, roles: Mapping[str, str], taken: Collection[int]
) -> tuple[ArrowColumn, str] | None:
    """Return the seconds and the column of one edge; None if there is no such column."""
    for role in (f"{name}_{edge}", edge):
        column = roles.get(role, role)
        if column not in table or table.position(column) in taken:
            continue
        used = set(table.used)
        text = table.numbers(column)
        try:
            return text.cast(pa.float64()), table.name(column)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            if role in roles or role != edge:
                row, cell = _first_word(text)
                raise FusionZooError(
                    f"{table.where(row)}: {table.name(column)} is {cell!r}, no number of seconds"
                ) from None
            table.used = used
    return None


def _first_word(column: ArrowColumn) -> tuple[int, str]:
    """Return row and text of the first cell that is no number."""
    for row, cell in enumerate(column.to_pylist()):
        try:
            float(cell or 0)
        except ValueError:
            return row, cell
    return 0, str(column[0])


def _check(table: Columns, name: str, seconds: Mapping[str, ArrowColumn]) -> None:
    """Raise an error for the first segment that is negative, not finite or empty."""
    unknown = np.full(len(table.table), np.nan)
    starts, ends = (
        seconds[edge].to_numpy(zero_copy_only=False) if edge in seconds else unknown
        for edge in EDGES
    )
    bad = (starts < 0) | (ends <= np.nan_to_num(starts)) | np.isinf(starts) | np.isinf(ends)
    row = first_true(pa.chunked_array([pa.array(bad)]))
    if row is not None:
        raise FusionZooError(
            f"{table.where(row)}: the segment of {name} from {starts[row]:g} s to {ends[row]:g} s"
        )
