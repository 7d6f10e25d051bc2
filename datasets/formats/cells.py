"""Rules for reading a table's cells: missing values, decimal commas, several labels in a cell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from fusionzoo.errors import FusionZooError

from ..table import word_list

NA = ("NA", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "NULL", "null", "None")
COMMA_NUMBER = r"^\s*([+-]?[0-9]*),([0-9]+([eE][+-]?[0-9]+)?)\s*$"
NUMBERS = ("regression", "ordinal")  # kinds of label columns that hold numbers
Words = str | int | float | Sequence[str | int | float]


@dataclass(frozen=True)
class CellRules:
    """How cells are read; for the settings see `manifest`."""

    na: Words = NA
    decimal: str = "."
    label_separator: str = ";"
    drop_empty: bool = False

    def __post_init__(self) -> None:
        if self.decimal not in (".", ","):
            raise FusionZooError(f"--data.decimal {self.decimal!r} is neither '.' nor ','")
        if not self.label_separator:
            raise FusionZooError("--data.label_separator is empty; usual are ; , |")

    @property
    def notes(self) -> list[str]:
        """What the data summary says of these rules."""
        separator = f"labels separated by {self.label_separator!r}"
        return [
            *(["decimal comma"] if self.decimal == "," else []),
            *([separator] if self.label_separator != ";" else []),
        ]

    @property
    def missing_words(self) -> list[str]:
        """Words that stand for a missing value."""
        words = [self.na] if isinstance(self.na, int | float) else self.na
        return word_list(words if isinstance(words, str) else [str(word) for word in words])

    def numbers(self, column: Any) -> Any:
        """Return a text column with decimal points."""
        if self.decimal == ".":
            return column
        return pc.replace_substring_regex(column, COMMA_NUMBER, r"\1.\2")

    def lists(self, column: Any) -> Any:
        """Return a column of lists of text with decimal points; others stay as they are."""
        if self.decimal == "." or not pa.types.is_list(column.type):
            return column
        whole = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        inner = whole.values
        values = self.numbers(inner) if pa.types.is_string(inner.type) else self.lists(inner)
        return pa.ListArray.from_arrays(whole.offsets, values, mask=whole.is_null())

    def labels(self, column: Any, kind: str, where: Callable[[int], str]) -> Any:
        """Return a text column of labels as `fusionzoo.targets` reads its kind.

        `where` names a row for messages.
        """
        if kind in NUMBERS:
            return self.numbers(column)
        if kind != "multilabel" or self.label_separator == ";":
            return column
        has_semicolon = pc.match_substring(column, ";").fill_null(False)
        if pc.any(has_semicolon).as_py():
            row = pc.index(has_semicolon, True).as_py()
            raise FusionZooError(
                f"{where(row)}: the labels {column[row].as_py()!r} contain ';', but"
                f" --data.label_separator is {self.label_separator!r}: use one of them"
            )
        return pc.replace_substring(column, self.label_separator, ";")
