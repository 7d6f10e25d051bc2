"""Read the file of a table, chosen by its ending: CSV, TSV, JSON lines, Parquet, .xlsx."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from fusionzoo.errors import FusionZooError, one_line

from ..provenance import Provenance
from .checked import check_unicode
from .delimited import DELIMITERS, read_delimited
from .json_lines import read_json_lines
from .parquet import read_parquet
from .spreadsheet import read_spreadsheet
from .text_files import check_encoding, find_encoding

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
