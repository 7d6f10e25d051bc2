"""Hostile workbooks: opened as a user does, and what was read compared with what was written.

Another value is a fault, as is any exception but a `FusionZooError`.
"""

from __future__ import annotations

import io
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import fusionzoo

from .cases import SHEET, XMLNS, workbook

HEADER = '<row r="1"><c r="A1" t="str"><v>id</v></c><c r="B1" t="str"><v>text</v></c></row>'


class Spreadsheet(NamedTuple):
    """A case: what opens it, given an empty folder."""

    format: str
    name: str
    open: Callable[[Path], Any]


def _cell(place: str, value: object, kind: str = "str", style: int = 0, formula: str = "") -> str:
    formula = formula and f"<f>{formula}</f>"
    return f'<c r="{place}" t="{kind}" s="{style}">{formula}<v>{value}</v></c>'


def _row(number: int, *cells: str) -> str:
    return f'<row r="{number}">{"".join(cells)}</row>'


def _sheet(rows: str, after: str = "", epoch_1904: bool = False) -> bytes:
    """Return an .xlsx file whose sheet has a header and these rows; style 1 is of dates."""
    xml = f'<worksheet xmlns="{XMLNS}"><sheetData>{HEADER}{rows}</sheetData>{after}</worksheet>'
    dates = b'<xf numFmtId="14" fontId="0" fillId="0" borderId="0" xfId="0"/></cellXfs>'
    change = {"xl/styles.xml": lambda x: x.replace(b"</cellXfs>", dates)}
    if epoch_1904:
        change["xl/workbook.xml"] = lambda x: x.replace(
            b"<workbookPr ", b'<workbookPr date1904="1" '
        )
    return workbook({SHEET: xml.encode()}, change)


def _open_sheet(
    data: bytes, expected: dict[str, str | None] | None, name: str = "a.xlsx"
) -> Callable[[Path], Any]:
    """Compare the texts by id; None: the file must be refused."""

    def work(root: Path) -> Any:
        (root / name).write_bytes(data)
        settings: dict[str, Any] = {"shares": (1, 0, 0), "drop_empty": True}
        dataset = fusionzoo.create_dataset("manifest", root=str(root / name), **settings)
        texts = dict(zip(dataset.ids, dataset.references("text"), strict=True))
        assert expected is not None, f"opened silently: {str(texts)[:200]}"
        assert texts == expected, f"read {str(texts)[:200]}"

    return work


