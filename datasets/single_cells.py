"""Read a table a cell at a time, as loaders do: each column is looked up once."""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa


class SingleCells:
    """The cells of a table, by column and row."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self._columns: dict[str, Any] = {}  # Arrow arrays
        self._edges: dict[str, Any] = {}  # of columns with an edge of a segment; None: no column

    def __reduce__(self) -> tuple[Any, ...]:
        return SingleCells, (self.table,)  # a copy looks its columns up itself

    def of(self, table: pa.Table) -> SingleCells:
        """Return the cells of a table: these, if it is the same."""
        return self if table is self.table else SingleCells(table)

    def __call__(self, column: str, row: int) -> Any:
        """Return a cell as a Python value; None where it is null."""
        cells = self._columns.get(column)
        if cells is None:
            cells = self._columns[column] = _array_of(self.table[column])
        return cells[row].as_py()

    def segment(self, name: str, row: int) -> tuple[float | None, float | None]:
        """Return start and end of a modality's value in seconds, by its columns; None: not limited.

        `formats.segments` makes the columns.
        """
        return self._edge(f"{name}_start", row), self._edge(f"{name}_end", row)

    def _edge(self, column: str, row: int) -> float | None:
        if column not in self._edges:
            position = self.table.schema.get_field_index(column)
            is_edge = position >= 0 and pa.types.is_float64(self.table.schema.field(position).type)
            self._edges[column] = _array_of(self.table.column(position)) if is_edge else None
        cells = self._edges[column]
        seconds = None if cells is None else cells[row].as_py()
        return None if seconds is None or math.isnan(seconds) else seconds


def _array_of(column: pa.ChunkedArray) -> Any:
    """Return the only chunk of a column, which is read three times as fast, or the column."""
    return column.chunk(0) if column.num_chunks == 1 else column
