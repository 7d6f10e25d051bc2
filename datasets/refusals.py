"""Open data with faults: what would raise an error is listed and repaired instead.

`fusionzoo data check` opens a data set within `collecting`, so that one duplicate id does not hide
the other faults of a file. Everywhere else `refuse` raises.

Within `part_of_join`, rows without any modality are no fault: another source may have what they
lack, so `join` looks for such rows afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from fusionzoo.errors import FusionZooError

from .arrow import is_list_of_text
from .paths import PathChecker, paths_in
from .row_numbers import RowNumbers


@dataclass(frozen=True)
class Refusal:
    """A fault for which opening the data set raises an error."""

    kind: str  # duplicate_id, empty_id, empty_sample, path, split, column, file
    message: str
    row: int | None = None  # of the table, from 0
    column: str = ""


_collected: ContextVar[list[Refusal] | None] = ContextVar("refusals", default=None)


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


_labels_of_join: ContextVar[Mapping[str, str] | None] = ContextVar("labels", default=None)


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


def refuse(
    message: str, kind: str, *, where: str = "", row: int | None = None, column: str = ""
) -> None:
    """Raise `where` and the message, or add the fault to the list of `collecting`."""
    refusals = _collected.get()
    if refusals is None:
        raise FusionZooError(f"{where}{message}")
    refusals.append(Refusal(kind, message, row, column))


def repair_rows(
    table: pa.Table,
    modalities: Mapping[str, str],
    path_columns: Sequence[str],
    folder: Path,
    allow_outside: bool,
    row_numbers: RowNumbers | None,
) -> pa.Table:
    """Refuse every row that `PairedDataset` would; return a table with unique ids and safe paths.

    A path that leaves the folder is removed, so its file is never read. Rows keep their places.
    """
    table = table.set_column(
        table.column_names.index("id"), "id", _unique_ids(table["id"], row_numbers or RowNumbers())
    )
    for name in path_columns:
        if pa.types.is_string(table[name].type) or is_list_of_text(table[name].type):
            column = _safe_paths(table[name], name, folder, allow_outside)
            table = table.set_column(table.column_names.index(name), name, column)
    if labels_of_join() is not None:
        return table
    empty = sum(table[name].is_valid().to_numpy().astype(int) for name in modalities) == 0
    for row in empty.nonzero()[0].tolist():
        refuse("every modality is empty", "empty_sample", row=row)
    return table


def _unique_ids(column: pa.ChunkedArray, row_numbers: RowNumbers) -> pa.Array:
    ids = column.to_pylist()
    counts = Counter(ids)
    repeated = [row for row, key in enumerate(ids) if key is None or counts[key] > 1]
    numbers = dict(zip(repeated, row_numbers.numbers(repeated), strict=True))
    known: set[str] = set()
    for row, key in enumerate(ids):
        if key is None:
            refuse("the id is empty", "empty_id", row=row, column="id")
        elif counts[key] > 1:
            refuse(f"id {key!r} occurs {counts[key]} times", "duplicate_id", row=row, column="id")
        if key is None or key in known:
            ids[row] = f"{'' if key is None else key} (row {numbers[row]})".strip()
        known.add(ids[row])
    return pa.array(ids, pa.string())


def _safe_paths(
    column: pa.ChunkedArray, name: str, folder: Path, allow_outside: bool
) -> pa.ChunkedArray | pa.Array:
    checker = PathChecker(folder, allow_outside=allow_outside, must_exist=False)
    cells = column.to_pylist()
    problems = {}  # row -> that of its first path that has one
    for row, cell in paths_in(column):
        if row not in problems and (problem := checker.problem(cell)):
            problems[row] = problem
    for row, problem in problems.items():
        refuse(problem, "path", row=row, column=name)
        cells[row] = None
    return pa.array(cells, column.type) if problems else column
