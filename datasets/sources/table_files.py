"""Read the file of a table, chosen by its ending: CSV, JSON lines, Parquet, .xlsx, .ods, .mat."""

from __future__ import annotations

import datetime
import re
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from fusionzoo.errors import FusionZooError, check_known, did_you_mean, explained
from fusionzoo.ground.registry import Entry, Registry

from ..media.budgets import check_budget, check_expansion
from ..tables.arrow import check_unicode
from ..tables.parquet import read_parquet
from ..tables.provenance import Provenance, RowNumbers, mark_index
from .array_files import read_array_file
from .infer import POINT
from .open_document import Percentage, read_sheets
from .table_settings import NO_HEADER, TableSettings
from .text_tables import (
    DELIMITERS,
    TextFile,
    check_encoding,
    find_encoding,
    read_delimited,
    read_json_lines,
)

NO_TABLES = (b"<!doctype html", b"<html", b"<?xml", b"%pdf-", b"version https://git-lfs")  # starts
MAX_NAMES = 4  # of columns in a message about a header
MAX_GAP = 10_000  # empty rows in a row; a million of them take seconds
XML_EXPANSION = 3  # bytes in memory for a byte of a sheet's XML, about
STARTS_OF_XML = (b"<", b"\xef", b"\xff", b"\xfe")  # the last three: of a byte order mark
ROW = re.compile(rb"<(?:\w+:)?(?:row|si)[\s/>]")  # a row of a sheet, a shared text
QUOTED = re.compile(r'"[^"]*"|\\.')  # text in a format of numbers
HOW_TO_SAVE = {"xls": ".xlsx or .csv", "json": ".jsonl"}
SheetCells = tuple[list[tuple[Any, ...]], list[Any], list[str]]  # cells, merged ones, all sheets
READERS: Registry[TableReader, Entry[TableReader]] = Registry(
    "kind of table", "fusionzoo data list", Entry, ("text", "binary", "workbook")
)


class TableReader(ABC):
    """Reads the files with an ending, under which a subclass is registered, without the dot."""

    has_nulls: ClassVar[bool] = False  # whether missing values are marked, rather than by words
    is_zip: ClassVar[bool] = False  # whether its files are zip archives

    @abstractmethod
    def read(self, path: Path, settings: TableSettings) -> tuple[pa.Table, Provenance]:
        """Return the columns of a file, and the numbers of its rows and how it was read, if they
        are known: `Provenance()`. Text is read as other columns of text are: as numbers, paths, ...
        """

    def sheets(self, path: Path) -> list[str]:
        """Return the names of a workbook's sheets, those in sight first; of other files none."""
        return []


def can_read(path: Path) -> bool:
    """Whether a file's name has the ending of a table."""
    suffix = table_suffix(path)
    return bool(suffix) and suffix in READERS


def is_workbook(path: Path) -> bool:
    """Whether a file's name has the ending of a workbook of sheets."""
    return can_read(path) and READERS[table_suffix(path)].family == "workbook"


def reader_of(path: Path) -> TableReader:
    """Return what reads a file; raise an error for one that is not there, or another kind."""
    if not path.is_file():
        near = [x.name for x in path.parent.glob("*") if can_read(x)]
        raise FusionZooError(f"no file {path}.{did_you_mean(path.name, near)}")
    suffix = table_suffix(path)
    if not can_read(path):
        repair = f"; save it as {HOW_TO_SAVE[suffix]}" if suffix in HOW_TO_SAVE else ""
        raise FusionZooError(f"{path} is none of .{', .'.join(READERS)}{repair}")
    return READERS.create(suffix)


