"""Numbers of a table's rows as an editor or a spreadsheet program shows them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_LISTED = 3  # rows that a message names


@dataclass(frozen=True, eq=False)
class RowNumbers:
    """The numbers by which messages name a table's rows.

    In a CSV file the header is row 1, and a row whose cells have several lines has the number of
    its first line. As these are needed in messages alone, the file is then read again.

    >>> RowNumbers(first=2).number(0)
    2
    """

    first: int = 1  # number of the table's first row
    read: Callable[[], Sequence[int]] | None = None  # numbers of all rows; None: they just count up
    positions: NDArray[np.int64] | None = None  # rows of the file that are in the table; None: all

    def number(self, row: int) -> int:
        """Return the number of a row of the table."""
        return self.numbers([row])[0]

    def numbers(self, rows: Sequence[int]) -> list[int]:
        """Return the numbers of several rows of the table."""
        positions = [row if self.positions is None else int(self.positions[row]) for row in rows]
        numbers = self.read() if self.read is not None and rows else ()
        return [
            numbers[position] if position < len(numbers) else self.first + position
            for position in positions
        ]

    def list_rows(self, rows: Sequence[int]) -> str:
        """Return the first few of several rows for a message.

        >>> RowNumbers(first=2).list_rows([0, 3])
        ' (rows 2, 5)'
        """
        numbers = ", ".join(map(str, self.numbers(rows[:MAX_LISTED])))
        return f" (rows {numbers}{', ...' if len(rows) > MAX_LISTED else ''})"

    def keep(self, mask: NDArray[np.bool_]) -> RowNumbers:
        """Return the numbers of the rows where `mask` is true."""
        if mask.all():
            return self
        positions: Any = np.flatnonzero(mask)
        return replace(
            self, positions=positions if self.positions is None else self.positions[positions]
        )
