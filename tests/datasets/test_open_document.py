"""Sheets of .ods files, as LibreOffice writes them, are read like those of .xlsx."""

from __future__ import annotations

import datetime
import zipfile
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import openpyxl
import pyarrow as pa
import pytest

import fusionzoo
from fusionzoo.datasets.sources.table_files import read_table
from fusionzoo.datasets.sources.table_settings import TableSettings
from fusionzoo.errors import FusionZooError

NAMES = ("office", "table", "text")
SPACES = " ".join(f'xmlns:{x}="urn:oasis:names:tc:opendocument:xmlns:{x}:1.0"' for x in NAMES)
FILLER = (  # what LibreOffice writes to the end of a sheet
    '<table:table-row table:number-rows-repeated="1048000">'
    '<table:table-cell table:number-columns-repeated="16384"/></table:table-row>'
)
ROWS = [
    ["Größe", "seit", "raucht", "Befund", "Klasse"],
    *[
        [1.5 + n % 7, datetime.date(2024, 3, 1 + n % 28), n % 3 > 0, None, "ab"[n % 2]]
        for n in range(39)
    ],
    [2.0, datetime.datetime(2024, 3, 1, 10, 30), True, "zwei  Wörter & <mehr>", "a"],
]


def cell(value: Any, more: str = "") -> str:
    kinds = {bool: "boolean", float: "float", datetime.date: "date", datetime.datetime: "date"}
    kind = kinds.get(type(value), "string")
    if value is None:
        return f"<table:table-cell {more}/>"
    written = "true" if value is True else "false" if value is False else str(value)
    written = value.isoformat() if kind == "date" else written
    name = {"boolean": "boolean-value", "date": "date-value"}.get(kind, "value")
    stored = "" if kind == "string" else f'office:{name}="{written}"'
    shown = escape(str(value)).replace("  ", ' <text:s text:c="1"/>')
    return (
        f'<table:table-cell office:value-type="{kind}" {stored} {more}>'
        f"<text:p>{shown}</text:p></table:table-cell>"
    )


def row(*values: Any, more: str = "") -> str:
    return f"<table:table-row {more}>{''.join(map(cell, values))}</table:table-row>"


def write(path: Path, **sheets: str) -> Path:
    tables = "".join(f'<table:table table:name="{x}">{y}</table:table>' for x, y in sheets.items())
    content = (
        f"<office:document-content {SPACES}><office:body><office:spreadsheet>{tables}"
        "</office:spreadsheet></office:body></office:document-content>"
    )
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as parts:
        parts.writestr("mimetype", "application/vnd.oasis.opendocument.spreadsheet")
        parts.writestr("content.xml", content)
    return path


def read(path: Path, **settings: Any) -> pa.Table:
    return read_table(path, TableSettings(root=str(path), **settings))[0]


def test_cells_are_read_by_their_types(tmp_path: Path) -> None:
    path = write(tmp_path / "m.ods", Tabelle1="".join(row(*x) for x in ROWS) + FILLER)
    cells = read(path)
    assert cells.column_names == ROWS[0]
    assert [*cells.slice(0, 1).to_pylist()[0].values()] == ["1.5", "2024-03-01", "False", None, "a"]
    last = [*cells.slice(39, 1).to_pylist()[0].values()]
    assert last == ["2", "2024-03-01T10:30:00", "True", "zwei  Wörter & <mehr>", "a"]


SHOWN = {0.475: "percentage", 0.5: "float"}  # a column is percent where one of its cells is


def test_percentages_are_those_that_the_sheet_shows(tmp_path: Path) -> None:
    cells = "".join(
        line(1, f'<table:table-cell office:value-type="{kind}" office:value="{number}"/>')
        for number, kind in SHOWN.items()
    )
    sheets = [write(tmp_path / "m.ods", one=row("rate") + cells)]
    for name, number_format in (("a", "0.0%"), ("b", '0" of 100%"'), ("c", "General")):
        book = openpyxl.Workbook()
        book.active["A1"] = "rate"  # type: ignore[index]
        for place, (number, kind) in enumerate(SHOWN.items(), start=2):
            book.active[f"A{place}"] = number  # type: ignore[index]
            if kind == "percentage":
                book.active[f"A{place}"].number_format = number_format  # type: ignore[index]
        sheets.append(tmp_path / f"{name}.xlsx")
        book.save(sheets[-1])
    shown = [["47.5%", "50%"]] * 2 + [["0.475", "0.5"]] * 2
    assert [read(path)["rate"].to_pylist() for path in sheets] == shown


def test_what_is_repeated_is_read_as_often(tmp_path: Path) -> None:
    rows = row("a", "b", "c") + row(more='table:number-rows-repeated="2"')
    twice = cell(1.0, 'table:number-columns-repeated="2"')
    rows += f'<table:table-row table:number-rows-repeated="3">{twice}</table:table-row>'
    cells = read(write(tmp_path / "m.ods", one=rows))
    assert cells.num_rows == 5
    assert cells.slice(2).to_pylist() == [{"a": "1", "b": "1", "c": None}] * 3


def test_the_sheet_with_the_target_is_taken_and_a_sheet_can_be_named(tmp_path: Path) -> None:
    path = write(tmp_path / "m.ods", cover=row("title"), data="".join(row(*x) for x in ROWS))
    data = fusionzoo.create_dataset(str(path), target="Klasse")
    assert data.provenance.reading == ("sheet 'data' of 2 (--data.sheet)",)
    assert read(path, sheet="cover").column_names == ["title"]
    with pytest.raises(FusionZooError, match=r"no sheet 'x'; it has: cover, data"):
        read(path, sheet="x")


def line(times: int, *cells: str) -> str:
    """Return a row that is there several times."""
    return (
        f'<table:table-row table:number-rows-repeated="{times}">{"".join(cells)}</table:table-row>'
    )


NEGATIVE = cell("x", 'table:number-columns-repeated="-1"')
MERGED = cell("x", 'table:number-columns-spanned="2"')
NO_VALUE = '<table:table-cell office:value-type="float"/>'
DEEP = f"<text:p>{'<text:span>' * 20_000}x{'</text:span>' * 20_000}</text:p>"
NESTED = f'<table:table-cell office:value-type="string">{DEEP}</table:table-cell>'


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (line(1_000_000, cell("x" * 9) * 100), "cells"),
        (row("a", more='table:number-rows-repeated="9"') + FILLER * 100 + row("far"), "cells"),
        (row("a") + line(1, NEGATIVE), "is -1"),
        (row("a", "b") + line(1, MERGED) + row("c", "d"), "are merged"),
        (line(1, NO_VALUE), "cannot be read as .ods"),
        (line(1, NESTED), "cannot be read as .ods"),
        ("<table:table-row>" + "<text:a>" * 30_000, "cannot be read as .ods"),
        (row() * 3, "is empty"),
    ],
    ids=["wide", "far", "negative", "merged", "no value", "nested", "cut off", "empty"],
)
def test_hostile_sheets_are_one_error(rows: str, says: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.ods", one=rows)
    with pytest.raises(FusionZooError) as caught:
        read(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