def _read_sheet(
    path: Path,
    settings: TableSettings,
    read: Callable[[Path, str], SheetCells],
    *,
    check_formulas: bool = False,
) -> tuple[pa.Table, Provenance]:
    """Read a sheet, by default the first, as text; its first filled row is the header."""
    sheet = settings.sheet
    cells, merged, sheets = read(path, sheet)
    header_row = next((number for number, row in enumerate(cells) if any(_filled(row))), None)
    if header_row is None:
        raise FusionZooError(f"{path}: the sheet {sheet or sheets[0]!r} is empty")
    filled = [_filled(row) for row in cells]
    while not any(filled[-1]):
        filled.pop()
    width = max(len(row) - row[::-1].index(True) for row in filled if any(row))
    check_budget("cells", width * len(filled), str(path))  # empty cells included
    _check_merged(path, merged, filled, header_row)
    rows = [[*row, *[None] * width][:width] for row in cells[header_row : len(filled)]]
    if check_formulas and any(cell is None for row in rows[1:] for cell in row):
        _check_formulas(path, sheet, rows, header_row)
    names = [_text(name) or "" for name in rows[0]]
    columns = [_column([row[x] for row in rows[1:]]) for x in range(width)]
    table, numbers = pa.table(columns, names=names), RowNumbers(first=header_row + 2)
    _check_header(path, table, numbers)
    others = f"sheet {sheet or sheets[0]!r} of {len(sheets)} (--data.sheet)"
    reading = (others,) if len(sheets) > 1 else ()
    return table, Provenance(row_numbers=numbers, reading=reading)


def _cells_of_open_document(path: Path, sheet: str) -> SheetCells:
    """Return the cells of a sheet, its merged ranges, and the names of all sheets."""
    wanted, names = None, []
    for opened in read_sheets(path):
        names.append(opened.name)
        if wanted is None and opened.name == (sheet or opened.name):
            wanted = opened
    _check_sheet(path, sheet, names)
    assert wanted is not None
    return wanted.rows, wanted.merged, names


def _open_workbook(path: Path, *, values: bool = True) -> Any:
    """Open a workbook of Excel, whose cells have the values of formulas, or the formulas."""
    with explained(f"{path} needs openpyxl, pip install 'fusionzoo[xlsx]'", ImportError):
        import openpyxl
    with explained(f"{path} cannot be read as .xlsx"):  # a bad zip, XML, or parts that are missing
        with zipfile.ZipFile(path) as parts:
            needed = XML_EXPANSION * sum(part.file_size for part in parts.infolist())
            check_expansion(str(path), path.stat().st_size, needed)
            _check_parts(path, parts)
        return openpyxl.load_workbook(path, read_only=True, data_only=values, keep_links=False)


def _cells(path: Path, sheet: str, *, values: bool = True) -> SheetCells:
    """Return the cells of a sheet, with the values of formulas or the formulas, its merged ranges,
    and the names of all sheets."""
    book = _open_workbook(path, values=values)
    with explained(f"{path} cannot be read as .xlsx"), closing(book):
        sheets = [worksheet.title for worksheet in book.worksheets]
        _check_sheet(path, sheet, sheets)
        worksheet = book.worksheets[sheets.index(sheet) if sheet else 0]
        if not sheet and worksheet.sheet_state != "visible":
            hidden = f"{path}: its first sheet {worksheet.title!r} is hidden"
            raise FusionZooError(f"{hidden}: --data.sheet names one of {', '.join(sheets)}")
        return *_rows(path, worksheet), sheets


def _check_sheet(path: Path, sheet: str, names: Sequence[str]) -> None:
    """Raise an error for a workbook without sheets, or without the one that is named."""
    if not names or (sheet and sheet not in names):
        wanted = f" {sheet!r}" if sheet else ""
        raise FusionZooError(f"{path} has no sheet{wanted}; it has: {', '.join(names) or 'none'}")


def _check_parts(path: Path, parts: zipfile.ZipFile) -> None:
    """Raise an error for a part that is there twice, with contents that may differ, or of which
    openpyxl would hold too many elements in memory.

    Sheets and shared texts are read a row or text at a time; styles, properties and lists of parts
    are read whole.
    """
    names = parts.namelist()
    if len({*names}) < len(names):
        raise FusionZooError(f"{path} holds a part twice: save it anew")
    for part in parts.infolist():
        folder = part.filename.rpartition("/")[0]
        is_read_whole = folder in ("", "xl", "docProps") or part.filename.endswith(".rels")
        is_read_whole = is_read_whole and part.filename != "xl/sharedStrings.xml"
        with parts.open(part) as file:
            rest = file.read(1)
            if not is_read_whole and rest not in STARTS_OF_XML:
                continue
            count = 0  # of elements since the last row began
            for block in iter(partial(file.read, 1 << 19), b""):
                chunk = rest + block
                end = chunk.rfind(b"<")
                chunk, rest = chunk[:end], chunk[end : end + 64]  # a tag may go on in the next
                starts = [] if is_read_whole else [x.start() for x in ROW.finditer(chunk)]
                count += _num_elements(chunk[: starts[0]] if starts else chunk)
                check_budget("styles", count, f"{path}: {part.filename}")
                if starts:  # those between are smaller than the limit, as the chunk is
                    count = _num_elements(chunk[starts[-1] :])


