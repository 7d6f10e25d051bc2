"""A table's columns by name, ignoring case and spaces, and which of them are used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fusionzoo.cells import fold
from fusionzoo.errors import FusionZooError, did_you_mean, one_line

from ..refusals import refuse
from ..row_numbers import RowNumbers
from .cells import CellRules
from .checked import list_names

TEXT_TYPES = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)


class Columns:
    """The columns of a manifest by role; records which of them are used.

    `roles` maps roles to the user's names of columns, `{"target": "label"}`. A role without one is
    looked up under its own name. Case and spaces around names do not matter. Columns without a name
    are not used.
    """

    def __init__(
        self,
        source: str,
        table: pa.Table,
        roles: Mapping[str, str],
        cells: CellRules | None = None,
        row_numbers: RowNumbers | None = None,
    ) -> None:
        self.source, self.table, self.roles = source, table, roles
        self.cells, self.row_numbers = cells or CellRules(), row_numbers or RowNumbers()
        self.row_ids = np.arange(len(table))  # positions of the rows before empty ones were dropped
        self.used: set[int] = set()
        self.missing: dict[str, Counter[str]] = {}  # column -> words that were read as missing
        self._positions: dict[str, int] = {}
        for position, name in enumerate(table.column_names):
            if not fold(name):
                continue
            first = self._positions.setdefault(fold(name), position)
            if first != position:
                refuse(
                    f"the columns {table.column_names[first]!r} and {name!r} have the same name if"
                    " spaces and case are ignored: rename one of them",
                    "column",
                    where=f"{source}: ",
                    column=name,
                )

    def __contains__(self, role: str) -> bool:
        return fold(self.roles.get(role, role)) in self._positions

    def name(self, role: str) -> str:
        """Return the name of a column as the table spells it."""
        name: str = self.table.column_names[self.position(role)]
        return name

    def position(self, role: str) -> int:
        """Return the index of a column in the table."""
        return self._positions[fold(self.roles.get(role, role))]

    def require(self, role: str, purpose: str) -> None:
        """Raise an error that names the nearest column, if the column does not exist."""
        if role not in self:
            name, known = self.roles.get(role, role), self.table.column_names
            raise FusionZooError(
                f"{self.source} has no column {name!r} for {purpose}.{did_you_mean(name, known)}"
                f" Its columns: {list_names(known)}"
            )

    def values(self, role: str) -> Any:
        """Return a column unchanged."""
        self.used.add(self.position(role))
        return self.table.column(self.position(role))

    def text(self, role: str, *, words_missing: bool = True) -> Any:
        """Return a column as text without spaces around it, null where that is empty or, if
        `words_missing`, a word for a missing value.

        A list of labels becomes `sun;beach`, an empty list `;`.
        """
        column = self.values(role)
        if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
            cells = column.to_pylist()
            joined = [None if x is None else ";".join(map(str, x)) or ";" for x in cells]
            return pa.array(joined, pa.string())
        try:
            stripped = pc.utf8_trim_whitespace(_as_text(column))
        except pa.ArrowException as error:  # a date beyond the calendar, bytes that are no text
            raise FusionZooError(
                f"{self.source}, column {self.name(role)!r}: {column.type} cannot be read as text:"
                f" {one_line(error)}"
            ) from error
        return self._without_missing(role, stripped, stripped, words_missing)

    def numbers(self, role: str) -> Any:
        """Return a column as text with decimal points, null where it is empty."""
        return self.cells.numbers(self.text(role))

    def tabular(self, role: str) -> Any:
        """Return a column of a tabular modality: text with decimal points, null for missing cells;
        numbers and categories stay as they are.
        """
        column = self.values(role)
        if not any(is_type(column.type) for is_type in TEXT_TYPES):
            return column
        text = column.cast(pa.string())
        stripped = pc.utf8_trim_whitespace(text)
        return self.cells.numbers(self._without_missing(role, text, stripped, True))

    def references(self, role: str) -> Any:
        """Return a modality's column with null for missing text; lists stay as they are."""
        column = self.values(role)
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if not any(is_type(column.type) for is_type in TEXT_TYPES):
            return self.cells.lists(column)
        text = column.cast(pa.string())
        return self._without_missing(role, text, pc.utf8_trim_whitespace(text), True)

    def where(self, row: int) -> str:
        """Return the place of a row for messages: `file.csv, row 7`."""
        return f"{self.source}, row {self.row_numbers.number(row)}"

    def keep(self, mask: NDArray[np.bool_]) -> None:
        """Drop the rows where `mask` is false."""
        self.table, self.row_ids = self.table.filter(pa.array(mask)), self.row_ids[mask]
        self.row_numbers = self.row_numbers.keep(mask)

    def _without_missing(self, role: str, text: Any, stripped: Any, words_missing: bool) -> Any:
        """Return `text` with null where `stripped` is empty or a word for a missing value."""
        words = pa.array(["", *(self.cells.missing_words if words_missing else ())])
        is_missing = pc.is_in(stripped, value_set=words)
        if not pc.any(is_missing).as_py():
            return text
        counts = pc.value_counts(stripped.filter(is_missing)).to_pylist()
        self.missing[self.name(role)] = Counter(
            {x["values"]: x["counts"] for x in counts if x["values"]}
        )
        return pc.if_else(is_missing, pa.scalar(None, pa.string()), text)

    def unused(self) -> tuple[str, ...]:
        """Return the names of the columns that are not used."""
        names = enumerate(self.table.column_names)
        return tuple(name for position, name in names if position not in self.used)


def _as_text(column: Any) -> Any:
    """Return the cells of a column as text; numbers that are not a number are null."""
    if pa.types.is_floating(column.type):
        column = pc.if_else(pc.is_nan(column), pa.scalar(None, column.type), column)
    return column.cast(pa.string())
