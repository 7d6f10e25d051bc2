"""Check paths in a table's cells: files must exist, and must not leave the folder."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from fusionzoo.errors import FusionZooError, located, one_line

from ..media.arrays import file_of
from .arrow import ArrowColumn, is_list_of_text
from .provenance import RowNumbers

NUMBER = r"[+-]?([0-9]+([.,][0-9]*)?|[.,][0-9]+)([eE][+-]?[0-9]+)?"
MAX_SHOWN = 120  # characters of a cell in a message
_collected: ContextVar[list[Refusal] | None] = ContextVar("refusals", default=None)
_labels_of_join: ContextVar[Mapping[str, str] | None] = ContextVar("labels", default=None)


class PathChecker:
    """Find problems with paths relative to `folder`.

    Unless `allow_outside`, a path must lead into the folder once its links are resolved. Resolving
    every path takes 40 s for a million rows, so a path without links and `..` below the folder is
    not resolved; each folder on the way is checked once.
    """

    def __init__(self, folder: Path, *, allow_outside: bool, must_exist: bool) -> None:
        self.folder, self.allow_outside, self.must_exist = folder, allow_outside, must_exist
        self._top = folder.resolve()
        self._below = {str(self._top): True}  # folder -> whether no link leads to it

    def problem(self, cell: str) -> str:
        """Return the problem with the path in a cell, or an empty string."""
        shown = f"cell {cell[:MAX_SHOWN]!r}"
        try:
            return self._problem(cell, shown)
        except OSError as error:  # too long, no permission
            return f"{shown} cannot be opened: {error.strerror}" if self.must_exist else ""
        except (ValueError, RuntimeError) as error:  # a null byte; a loop of links
            return f"{shown} is not a path: {one_line(error)[:MAX_SHOWN]}"

    def _problem(self, cell: str, shown: str) -> str:
        path = os.path.join(self._top, cell)
        try:
            mode = os.lstat(path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            mode = 0
        is_link = stat.S_ISLNK(mode)
        if not self.allow_outside and (is_link or not self._is_below(path, is_file=True)):
            end = Path(path).resolve()
            if not end.is_relative_to(self._top):
                return (
                    f"{shown} leads to {str(end)[:MAX_SHOWN]}, outside of {self._top}"
                    " (--data.allow_outside true permits that)"
                )
        is_file = os.path.isfile(path) if is_link else stat.S_ISREG(mode)
        if is_file or not self.must_exist:
            return ""
        if re.fullmatch(NUMBER, cell.strip()):
            comma = " --data.decimal ," if "," in cell else ""
            return f"{shown} is a number, not a path: --data.columns.tabular reads numbers{comma}"
        return (
            f"file {self.folder / cell} does not exist"
            " (--data.on_error missing or skip continues without it)"
        )

    def _is_below(self, path: str, is_file: bool = False) -> bool:
        """Return whether a path leads down from the folder without any link or `..`."""
        if path in self._below:
            return self._below[path]
        parent, name = os.path.split(path)
        is_plain = name not in ("", os.curdir, os.pardir) and (is_file or not os.path.islink(path))
        is_below = is_plain and self._is_below(parent)
        if not is_file:
            self._below[path] = is_below
        return is_below


def check_paths(
    table: pa.Table, columns: Mapping[str, str], checker: PathChecker, where: Callable[[int], str]
) -> pa.Table:
    """Refuse the paths in `columns`, a name and a kind each, that have a problem; return the table
    without their cells.

    Of a list each path is checked. But for texts a cell may name a part of a file: `feats.npy[17]`.
    `where` names a row for messages.
    """
    if checker.allow_outside and not checker.must_exist:
        return table
    for name, kind in columns.items():
        problems: dict[str, str] = {}  # of files, which many cells may name
        refused: set[int] = set()
        for row, cell in paths_in(table[name]):
            path = cell if kind == "text" else file_of(cell)
            if path not in problems:
                problems[path] = checker.problem(path)
            if problems[path] and row not in refused:
                with located(partial(where, row)):
                    refuse(f"{name} {problems[path]}", "path", row=row, column=name)
                refused.add(row)
        if refused:
            cells = table[name].to_pylist()
            cells = [None if row in refused else cell for row, cell in enumerate(cells)]
            column = pa.array(cells, table[name].type)
            table = table.set_column(table.column_names.index(name), name, column)
    return table


def holds_paths(kind: str, column_type: pa.DataType) -> bool:
    """Whether cells are paths; lists of text are, of images and clips, else they are numbers."""
    is_several = kind in ("image", "audio") and is_list_of_text(column_type)
    return is_several or pa.types.is_string(column_type)


def paths_in(column: ArrowColumn) -> Iterator[tuple[int, str]]:
    """Yield row and text of each cell, or of each entry of a list of text; nothing of others."""
    is_text = pa.types.is_string(column.type)
    has_text = is_text or is_list_of_text(column.type)
    for row, cell in enumerate(column.to_pylist() if has_text else ()):
        if cell is not None:
            yield from ((row, path) for path in ([cell] if is_text else cell))


@dataclass(frozen=True)
class Refusal:
    """A fault for which opening the data set raises an error."""

    kind: str  # duplicate_id, empty_id, empty_sample, path, split, column, file
    message: str
    row: int | None = None  # of the table, from 0
    column: str = ""


@contextmanager
def collecting() -> Iterator[list[Refusal]]:
    """Open data sets without raising; the list receives what they refuse."""
    refusals: list[Refusal] = []
    token = _collected.set(refusals)
    try:
        yield refusals
    finally:
        _collected.reset(token)


def is_collecting() -> bool:
    """Return whether faults are listed rather than raised."""
    return _collected.get() is not None


@contextmanager
def part_of_join(targets: Mapping[str, str] | None) -> Iterator[None]:
    """Open sources that are joined afterwards; `targets` are the label columns of the join."""
    labels = {"target": "classification"} if targets is None else targets
    token = _labels_of_join.set(labels)
    try:
        yield
    finally:
        _labels_of_join.reset(token)


def labels_of_join() -> Mapping[str, str] | None:
    """Return the label columns of the join whose sources are opened; None outside of a join."""
    return _labels_of_join.get()


def refuse(message: str, kind: str, *, row: int | None = None, column: str = "") -> None:
    """Raise the message, or add the fault to the list of `collecting`."""
    refusals = _collected.get()
    if refusals is None:
        raise FusionZooError(message)
    refusals.append(Refusal(kind, message, row, column))


def check_ids(table: pa.Table, where: Callable[[int], str], numbers: RowNumbers) -> pa.Table:
    """Refuse ids that are empty, or that several rows have; return a table where all differ."""
    if pc.count_distinct(table["id"]).as_py() == len(table):
        return table
    ids = table["id"].to_pylist()
    rows_of: dict[str | None, list[int]] = {}
    for row, key in enumerate(ids):
        rows_of.setdefault(key, []).append(row)
    for key, rows in rows_of.items():
        kind, message = "empty_id", "the id is empty"
        if key is not None:
            listed = "" if is_collecting() else numbers.list_rows(rows)
            kind = "duplicate_id"
            message = f"id {key!r} occurs {len(rows)} times{listed}: each row needs its own"
        for row in rows if key is None or len(rows) > 1 else ():
            with located(partial(where, row)):
                refuse(message, kind, row=row, column="id")
    unique = pa.array(tell_apart(ids, numbers), pa.string())
    return table.set_column(table.column_names.index("id"), "id", unique)


def tell_apart(ids: Sequence[str | None], row_numbers: RowNumbers) -> list[str]:
    """Return ids of which those that are empty, or that an earlier row has, name their row.

    >>> tell_apart(["a", "b", "a"], RowNumbers(first=2))
    ['a', 'b', 'a (row 4)']
    """
    first = {key: row for row, key in reversed([*enumerate(ids)]) if key is not None}
    again = [row for row, key in enumerate(ids) if key is None or first[key] != row]
    numbers = dict(zip(again, row_numbers.numbers(again), strict=True))
    return [
        f"{key or ''} (row {numbers[row]})".strip() if row in numbers else str(key)
        for row, key in enumerate(ids)
    ]