def _num_elements(xml: bytes) -> int:
    return xml.count(b"<") - xml.count(b"</")


def _rows(path: Path, worksheet: Any) -> tuple[list[tuple[Any, ...]], list[Any]]:
    """Return a sheet's rows without the empty cells at their ends, and its merged ranges.

    Cells are counted on the way. openpyxl's own `iter_rows` leaves out rows and cells that do not
    stand in order, and says nothing of merged ones.
    """
    from openpyxl.worksheet._reader import WorkSheetParser

    book = worksheet.parent
    percentages = _styles_of_percentages(book)
    rows: list[tuple[Any, ...]] = []
    num_cells = 0
    with worksheet._get_source() as source:
        parser = WorkSheetParser(
            source,
            worksheet._shared_strings,
            data_only=book.data_only,
            epoch=book.epoch,
            date_formats=book._date_formats,
            timedelta_formats=book._timedelta_formats,
        )
        for number, cells in parser.parse():
            columns = [cell["column"] for cell in cells]
            in_order = number > len(rows) and all(cell["row"] == number for cell in cells)
            if not in_order or columns != sorted(set(columns)):
                raise FusionZooError(f"{path}, row {number}: rows or cells not in order")
            filled = [cell for cell in cells if cell["value"] is not None]
            if not filled:
                continue
            if number - len(rows) > MAX_GAP:
                raise FusionZooError(f"{path}: empty rows before row {number:,}: delete it")
            width = filled[-1]["column"]
            num_cells += width
            check_budget("cells", num_cells, str(path))  # empty cells before others included
            row: list[Any] = [None] * width
            for cell in filled:
                value = cell["value"]
                is_percentage = cell["style_id"] in percentages and _is_number(value)
                row[cell["column"] - 1] = Percentage(value) if is_percentage else value
            rows += [()] * (number - 1 - len(rows))
            rows.append(tuple(row))
    return rows, list(parser.merged_cells.mergeCell if parser.merged_cells else ())


def _check_merged(path: Path, merged: list[Any], filled: list[list[bool]], header_row: int) -> None:
    """Raise an error for merged cells of the table: all but the first one are empty in the file."""
    for cells in merged:
        rows = filled[max(cells.min_row - 1, header_row) : cells.max_row]
        covered = [row[cells.min_col - 1 : cells.max_col] for row in rows]
        is_in_table = cells.max_row > header_row + 1 and any(any(row) for row in covered)
        width = max((len(row) for row in filled[header_row:]), default=0)
        columns = min(cells.max_col, width) - cells.min_col + 1
        if is_in_table and len(rows) * columns > 1:
            raise FusionZooError(f"{path}: the cells {cells.coord} are merged: unmerge them")


def _check_formulas(path: Path, sheet: str, rows: list[list[Any]], header_row: int) -> None:
    """Raise an error for a formula whose value is not in the file."""
    formulas = _cells(path, sheet, values=False)[0][header_row:]
    for number, (row, formula_row) in enumerate(zip(rows, formulas, strict=False)):
        for column, (cell, formula) in enumerate(zip(row, formula_row, strict=False)):
            if cell is None and formula is not None:
                place = f"{path}, row {header_row + 1 + number}, column {_text(rows[0][column])!r}"
                raise FusionZooError(f"{place}: a formula has no value: save it in a spreadsheet")


def _filled(row: tuple[Any, ...]) -> list[bool]:
    return [cell is not None and cell != "" for cell in row]


def _styles_of_percentages(book: Any) -> set[int]:
    """Return the styles of a workbook whose cells show numbers as percent."""
    from openpyxl.styles.numbers import BUILTIN_FORMATS, BUILTIN_FORMATS_MAX_SIZE

    formats = {**BUILTIN_FORMATS, **dict(enumerate(book._number_formats, BUILTIN_FORMATS_MAX_SIZE))}
    styles = enumerate(formats.get(style.numFmtId, "") for style in book._cell_styles)
    return {style for style, shown in styles if "%" in QUOTED.sub("", shown)}


