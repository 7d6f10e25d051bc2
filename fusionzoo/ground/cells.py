"""Cells of tables and columns of the user's: numbers, words, names, formulas."""

from __future__ import annotations

import datetime
import re
from collections.abc import Collection, Mapping
from decimal import Decimal
from numbers import Real
from typing import Any
from unicodedata import normalize

from fusionzoo.errors import FusionZooError, located

Cell = float | str | None  # None: empty
EPOCH = datetime.date(1970, 1, 1)
DATE_PARTS = ("year", "days", "month", "weekday", "hour")  # columns that a date becomes
NUMBER = r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # first characters of cells that run as formulas
_number, _whole = re.compile(NUMBER), re.compile(r"(-?[0-9]+)\.0+")


def read_cell(value: Any) -> Cell:
    """Return a number, or text without spaces around it; None for an empty text and for NaN.

    >>> [read_cell(x) for x in (3, " red ", "", float("nan"), True)]
    [3.0, 'red', None, None, 'true']
    """
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        value = value.item()  # a scalar of NumPy or torch
    if value is None or isinstance(value, str):
        return (value or "").strip() or None
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, Real | Decimal):
        raise FusionZooError(f"a {type(value).__name__} is neither a number nor text")
    number = float(value)
    return None if number != number else number


def read_cells(value: Any) -> dict[str, Cell] | None:
    """Return the cells of a sample by column; None if all of them are empty.

    >>> read_cells({"age": "31", "colour": None})
    {'age': '31', 'colour': None}
    """
    if not isinstance(value, Mapping):
        raise FusionZooError(
            f"a {type(value).__name__} is no row of a table: give the cells by column, such as"
            " {'age': 31, 'colour': None}"
        )
    cells = {}
    with located(lambda: f"column {name!r}"):
        for name, cell in value.items():
            cells[str(name)] = read_cell(cell)
    return None if all(cell is None for cell in cells.values()) else cells


def is_number(cell: float | str) -> bool:
    """Return whether a cell holds a number, with a decimal point if any.

    >>> [is_number(x) for x in (2.0, "-1.5e3", "12,5", "n/a")]
    [True, True, False, False]
    """
    return not isinstance(cell, str) or _number.fullmatch(cell) is not None


def composed(text: str) -> str:
    """Return text in Unicode's form NFC: macOS and PDF files write an accent as a sign of its own.

    >>> len("e\u0301"), len(composed("e\u0301"))
    (2, 1)
    """
    return text if text.isascii() else normalize("NFC", text)


def category_of(cell: float | str) -> str:
    """Return the category that a cell names: the number 3, `3` and `3.0` are one.

    >>> [category_of(x) for x in (3.0, "3.0", "03", "True", "red")]
    ['3', '3', '03', 'true', 'red']
    """
    if not isinstance(cell, str):
        number = float(cell)
        return str(int(number)) if number.is_integer() else repr(number)
    whole = _whole.fullmatch(cell)
    if whole:
        return whole[1]
    cell = composed(cell)
    return cell.lower() if cell.lower() in ("true", "false") else cell


def without_formulas(cell: str) -> str:
    """Return a cell that spreadsheet programs take for text: `'=1` for `=1`.

    >>> [without_formulas(x) for x in ("=1+1", "-2+A1", "-2.5", "a=b", "-", "")]
    ["'=1+1", "'-2+A1", '-2.5', 'a=b', '-', '']
    """
    is_formula = cell.startswith(FORMULA) and len(cell) > 1 and not is_number(cell)
    return f"'{cell}" if is_formula else cell


def fold(name: str) -> str:
    """Return the name of a column in one form: composed, in lower case, no spaces around it."""
    return composed(name).strip().casefold()


def date_of(column: str, columns: Collection[str]) -> str:
    """Return the date that a column is a part of, `on` of `on days`; "" if it is none."""
    name, _, part = column.rpartition(" ")
    is_part = part in DATE_PARTS and all(f"{name} {x}" in columns for x in DATE_PARTS[:4])
    return name if is_part else ""


def whole_dates(cells: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's cells with dates in place of their parts.

    >>> whole_dates({"on year": 2024.0, "on days": 19723.0, "on month": "1", "on weekday": "Mon"})
    {'on': '2024-01-01'}
    """
    whole = {}
    for column, cell in cells.items():
        if not (date := date_of(column, cells)):
            whole[column] = cell
        elif (days := cells[f"{date} days"]) is None:
            whole[date] = None
        else:
            minutes = round(60 * (cells.get(f"{date} hour") or 0.0))
            time = f" {minutes // 60:02}:{minutes % 60:02}" if f"{date} hour" in cells else ""
            whole[date] = f"{EPOCH + datetime.timedelta(days=int(days))}{time}"
    return whole
