"""Read the file of a table, chosen by its ending: CSV, TSV, JSON lines, Parquet, .xlsx."""

from __future__ import annotations

import datetime
import zipfile
import zlib
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from fusionzoo.errors import FusionZooError, one_line

from ..arrow import check_unicode
from ..budgets import check_budget, check_expansion
from ..parquet import read_parquet
from ..provenance import Provenance, RowNumbers
from .text_tables import DELIMITERS, check_encoding, find_encoding, read_delimited, read_json_lines

MAX_ROWS = 1_048_576  # of a sheet; the rows before the last are made, even if they are empty
XML_EXPANSION = 3  # bytes in memory for a byte of a sheet's XML, about


def read_spreadsheet(path: Path, sheet: str) -> tuple[pa.Table, RowNumbers, list[str]]:
    """Read a sheet, by default the first; return its cells as text, the numbers of its rows and the
    names of all sheets. The first row that is not empty is the header."""
    cells, sheets = _cells(path, sheet, values=True)
    header_row = next((number for number, row in enumerate(cells) if any(_filled(row))), None)
    if header_row is None:
        raise FusionZooError(f"{path}: the sheet {sheet or sheets[0]!r} is empty")
    filled = [_filled(row) for row in cells]
    while not any(filled[-1]):
        filled.pop()
    width = max(len(row) - row[::-1].index(True) for row in filled if any(row))
    check_budget("cells", width * len(filled), str(path))  # empty cells included
    rows = [[*row, *[None] * width][:width] for row in cells[header_row : len(filled)]]
    if any(cell is None for row in rows[1:] for cell in row):
        _check_formulas(path, sheet, rows, header_row)
    names = [_text(name) or "" for name in rows[0]]
    columns = [pa.array([_text(row[x]) for row in rows[1:]], pa.string()) for x in range(width)]
    return pa.table(columns, names=names), RowNumbers(first=header_row + 2), sheets


def _cells(path: Path, sheet: str, *, values: bool) -> tuple[list[tuple[Any, ...]], list[str]]:
    """Return the cells of a sheet, with the values of formulas or the formulas, and all sheets."""
    try:
        import openpyxl
    except ImportError as error:
        raise FusionZooError(
            f"{path}: reading .xlsx needs openpyxl: pip install 'fusionzoo[xlsx]', or save the"
            " sheet as CSV"
        ) from error
    try:
        with zipfile.ZipFile(path) as parts:
            needed = XML_EXPANSION * sum(part.file_size for part in parts.infolist())
            check_expansion(str(path), path.stat().st_size, needed)
            _check_styles(path, parts)
        book = openpyxl.load_workbook(path, read_only=True, data_only=values, keep_links=False)
    except FusionZooError:
        raise
    except Exception as error:  # a bad zip, XML, or parts that are missing
        raise FusionZooError(f"{path} cannot be read as .xlsx: {one_line(error)}") from error
    try:
        sheets = [worksheet.title for worksheet in book.worksheets]
        if not sheets:
            raise FusionZooError(f"{path} has no sheet")
        if sheet and sheet not in sheets:
            raise FusionZooError(
                f"{path} has no sheet {sheet!r} (--data.sheet); it has: {', '.join(sheets)}"
            )
        worksheet = book.worksheets[sheets.index(sheet) if sheet else 0]
        if not sheet and worksheet.sheet_state != "visible":
            raise FusionZooError(
                f"{path}: its first sheet {worksheet.title!r} is hidden: --data.sheet names the one"
                f" to read; it has: {', '.join(sheets)}"
            )
        return _rows(path, worksheet), sheets
    except FusionZooError:
        raise
    except Exception as error:
        raise FusionZooError(f"{path} cannot be read as .xlsx: {one_line(error)}") from error
    finally:
        book.close()


def _check_styles(path: Path, parts: zipfile.ZipFile) -> None:
    """Raise an error for too many elements in the parts that openpyxl turns into objects.

    These are styles, properties and lists of parts. Sheets and shared strings are read as streams.
    """
    for part in parts.infolist():
        folder = part.filename.rpartition("/")[0]
        is_read_whole = folder in ("", "xl", "docProps") or part.filename.endswith(".rels")
        if not is_read_whole or part.filename == "xl/sharedStrings.xml":
            continue
        with parts.open(part) as file:
            chunks = iter(partial(file.read, 1 << 20), b"")
            count = sum(chunk.count(b"<") - chunk.count(b"</") for chunk in chunks)
        check_budget("styles", count, f"{path}: {part.filename}")


