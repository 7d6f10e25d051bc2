"""Tables with a delimiter between cells: CSV, TSV and their relatives."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from fusionzoo.errors import FusionZooError, one_line

from ..row_numbers import RowNumbers
from .text_files import MAX_BLOCK, open_text, open_utf8, read_in_blocks

DELIMITERS = {",": "','", ";": "';'", "\t": "tab", "|": "'|'"}
NAMES = {"tab": "\t", "\\t": "\t", "comma": ",", "semicolon": ";", "pipe": "|"}
SAMPLE = 1 << 18  # characters from the start of a file that show its delimiter
SAMPLE_ROWS = 200


def read_delimited(
    path: Path, encoding: str, delimiter: str | None
) -> tuple[pa.Table, RowNumbers, str]:
    """Read a file; return its cells as text, the numbers of its rows and its delimiter."""
    with open_text(path, encoding) as file:
        head = file.read(SAMPLE)
    if not head.strip():
        raise FusionZooError(f"{path} is empty")
    named = re.match(r"sep=(.)\r?\n", head)  # a first line for Excel, before the header
    skipped = 1 if named else 0
    if delimiter is None:
        character = str(named[1]) if named else find_delimiter(head, len(head) < SAMPLE)
    else:
        character = check_delimiter(delimiter)
    try:
        table = read_in_blocks(partial(_read, path, encoding, character, skipped))
    except pa.ArrowInvalid as error:
        raise _describe(path, encoding, character, skipped, error) from error
    _check_last_quote(path, encoding, character, table)
    read_numbers = partial(_row_numbers, path, encoding, character, skipped)
    return table, RowNumbers(first=2 + skipped, read=read_numbers), character


def check_delimiter(delimiter: str) -> str:
    """Return the character that the user names, for instance by `tab`."""
    character = NAMES.get(delimiter.lower(), delimiter)
    if len(character) != 1 or character in '"\r\n' or not character.isascii():
        raise FusionZooError(
            f"--data.delimiter {delimiter!r} is not one character; usual are ',', ';', '|' and tab"
        )
    return character


def find_delimiter(head: str, is_whole: bool) -> str:
    r"""Return the delimiter of a file from its first rows; a comma where none fits.

    It is the one that divides most rows as it divides the header; of several, the one that makes
    the most columns.

    >>> find_delimiter("id;weight\n1;2,5\n2;3,5\n", is_whole=True)
    ';'
    """
    best, best_score = ",", (False, 1)
    for delimiter in DELIMITERS:
        counts = [len(cells) for _, cells in _parse(io.StringIO(head, newline=""), delimiter)]
        counts = (counts if is_whole or len(counts) < 2 else counts[:-1])[:SAMPLE_ROWS]
        alike = counts.count(counts[0]) >= 0.9 * len(counts)
        score = (alike, counts[0])
        if counts[0] > 1 and score > best_score:
            best, best_score = delimiter, score
    return best


def _read(path: Path, encoding: str, delimiter: str, skipped: int, block: int) -> pa.Table:
    import pyarrow.csv as pv

    parse = pv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    options = pv.ReadOptions(block_size=block, skip_rows=skipped)
    with open_utf8(path, encoding) as stream:
        header = pv.open_csv(stream, read_options=options, parse_options=parse).schema.names
    # All cells are read as text, so that the id 007 stays 007; an empty cell is null.
    convert = pv.ConvertOptions(
        column_types=dict.fromkeys(header, pa.string()), strings_can_be_null=True, null_values=[""]
    )
    with open_utf8(path, encoding) as stream:
        return pv.read_csv(
            stream, read_options=options, parse_options=parse, convert_options=convert
        )


def _parse(lines: Any, delimiter: str, *, strict: bool = False) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of each row's first line, and its cells; empty lines are no rows."""
    limit = csv.field_size_limit(MAX_BLOCK)
    try:
        reader, number = csv.reader(lines, delimiter=delimiter, strict=strict), 1
        for cells in reader:
            if cells:
                yield number, cells
            number = reader.line_num + 1
    finally:
        csv.field_size_limit(limit)


def _row_numbers(path: Path, encoding: str, delimiter: str, skipped: int) -> list[int]:
    """Return the number of the first line of each row below the header."""
    with open_text(path, encoding) as file:
        return [number for number, _ in _parse(file, delimiter)][1 + skipped :]


def _describe(
    path: Path, encoding: str, delimiter: str, skipped: int, error: pa.ArrowInvalid
) -> FusionZooError:
    """Return the error of a file that cannot be parsed, with its first row of another length."""
    with open_text(path, encoding) as file:
        rows = _parse(file, delimiter)
        for _ in range(skipped):
            next(rows)
        _, header = next(rows)
        for number, cells in rows:
            if len(cells) != len(header):
                return FusionZooError(
                    f"{path}, row {number}: {len(cells)} cell{'s' * (len(cells) > 1)}, but the"
                    f" header has {len(header)}, with {DELIMITERS.get(delimiter, repr(delimiter))}"
                    " between them: put a cell that contains this character into quotation marks,"
                    " or name another delimiter by --data.delimiter"
                )
    return FusionZooError(f"{path} cannot be read: {one_line(error)}")


def _check_last_quote(path: Path, encoding: str, delimiter: str, table: pa.Table) -> None:
    """Raise an error for a quotation mark that is not closed and swallows the rest of the file."""
    last_row = [column[-1].as_py() for column in table.columns if len(table)]
    if not any("\n" in (cell or "") for cell in last_row):
        return
    last_number = 1
    with open_text(path, encoding) as file:
        try:
            for number, _ in _parse(file, delimiter, strict=True):
                last_number = number
        except csv.Error as error:
            if "end of data" in str(error):
                raise FusionZooError(
                    f"{path}: a quotation mark that opens a cell below row {last_number} is not"
                    " closed, so the rest of the file is in this cell: close it"
                ) from None