def _is_number(cell: Any) -> bool:
    return isinstance(cell, int | float) and not isinstance(cell, bool)


def _column(cells: Sequence[Any]) -> pa.Array:
    """Return cells as text; where one is a percentage, all numbers are: `47.5%` for 0.475."""
    if any(isinstance(cell, Percentage) for cell in cells):
        cells = [f"{100 * cell:.15g}%" if _is_number(cell) else cell for cell in cells]
    return pa.array([_text(cell) for cell in cells], pa.string())


def _text(cell: Any) -> str | None:
    """Return a cell as text: numbers without an empty fraction, dates as 2026-11-22."""
    if cell is None or isinstance(cell, str):
        return cell
    if isinstance(cell, float) and cell.is_integer():
        return str(int(cell))
    if isinstance(cell, datetime.datetime) and cell.time() == datetime.time():
        return cell.date().isoformat()
    return cell.isoformat() if hasattr(cell, "isoformat") else str(cell)


def table_suffix(path: Path) -> str:
    """Return a file's ending in lower case, without dot and .gz: `csv` of `A.CSV.gz`."""
    suffixes = [suffix.lower().removeprefix(".") for suffix in path.suffixes]
    is_text = len(suffixes) > 1 and suffixes[-1] == "gz"
    return suffixes[-2] if is_text else suffixes[-1] if suffixes else ""


def read_table(path: Path, settings: TableSettings) -> tuple[pa.Table, Provenance]:
    """Read a file; return its columns, how it was read and the numbers of its rows."""
    reader = reader_of(path)
    damages = (pa.ArrowException, OSError, EOFError, ValueError, MemoryError, zlib.error)
    with explained(f"{path} cannot be read", *damages):
        _check_ending(path, reader)
        table, provenance = reader.read(path, settings)
        return check_unicode(table, str(path)), provenance


def read_split_file(path: Path) -> dict[str, str]:
    """Read a table of `id` and `split`; return the split of each id. Rows without a split are left
    out."""
    table, provenance = read_table(path, TableSettings())
    names = {name.strip().lower(): name for name in table.column_names}
    for name in ("id", "split"):
        check_known(name, names, f"{path} has no column {name!r}")
    ids, splits = (table[names[name]].cast(pa.string()).to_pylist() for name in ("id", "split"))
    split_of: dict[str, str] = {}
    for row, (key, split) in enumerate(zip(ids, splits, strict=True)):
        if not (split or "").strip():
            continue
        if not key or key in split_of:
            number = (provenance.row_numbers or RowNumbers()).number(row)
            raise FusionZooError(f"{path}, row {number}: id {key!r} is empty or there twice")
        split_of[key] = split.strip()
    if not split_of:
        raise FusionZooError(f"{path} lists no sample with a split")
    return split_of


def _check_ending(path: Path, reader: TableReader) -> None:
    """Raise an error for a file that is another one than its ending says."""
    with path.open("rb") as file:
        head = file.read(512).removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if head.startswith(NO_TABLES) or (head.startswith(b"pk\x03\x04") and not reader.is_zip):
        advice = "save it as CSV, give a workbook its ending, or fetch it (`git lfs pull`)"
        raise FusionZooError(f"{path} is no table, as it starts with {head[:24]!r}: {advice}")


def _check_header(path: Path, table: pa.Table, numbers: RowNumbers) -> None:
    """Raise an error for a row that repeats the header, as in tables that were joined by `cat`."""
    names = table.column_names
    if len(names) < 2:
        return
    for row in pc.indices_nonzero(pc.equal(table.column(0), names[0])).to_pylist():
        if [column[row].as_py() for column in table.columns] == names:
            raise FusionZooError(f"{path}, row {numbers.number(row)} repeats the header: remove it")