def _rows(path: Path, worksheet: Any) -> list[tuple[Any, ...]]:
    """Return a sheet's rows without the empty cells at their ends; count the cells on the way."""
    worksheet.reset_dimensions()  # the file's claim: cells outside of it would be lost
    rows: list[tuple[Any, ...]] = []
    num_cells = 0
    for row in islice(worksheet.iter_rows(values_only=True), MAX_ROWS + 1):
        width = len(row)
        while width and row[width - 1] is None:
            width -= 1
        num_cells += width
        check_budget("cells", num_cells, str(path))  # empty cells before others included
        rows.append(row[:width])
    if len(rows) > MAX_ROWS:
        raise FusionZooError(f"{path}: a row has a number above {MAX_ROWS:,}, the format's limit")
    return rows


def _check_formulas(path: Path, sheet: str, rows: list[list[Any]], header_row: int) -> None:
    """Raise an error for a formula whose value is not in the file."""
    formulas = _cells(path, sheet, values=False)[0][header_row:]
    for number, (row, formula_row) in enumerate(zip(rows, formulas, strict=False)):
        for column, (cell, formula) in enumerate(zip(row, formula_row, strict=False)):
            if cell is None and formula is not None:
                raise FusionZooError(
                    f"{path}, row {header_row + 1 + number}, column {_text(rows[0][column])!r}: the"
                    " value of a formula is not in the file: open it in a spreadsheet program and"
                    " save it"
                )


def _filled(row: tuple[Any, ...]) -> list[bool]:
    return [cell is not None and cell != "" for cell in row]


def _text(cell: Any) -> str | None:
    """Return a cell as text: numbers without an empty fraction, dates as 2026-11-22."""
    if cell is None or isinstance(cell, str):
        return cell
    if isinstance(cell, float) and cell.is_integer():
        return str(int(cell))
    if isinstance(cell, datetime.datetime) and cell.time() == datetime.time():
        return cell.date().isoformat()
    return cell.isoformat() if hasattr(cell, "isoformat") else str(cell)


JSON_LINES = (".jsonl", ".ndjson")
READERS = (".csv", ".tsv", *JSON_LINES, ".parquet", ".xlsx")
HOW_TO_SAVE = {".xls": ".xlsx or .csv", ".ods": ".xlsx or .csv", ".json": ".jsonl"}


@dataclass(frozen=True)
class TextFormat:
    """What the user says about a file; None: found out from its contents."""

    delimiter: str | None = None
    encoding: str | None = None
    sheet: str = ""  # of an .xlsx file; empty: the first


def table_suffix(path: Path) -> str:
    """Return a file's ending in lower case, without .gz: `.csv` of `A.CSV.gz`."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    is_text = len(suffixes) > 1 and suffixes[-1] == ".gz"
    return suffixes[-2] if is_text else suffixes[-1] if suffixes else ""


def read_table(path: Path, text_format: TextFormat) -> tuple[pa.Table, Provenance]:
    """Read a file; return its columns, how it was read and the numbers of its rows."""
    if not path.is_file():
        raise FusionZooError(f"no manifest {path}: --data.root names the file")
    suffix = table_suffix(path)
    if suffix not in READERS:
        repair = f"; save it as {HOW_TO_SAVE[suffix]}" if suffix in HOW_TO_SAVE else ""
        raise FusionZooError(f"{path} is none of {', '.join(READERS)}{repair}")
    try:
        table, provenance = _read(path, suffix, text_format)
        return check_unicode(table, str(path)), provenance
    except FusionZooError:
        raise
    except (pa.ArrowException, OSError, EOFError, ValueError, MemoryError, zlib.error) as error:
        raise FusionZooError(f"{path} cannot be read: {one_line(error)}") from error


def _read(path: Path, suffix: str, text_format: TextFormat) -> tuple[pa.Table, Provenance]:
    if suffix == ".parquet":
        return read_parquet(path), Provenance()
    if suffix == ".xlsx":
        table, numbers, sheets = read_spreadsheet(path, text_format.sheet)
        others = f"sheet {text_format.sheet or sheets[0]!r} of {len(sheets)} (--data.sheet)"
        reading = (others,) if len(sheets) > 1 else ()
        return table, Provenance(row_numbers=numbers, reading=reading)
    if text_format.encoding is None:
        encoding, reason = find_encoding(path)
    else:
        encoding, reason = check_encoding(path, text_format.encoding), "--data.encoding"
    reading = () if encoding == "utf-8" else (f"encoding {encoding} ({reason})",)
    if suffix in JSON_LINES:
        table, numbers = read_json_lines(path, encoding)
    else:
        table, numbers, delimiter = read_delimited(path, encoding, text_format.delimiter)
        if delimiter != ("\t" if suffix == ".tsv" else ","):
            reading = (f"delimiter {DELIMITERS.get(delimiter, repr(delimiter))}", *reading)
    return table, Provenance(row_numbers=numbers, reading=reading)