def spreadsheets() -> Iterator[Spreadsheet]:
    first, ids = _row(2, _cell("A2", "a"), _cell("B2", "x")), ("a", "b", "c", "d")
    for name, cell, text in (
        ("the text of a formula", _cell("B3", "xy", formula="CONCAT(B2,&quot;y&quot;)"), "xy"),
        ("the number of a formula", _cell("B3", "2", "n", formula="1+1"), "2"),
        ("a formula that is true", _cell("B3", "1", "b", formula="1=1"), "True"),
        ("a formula that fails", _cell("B3", "#DIV/0!", "e", formula="1/0"), None),
        ("a date", _cell("B3", "46000", "n", 1), "2025-12-09"),
        ("a date with a time", _cell("B3", "46000.5", "n", 1), "2025-12-09T12:00:00"),
        ("a date in ISO 8601", _cell("B3", "2025-12-09T12:00:00", "d"), "2025-12-09T12:00:00"),
        ("a date of the year 10^9", _cell("B3", "1e300", "n", 1), None),
        ("a number of 20 digits", _cell("B3", "12345678901234567890", "n"), "12345678901234567890"),
        ("a small number", _cell("B3", "1E-7", "n"), "1e-07"),
    ):
        expected: dict[str, str | None] = {"a": "x", "b": text}
        if text is None:  # the row has no modality: it is left out, and that is said
            del expected["b"]
        data = _sheet(first + _row(3, _cell("A3", "b"), cell))
        yield Spreadsheet("xlsx", name, _open_sheet(data, expected))
    data = _sheet(first + _row(3, _cell("A3", "b"), _cell("B3", "1", "n", 1)), epoch_1904=True)
    yield Spreadsheet(
        "xlsx", "dates from 1904 on", _open_sheet(data, {"a": "x", "b": "1904-01-02"})
    )
    data = _sheet(first + '<row r="5"><c r="A5" t="inlineStr"/><c r="B5"/></row>' + _row(7, "<c/>"))
    yield Spreadsheet("xlsx", "empty cells below", _open_sheet(data, {"a": "x"}))
    rows = {key: _row(n, _cell(f"A{n}", key), _cell(f"B{n}", key)) for n, key in enumerate(ids, 2)}
    whole: dict[str, str | None] = {key: key for key in ids}
    yield Spreadsheet("xlsx", "four rows", _open_sheet(_sheet("".join(rows.values())), whole))
    formula = first + _row(3, _cell("A3", "b"), '<c r="B3"><f>1+1</f></c>')
    array = first + _row(3, _cell("A3", "b"), '<c r="B3"><f t="array" ref="B3:B4">{1,2}</f></c>')
    merged = '<mergeCells count="1"><mergeCell ref="{}"/></mergeCells>'
    table = "".join(rows.values())
    empty_below = first + _row(3, _cell("A3", "b")) + _row(4, _cell("A4", "c"))
    for name, data in {
        "a formula that was never computed": _sheet(formula),
        "formulas of an array, never computed": _sheet(array),
        "merged down": _sheet(empty_below, merged.format("B2:B4")),
        "merged across": _sheet(_row(2, _cell("A2", "a")) + rows["b"], merged.format("A2:B2")),
        "merged with the header": _sheet(table, merged.format("A1:A2")),
        "rows not in order": _sheet(rows["c"] + rows["a"] + rows["b"]),
        "a row twice": _sheet(rows["a"] + rows["a"] + rows["b"]),
        "cells not in order": _sheet(_row(2, _cell("B2", "x"), _cell("A2", "a"))),
        "a cell twice": _sheet(_row(2, _cell("A2", "a"), _cell("B2", "x"), _cell("B2", "y"))),
        "a cell of another row": _sheet(_row(2, _cell("A2", "a"), _cell("B9", "x"))),
        "a row of 5 million empty cells": _sheet(first + _row(3, "<c/>" * 5_000_000)),
        "a row of 80 million empty cells": _sheet(first + _row(3, "<c/>" * 80_000_000)),
        "a text of 40 million pieces": _sheet(
            _row(2, '<c t="inlineStr"><is>' + "<r/>" * 40_000_000 + "</is></c>")
        ),
        "20 million merged ranges": _sheet(
            first, f"<mergeCells>{'<mergeCell/>' * 20_000_000}</mergeCells>"
        ),
        "too many bits in a flag": _sheet(_row(2, _cell("A2", "a"), _cell("B2", "yes", "b"))),
        "a part twice": _twice(_sheet(first)),
        "cut": _sheet(table)[:-300],
        "a flipped bit in the sheet": _flipped_part(_sheet(table)),
        "a password": b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(5000),
        "an empty zip": b"PK\x05\x06" + bytes(18),
        "CSV": b"id,text\na,x\n",
        "an OpenDocument": _open_document(),
    }.items():
        yield Spreadsheet("xlsx", name, _open_sheet(data, None))
    for name, ranges in {
        "a title merged across the header": "B1:D1",
        "cells merged beyond the table": "B3:F3",
        "merged below the table": "A6:B9",
    }.items():
        data = _sheet(table, merged.format(ranges))
        yield Spreadsheet("xlsx", name, _open_sheet(data, whole))
    for format in ("csv", "tsv", "jsonl", "parquet"):
        name = f"a workbook that is called .{format}"
        yield Spreadsheet("xlsx", name, _open_sheet(_sheet(table), None, f"a.{format}"))
    for format in ("ods", "xls", "xlsb"):
        contents = _open_document() if format == "ods" else _sheet(table)
        yield Spreadsheet(format, "whole", _open_sheet(contents, None, f"a.{format}"))


def _twice(data: bytes) -> bytes:
    contents = io.BytesIO(data)
    with warnings.catch_warnings(), zipfile.ZipFile(contents, "a") as book:
        warnings.simplefilter("ignore")
        book.writestr(SHEET, book.read(SHEET).replace(b"<v>x</v>", b"<v>y</v>"))
    return contents.getvalue()


def _flipped_part(data: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as book:
        part = book.getinfo(SHEET)
    damaged = bytearray(data)
    damaged[part.header_offset + 30 + len(SHEET) + part.compress_size // 2] ^= 16
    return bytes(damaged)


def _open_document() -> bytes:
    contents = io.BytesIO()
    with zipfile.ZipFile(contents, "w") as book:
        book.writestr("mimetype", "application/vnd.oasis.opendocument.spreadsheet")
        book.writestr("content.xml", "<office:document-content/>")
    return contents.getvalue()
