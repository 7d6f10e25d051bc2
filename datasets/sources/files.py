"""Read the file of a table, chosen by its ending: CSV, TSV, JSON lines, Parquet, .xlsx."""

from __future__ import annotations

import datetime
import zipfile
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from fusionzoo.errors import FusionZooError, one_line

from ..arrow import check_unicode
from ..budgets import BUDGETS, check_budget, check_expansion
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


WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 12}  # bytes
OFFSET = 8  # bytes per value of text and lists, besides their contents


def read_parquet(path: Path) -> pa.Table:
    """Read a Parquet file; one that would take far more memory than its size is an error."""
    import pyarrow.parquet as pq

    # `read_table` would import pandas, and make columns of folder names like `a=b`.
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        check_parquet(str(path), path.stat().st_size, file, path)
        return file.read()


def check_parquet(
    name: str, size: int, file: Any, source: Any, columns: Collection[str] | None = None
) -> None:
    """Raise an error if the columns of an open file of `size` bytes would take too much memory.

    `source` is what it was opened from; without `columns` all count.
    """
    chosen = [
        column
        for column in range(file.metadata.num_columns)
        if columns is None or file.schema.column(column).path.partition(".")[0] in columns
    ]
    check_expansion(name, size, sum(_column_bytes(source, file, column) for column in chosen))


def _column_bytes(path: Any, file: Any, column: int) -> int:
    """Return an upper bound of a column's bytes in memory; an exact sum where that is large."""
    groups = [file.metadata.row_group(i).column(column) for i in range(file.num_row_groups)]
    num_values = sum(group.num_values for group in groups)
    description = file.schema.column(column)
    if description.physical_type != "BYTE_ARRAY":
        width = WIDTHS.get(description.physical_type) or description.length
        return int(num_values * (width + OFFSET * (description.max_repetition_level > 0)))
    plain = sum(group.total_uncompressed_size for group in groups) + num_values * OFFSET
    if not any("DICTIONARY" in word for group in groups for word in group.encodings):
        return int(plain)
    longest = max((_longest_entry(path, column, i) for i in range(len(groups))), default=0)
    bound = plain + num_values * longest
    if bound <= BUDGETS["table"].limit:
        return int(bound)
    return int(plain + _text_bytes(path, column))


def _longest_entry(path: Any, column: int, group: int) -> int:
    """Return the bytes of the longest entry in a column's dictionary, from its first value."""
    for values in _dictionaries(path, column, 1, [group]):
        return int(pc.max(pc.binary_length(values.dictionary)).as_py() or 0)
    return 0


def _text_bytes(path: Any, column: int) -> int:
    """Return the bytes of all texts of a column; each distinct one is in memory once."""
    total = 0
    for values in _dictionaries(path, column, 1 << 16, None):
        lengths = pc.binary_length(values.dictionary).cast(pa.int64())
        total += pc.sum(lengths.take(values.indices)).as_py() or 0
    return total


def _dictionaries(path: Any, column: int, batch: int, groups: list[int] | None) -> Any:
    """Yield a column's values as dictionary arrays, those in lists one after another."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        name = file.schema.column(column).path
    options: Any = {"read_dictionary": [name], "page_checksum_verification": True}
    with pq.ParquetFile(path, **options) as file:
        for rows in file.iter_batches(batch, row_groups=groups, columns=[name]):
            values = rows.column(0)
            while not pa.types.is_dictionary(values.type):
                if not hasattr(values, "flatten") or pa.types.is_struct(values.type):
                    return  # neither text nor a list of texts: never read as a modality
                values = values.flatten()
            yield values


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
