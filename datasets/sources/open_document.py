"""Read the sheets of an OpenDocument spreadsheet, .ods (ISO/IEC 26300)."""

from __future__ import annotations

import datetime
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from fusionzoo.errors import explained

from ..media.budgets import check_budget, check_expansion

XML_EXPANSION = 4  # memory that XML takes as objects, at least
TABLE = "{urn:oasis:names:tc:opendocument:xmlns:table:1.0}"
OFFICE = "{urn:oasis:names:tc:opendocument:xmlns:office:1.0}"
TEXT = "{urn:oasis:names:tc:opendocument:xmlns:text:1.0}"
CELLS = (f"{TABLE}table-cell", f"{TABLE}covered-table-cell")
Row = tuple[Any, ...]


class Percentage(float):
    """A number that its sheet shows as percent."""


@dataclass(frozen=True)
class Span:
    """Cells that are merged: the first has the value, the others are empty."""

    min_row: int
    max_row: int
    min_col: int
    max_col: int

    @property
    def coord(self) -> str:
        """The place, in numbers of rows and columns."""
        return f"from row {self.min_row}, column {self.min_col}, to {self.max_row}, {self.max_col}"


@dataclass
class Sheet:
    """The cells of a sheet without the empty ones at the ends, and those that are merged."""

    name: str
    rows: list[Row] = field(default_factory=list)
    merged: list[Span] = field(default_factory=list)
    num_cells: int = 0
    num_empty: int = 0  # rows since the last one that is not


def read_sheets(path: Path) -> Iterator[Sheet]:
    """Yield the sheets of a file; repeated cells are counted before they are made."""
    # A bad zip or XML, parts or attributes that are missing.
    with explained(f"{path} cannot be read as .ods"), zipfile.ZipFile(path) as parts:
        part = parts.getinfo("content.xml")
        check_expansion(str(path), path.stat().st_size, XML_EXPANSION * part.file_size)
        with parts.open(part) as file:
            yield from _sheets(str(path), file)


def _sheets(source: str, file: Any) -> Iterator[Sheet]:
    sheet, depth = Sheet(""), 0  # a table may stand in a cell or a drawing of another
    for event, element in ElementTree.iterparse(file, ("start", "end")):
        if element.tag == f"{TABLE}table" and event == "start":
            depth += 1
            if depth == 1:
                sheet = Sheet(element.get(f"{TABLE}name", ""))
        elif element.tag == f"{TABLE}table":
            depth -= 1
            if not depth:
                yield sheet
                element.clear()
        elif element.tag == f"{TABLE}table-row" and event == "end" and depth == 1:
            _add_row(source, sheet, element)
            element.clear()


def _add_row(source: str, sheet: Sheet, element: ElementTree.Element) -> None:
    times = _count(element, "number-rows-repeated")
    number = len(sheet.rows) + sheet.num_empty + 1
    values: list[tuple[Any, int]] = []  # of each cell, and how often it is repeated
    column = 1
    for cell in element:
        if cell.tag in CELLS:
            repeated = _count(cell, "number-columns-repeated")
            width, height = (_count(cell, f"number-{x}-spanned") for x in ("columns", "rows"))
            if width > 1 or height > 1:
                last = number + height - 1, column + width - 1
                sheet.merged.append(Span(number, last[0], column, last[1]))
            values.append((_value(cell), repeated))
            column += repeated
    while values and values[-1][0] is None:
        values.pop()
    if not values:
        sheet.num_empty += times
        return
    width = sum(repeated for _, repeated in values)
    sheet.num_cells += sheet.num_empty + times * width
    check_budget("cells", sheet.num_cells, source)
    row = tuple(value for value, repeated in values for _ in range(repeated))
    sheet.rows += [()] * sheet.num_empty + [row] * times
    sheet.num_empty = 0


def _count(element: ElementTree.Element, attribute: str) -> int:
    count = int(element.get(f"{TABLE}{attribute}", "1"))
    if count < 1:
        raise ValueError(f"{attribute} is {count}")
    return count


def _value(cell: ElementTree.Element) -> Any:
    """Return a cell's value, None where it is empty; a formula's is the one that is stored."""
    kind = cell.get(f"{OFFICE}value-type")
    if kind in ("float", "percentage", "currency"):
        number = float(cell.attrib[f"{OFFICE}value"])
        return Percentage(number) if kind == "percentage" else number
    if kind == "boolean":
        return cell.attrib[f"{OFFICE}boolean-value"] == "true"
    if kind == "date":
        return datetime.datetime.fromisoformat(cell.attrib[f"{OFFICE}date-value"])
    lines = ["".join(_texts(line)) for line in cell.iter(f"{TEXT}p")]
    return "\n".join(lines) or None


def _texts(line: ElementTree.Element) -> Iterator[str]:
    """Yield the text of a paragraph, in which several spaces, tabs and breaks are elements."""
    yield line.text or ""
    for part in line:
        if part.tag == f"{TEXT}s":
            yield " " * min(int(part.get(f"{TEXT}c", "1")), 1000)
        elif part.tag == f"{TEXT}tab":
            yield "\t"
        elif part.tag == f"{TEXT}line-break":
            yield "\n"
        else:
            yield from _texts(part)
        yield part.tail or ""