def _read_text(
    path: Path, settings: TableSettings, usual_delimiter: str
) -> tuple[pa.Table, Provenance]:
    file, reading = _text_file(path, settings)
    has_header = settings.header != NO_HEADER
    table, numbers, delimiter = read_delimited(file, settings.delimiter, has_header=has_header)
    if has_header:
        _check_header(path, table, numbers)
    if not settings.header and (note := _numbers_as_header(path, table.column_names)):
        reading = (note, *reading)
    if delimiter != usual_delimiter:
        reading = (f"delimiter {DELIMITERS.get(delimiter, repr(delimiter))}", *reading)
    return table, Provenance(row_numbers=numbers, reading=reading)


def _numbers_as_header(path: Path, names: Sequence[str]) -> str:
    """Say that a first row looks like numbers (0, 1, 2, ... is pandas'), or raise an error."""
    if not all(POINT.fullmatch(name.strip()) for name in names) or names == [
        str(x) for x in range(len(names))
    ]:
        return ""
    shown = ", ".join(names[:MAX_NAMES]) + (", ..." if len(names) > MAX_NAMES else "")
    if len({*names}) == len(names) and all(name.strip().isdigit() for name in names):
        return f"the first row, {shown}, as names of columns (--data.header none: it is a row)"
    raise FusionZooError(
        f"{path} has numbers in its first row: {shown}. --data.header none reads it as a row, and"
        " calls the columns c1, c2, ...; --data.header first takes the numbers as names"
    )


def _text_file(path: Path, settings: TableSettings) -> tuple[TextFile, tuple[str, ...]]:
    """Return a file with its encoding, and what the data summary says of that."""
    if settings.encoding is None:
        encoding, reason = find_encoding(path)
    else:
        encoding, reason = check_encoding(path, settings.encoding), "--data.encoding"
    reading = () if encoding == "utf-8" else (f"encoding {encoding} ({reason})",)
    return TextFile(path, encoding), reading


@READERS.register("csv", family="text")
class CSVReader(TableReader):
    """Text, a line a row, with commas between the cells."""

    delimiter: ClassVar[str] = ","

    def read(self, path: Path, settings: TableSettings) -> tuple[pa.Table, Provenance]:
        return _read_text(path, settings, self.delimiter)


@READERS.register("tsv", family="text")
class TSVReader(CSVReader):
    """Text, a line a row, with tabs between the cells."""

    delimiter = "\t"


@READERS.register("jsonl", family="text")
@READERS.register("ndjson", family="text")
class JSONLinesReader(TableReader):
    """Text, a JSON object a line."""

    def read(self, path: Path, settings: TableSettings) -> tuple[pa.Table, Provenance]:
        file, reading = _text_file(path, settings)
        table, numbers = read_json_lines(file)
        return table, Provenance(row_numbers=numbers, reading=reading)


@READERS.register("parquet", family="binary")
class ParquetReader(TableReader):
    """Apache Parquet."""

    has_nulls = True

    def read(self, path: Path, settings: TableSettings) -> tuple[pa.Table, Provenance]:
        return mark_index(read_parquet(path)), Provenance()


@READERS.register("mat", family="binary")
class MatlabReader(TableReader):
    """Arrays of MATLAB, a row of each a sample."""

    has_nulls = True

    def read(self, path: Path, settings: TableSettings) -> tuple[pa.Table, Provenance]:
        return read_array_file(path)


@READERS.register("npz", family="binary")
class NumPyReader(MatlabReader):
    """Arrays of NumPy, a row of each a sample."""

    is_zip = True


@READERS.register("xlsx", family="workbook")
class ExcelReader(TableReader):
    """A sheet of a workbook of Excel."""

    is_zip = True

    def read(self, path: Path, settings: TableSettings) -> tuple[pa.Table, Provenance]:
        return _read_sheet(path, settings, _cells, check_formulas=True)

    def sheets(self, path: Path) -> list[str]:
        with closing(_open_workbook(path)) as book:
            sheets = sorted(book.worksheets, key=lambda sheet: sheet.sheet_state != "visible")
            return [sheet.title for sheet in sheets]


@READERS.register("ods", family="workbook")
class OpenDocumentReader(TableReader):
    """A sheet of a workbook of LibreOffice."""

    is_zip = True

    def read(self, path: Path, settings: TableSettings) -> tuple[pa.Table, Provenance]:
        return _read_sheet(path, settings, _cells_of_open_document)

    def sheets(self, path: Path) -> list[str]:
        return [sheet.name for sheet in read_sheets(path)]
