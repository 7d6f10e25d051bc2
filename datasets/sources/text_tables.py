"""Tables in text files: CSV and its relatives, JSON lines; compressed or not, in any encoding."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import pyarrow as pa
import pyarrow.compute as pc

from fusionzoo.errors import FusionZooError, one_line

from ..media.budgets import check_expansion
from ..tables.arrow import check_depth
from ..tables.provenance import RowNumbers
from .encodings import Reading, find_sure, read_words

CHUNK = 1 << 20  # bytes that are decoded at a time
BLOCK = 1 << 20  # bytes that pyarrow reads at a time; a row has to fit
MAX_BLOCK = (1 << 31) - 1
MARKS = (  # byte-order marks; that of UTF-32 starts like that of UTF-16
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
SET_ENCODING = "--data.encoding names another encoding (utf-8, cp1252, latin-1, utf-16, ...)"
DELIMITERS = {",": "','", ";": "';'", "\t": "tab", "|": "'|'"}
NAMES = {"tab": "\t", "\\t": "\t", "comma": ",", "semicolon": ";", "pipe": "|"}
SAMPLE = 1 << 18  # characters from the start of a file that show its delimiter
SAMPLE_ROWS = 200
# A word that is not ASCII; no encoding has the characters around it within a letter.
WORD = re.compile(rb"(?<![^\s,;])[^\s,;\x80-\xff]*+[\x80-\xff][^\s,;]*")
SAMPLE_WORDS = 400  # that show an encoding
MAX_READINGS, MAX_SHOWN = 6, 40  # encodings and letters in a message


class BadByte(NamedTuple):
    """A byte that does not belong to an encoding."""

    row: int
    byte: int


def is_gzip(path: Path) -> bool:
    """Return whether a file's name says that it is compressed by gzip."""
    return path.suffix.lower() == ".gz"


@dataclass(frozen=True)
class TextFile:
    """A text file and its encoding."""

    path: Path
    encoding: str

    def open_utf8(self) -> Any:
        """Open the file as a stream of UTF-8 for pyarrow."""
        compression = "gzip" if is_gzip(self.path) else None
        stream = pa.input_stream(str(self.path), compression=compression)
        if self.encoding == "utf-8":
            return stream
        return pa.transcoding_input_stream(stream, self.encoding, "utf-8")

    def open_text(self) -> TextIO:
        """Open the file for reading text, with its line breaks as they are."""
        name = "utf-8-sig" if self.encoding == "utf-8" else self.encoding
        if is_gzip(self.path):
            return gzip.open(self.path, "rt", encoding=name, newline="")
        return self.path.open(encoding=name, newline="")


@dataclass(frozen=True)
class DelimitedFile(TextFile):
    """A text file of cells, the character between them and the lines before its first row."""

    delimiter: str
    skipped: int
    has_header: bool = True


def read_in_blocks(read: Callable[[int], pa.Table]) -> pa.Table:
    """Call a reader of pyarrow with larger and larger blocks until every row fits into one."""
    size = BLOCK
    while True:
        try:
            return read(size)
        except pa.ArrowInvalid as error:
            if "straddling" not in str(error) or size == MAX_BLOCK:
                raise
            size = min(size * 8, MAX_BLOCK)


def check_encoding(path: Path, encoding: str) -> str:
    """Return the usual name of the encoding that the user names, in which a file must be."""
    try:
        codec = codecs.lookup(encoding)
        if not codec._is_text_encoding:
            raise LookupError
    except (LookupError, ValueError):
        raise FusionZooError(f"--data.encoding {encoding!r} is no encoding, as cp1252 is") from None
    name = "utf-8" if codec.name == "utf-8-sig" else codec.name
    bad = find_bad_byte(path, name)
    if bad is not None:
        raise _not_in(path, bad, name, SET_ENCODING)
    return name


def find_encoding(path: Path) -> tuple[str, str]:
    """Find a file's encoding; return it with the reason, which is empty for UTF-8.

    A byte-order mark or, in UTF-16, zeros in every other byte decide. Else the file is UTF-8 if it
    can be; a file with accented letters in UTF-8 and a few other bytes is damaged, which is an
    error. What is left is guessed from words of the whole file, or refused where these allow more
    than one encoding.
    """
    encoding, reason = _find_mark(next(_chunks(path), b""))
    bad = find_bad_byte(path, encoding)
    if bad is None:
        return encoding, reason
    if encoding != "utf-8":
        raise _not_in(path, bad, f"{encoding} (found {reason})", SET_ENCODING)
    letters, bad_bytes = _count_utf8(path)
    if letters > 4 * bad_bytes:  # other encodings have a few by chance
        repair = f"repair it, or {SET_ENCODING}"
        raise _not_in(path, bad, f"utf-8, as its {letters:,} other letters are", repair)
    words = _sample_words(path)
    readings = read_words(words)
    sure = find_sure(readings)
    if sure is None:
        raise _unsure(path, words, readings, bad)
    encoding = codecs.lookup(sure.encoding).name
    undefined = find_bad_byte(path, encoding)
    if undefined is not None:
        raise _not_in(path, undefined, f"utf-8 or {encoding}", SET_ENCODING)
    return encoding, "guessed, as it is not UTF-8: --data.encoding names another"


def _find_mark(head: bytes) -> tuple[str, str]:
    """Return the encoding that marks or zero bytes in a file's first part show, and the reason."""
    for mark, encoding in MARKS:
        if head.startswith(mark) and encoding != "utf-8":
            return encoding, "by its byte-order mark"
    for encoding, zeros, others in (
        ("utf-16-le", head[1:4096:2], head[0:4096:2]),
        ("utf-16-be", head[0:4096:2], head[1:4096:2]),
    ):
        # Commas, digits and line breaks are ASCII in any language; U+4E00 ends in a zero.
        if zeros.count(0) > max(len(zeros) / 20, 4 * others.count(0)):
            return encoding, "by its zero bytes"
    if head.isascii() and re.search(rb"\x1b\$[@B]", head):
        return "iso2022_jp_ext", "by its escape sequences"
    return "utf-8", ""


def _sample_words(path: Path) -> list[bytes]:
    """Return words that are not ASCII from all parts of a file, among them all its bytes."""
    words: dict[bytes, None] = {}
    seen: set[int] = set()
    rest = b"\n"
    for chunk in _chunks(path, end=True):
        text = rest + (chunk or b"\n")
        end = max(map(text.rfind, (b"\n", b"\r", b" ", b",", b";")))
        rest = text[end:]
        found = list(dict.fromkeys(WORD.findall(text[:end])))
        for number, word in enumerate(found):
            if number % (1 + len(found) // SAMPLE_WORDS) == 0 or not seen.issuperset(word):
                words[word] = None
                seen.update(word)
    spread = list(words)[:: 1 + len(words) // SAMPLE_WORDS]
    seen = set().union(*spread)
    for word in words:
        if not seen.issuperset(word):
            spread.append(word)
            seen.update(word)
    return spread


def _unsure(
    path: Path, words: list[bytes], readings: list[Reading], bad: BadByte
) -> FusionZooError:
    """Return the error of a file that may be in several encodings, with a word as each reads it."""
    if not readings:
        return _not_in(path, bad, "utf-8, and no other encoding makes words of it", SET_ENCODING)
    shown = readings[:MAX_READINGS]
    place = max(range(len(words)), key=lambda number: len({x.words[number] for x in shown}))
    with gzip.open(path) if is_gzip(path) else path.open("rb") as lines:
        row = next((n for n, line in enumerate(lines, start=1) if words[place] in line), bad.row)
    names = [codecs.lookup(reading.encoding).name for reading in shown]
    pairs = zip(names, shown, strict=True)
    texts = ", ".join(f"{name}: {x.words[place][:MAX_SHOWN]!r}" for name, x in pairs)
    return FusionZooError(
        f"{path} is not UTF-8, and its encoding is not sure; row {row} is in {texts}. Name the"
        f" right one: --data.encoding {names[0]}"
    )


def find_bad_byte(path: Path, encoding: str) -> BadByte | None:
    """Return the first byte of a file that is not in an encoding, with its row."""
    name = "utf-8-sig" if encoding == "utf-8" else encoding
    decoder, row, ends = codecs.getincrementaldecoder(name)(), 1, "\n"
    for chunk in _chunks(path, end=True):
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            before = error.object[: error.start]
            byte = error.object[error.start] if error.start < len(error.object) else 0
            return BadByte(row + before.count(ends.encode()), byte)
        except UnicodeError:  # UTF-16 without a mark, where one is needed
            return BadByte(row, chunk[0] if chunk else 0)
        if row == 1 and "\n" not in text and "\r" in text:
            ends = "\r"  # lines of old Macintosh files
        row += text.count(ends)
    return None


def _count_utf8(path: Path) -> tuple[int, int]:
    """Count the letters of several bytes that are valid UTF-8, and the bytes that are not."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="surrogateescape")
    letters = bad_bytes = 0
    for chunk in _chunks(path, end=True):
        text = decoder.decode(chunk, final=not chunk)
        bad = len(re.findall("[\udc80-\udcff]", text))
        bad_bytes += bad
        letters += len(re.findall("[^\x00-\x7f]", text)) - bad
    return letters, bad_bytes


def _chunks(path: Path, *, end: bool = False) -> Iterator[bytes]:
    """Yield a file's bytes, uncompressed; at the end an empty chunk, if wanted."""
    num_bytes = 0
    with gzip.open(path) if is_gzip(path) else path.open("rb") as file:
        while chunk := file.read(CHUNK):
            num_bytes += len(chunk)
            if is_gzip(path):
                check_expansion(str(path), path.stat().st_size, num_bytes)
            yield chunk
    if end:
        yield b""


def _not_in(path: Path, bad: BadByte, encoding: str, repair: str) -> FusionZooError:
    return FusionZooError(
        f"{path}, row {bad.row}: byte 0x{bad.byte:02x} is not {encoding}; {repair}"
    )


def read_delimited(
    text: TextFile, delimiter: str | None, *, has_header: bool = True
) -> tuple[pa.Table, RowNumbers, str]:
    """Return a file's cells as text, the numbers of its rows and its delimiter."""
    with text.open_text() as opened:
        head = opened.read(SAMPLE)
    if not head.strip():
        raise FusionZooError(f"{text.path} is empty")
    named = re.match(r"sep=(.)\r?\n", head)  # a first line for Excel, before the header
    skipped = 1 if named else 0
    if delimiter is None:
        character = str(named[1]) if named else find_delimiter(head, len(head) < SAMPLE)
    else:
        character = check_delimiter(delimiter)
    file = DelimitedFile(text.path, text.encoding, character, skipped, has_header)
    try:
        table = read_in_blocks(partial(_read_delimited, file))
    except pa.ArrowInvalid as error:
        raise _describe_delimited(file, error) from error
    _check_last_quote(file, table)
    first = 1 + has_header + skipped
    numbers = RowNumbers(first=first, read=partial(_delimited_row_numbers, file))
    _check_lost_rows(file, table, numbers)
    return table, numbers, character


def check_delimiter(delimiter: str) -> str:
    """Return the character that the user names, for instance by `tab`."""
    character = NAMES.get(delimiter.lower(), delimiter)
    if len(character) != 1 or character in '"\r\n' or not character.isascii():
        raise FusionZooError(f"--data.delimiter {delimiter!r} is not one character, as ; or tab")
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
        rows = islice(_parse(io.StringIO(head, newline=""), delimiter), SAMPLE_ROWS + 1)
        counts = [len(cells) for _, cells in rows]
        counts = (counts if is_whole or len(counts) < 2 else counts[:-1])[:SAMPLE_ROWS]
        alike = counts.count(counts[0]) >= 0.9 * len(counts)
        score = (alike, counts[0])
        if counts[0] > 1 and score > best_score:
            best, best_score = delimiter, score
    return best


def _read_delimited(file: DelimitedFile, block: int) -> pa.Table:
    import pyarrow.csv as pv

    parse = pv.ParseOptions(delimiter=file.delimiter, newlines_in_values=True)
    options = pv.ReadOptions(
        block_size=block, skip_rows=file.skipped, autogenerate_column_names=not file.has_header
    )
    with file.open_utf8() as stream:
        header = pv.open_csv(stream, read_options=options, parse_options=parse).schema.names
    if not file.has_header:
        header = [f"c{number}" for number in range(1, len(header) + 1)]
        options = pv.ReadOptions(block_size=block, skip_rows=file.skipped, column_names=header)
    # All cells are read as text, so that the id 007 stays 007; an empty cell is null.
    convert = pv.ConvertOptions(
        column_types=dict.fromkeys(header, pa.string()), strings_can_be_null=True, null_values=[""]
    )
    with file.open_utf8() as stream:
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


def _delimited_row_numbers(file: DelimitedFile) -> list[int]:
    """Return the number of the first line of each row below the header."""
    with file.open_text() as lines:
        numbers = [number for number, _ in _parse(lines, file.delimiter)]
    return numbers[file.has_header + file.skipped :]


def _describe_delimited(file: DelimitedFile, error: pa.ArrowInvalid) -> FusionZooError:
    """Return the error of a file that cannot be parsed, with its first row of another length."""
    path, delimiter = file.path, file.delimiter
    first = "header" if file.has_header else "first row"
    with file.open_text() as lines:
        rows = _parse(lines, delimiter)
        for _ in range(file.skipped):
            next(rows)
        _, header = next(rows)
        for number, cells in rows:
            if len(cells) != len(header):
                return FusionZooError(
                    f"{path}, row {number}: {len(cells)} cells, but the {first} has {len(header)},"
                    f" with {DELIMITERS.get(delimiter, repr(delimiter))} between them (quote cells"
                    " with this character, or name another by --data.delimiter)"
                )
    return FusionZooError(f"{path} cannot be read: {one_line(error)}")


def _check_last_quote(file: DelimitedFile, table: pa.Table) -> None:
    """Raise an error for a quotation mark that is not closed and swallows the rest of the file."""
    last_row = [column[-1].as_py() for column in table.columns if len(table)]
    if not any("\n" in (cell or "") for cell in last_row):
        return
    path, delimiter, last_number = file.path, file.delimiter, 1
    with file.open_text() as lines:
        try:
            for number, _ in _parse(lines, delimiter, strict=True):
                last_number = number
        except csv.Error as error:
            if "end of data" in str(error):
                raise FusionZooError(f"{path}: the quote below row {last_number} is open") from None


def _check_lost_rows(file: DelimitedFile, table: pa.Table, numbers: RowNumbers) -> None:
    """Raise an error for a cell into which rows vanish between two stray quotation marks.

    Its lines divide as rows do, and a column of theirs holds what is in the table elsewhere, or
    the text after the second mark shows that no cell ends there.
    """
    path, delimiter, width = file.path, file.delimiter, table.num_columns
    for place, column in enumerate(table.columns):
        cells = _cells_like_rows(column, delimiter, place, width) if width > 1 else {}
        if not cells:
            continue
        parts = {row: _parts_of_rows(cell, delimiter, place, width) for row, cell in cells.items()}
        lost = _first_of_known_parts(parts, table)
        if lost is None:
            lost = _first_not_quoted(cells, file)
        if lost is not None:
            first = numbers.number(lost)
            last = first + cells[lost].count("\n")
            where = f"{path}, row {first}, column {table.column_names[place]!r}"
            problem = f"{where}: two stray quotation marks make rows {first} to {last} one cell"
            raise FusionZooError(f"{problem}: remove them")


def _cells_like_rows(
    column: pa.ChunkedArray, delimiter: str, place: int, width: int
) -> dict[int, str]:
    """Return, by row, the cells of several lines that divide as rows do: the first line begins in
    the column `place`, and the last one ends there.
    """
    several = pc.match_substring(column, "\n")
    if not pc.any(several).as_py():
        return {}
    between = pc.multiply(pc.count_substring(column, "\n"), width - 1)
    alike = pc.equal(pc.count_substring(column, delimiter), between)
    cells = {}
    for row in pc.indices_nonzero(pc.and_(several, alike)).to_pylist():
        cell = column[row].as_py()
        first, *whole, last = (line.count(delimiter) for line in cell.split("\n"))
        if first + place == width - 1 and last == place and {*whole} <= {width - 1}:
            cells[row] = cell
    return cells


def _parts_of_rows(cell: str, delimiter: str, place: int, width: int) -> dict[int, list[str]]:
    """Return by column what the lines of a cell hold as rows, without the two parts of a cell."""
    rows = [line.rstrip("\r").split(delimiter) for line in cell.split("\n")]
    parts: dict[int, list[str]] = {number: [] for number in range(width)}
    whole = [(place + 1, rows[0][1:]), *((0, row) for row in rows[1:-1]), (0, rows[-1][:-1])]
    for start, row in whole:
        for number, part in enumerate(row, start=start):
            parts[number].append(part)
    return parts


def _first_of_known_parts(parts: dict[int, dict[int, list[str]]], table: pa.Table) -> int | None:
    """Return the first row of which all parts for a column, none of them empty, are in it."""
    first_rows = []
    for number, column in enumerate(table.columns):
        texts = {x for by_column in parts.values() for x in by_column[number]} - {""}
        is_known = pc.is_in(column, value_set=pa.array(texts, pa.string()))
        known = set(column.filter(is_known).unique().to_pylist()) if texts else set()
        for row, by_column in parts.items():
            if by_column[number] and all(x in known for x in by_column[number]):
                first_rows.append(row)
                break
    return min(first_rows, default=None)


def _first_not_quoted(cells: dict[int, str], file: DelimitedFile) -> int | None:
    """Return the first cell that is not in the file within quotation marks, the second of which
    ends it.
    """
    with file.open_utf8() as stream:
        text = stream.read()
    position = 0
    for row, cell in cells.items():
        quoted = ('"' + cell.replace('"', '""') + '"').encode()
        position = text.find(quoted, position)
        end = position + len(quoted)
        if position < 0 or text[end : end + 1] not in (file.delimiter.encode(), b"\r", b"\n", b""):
            return row
    return None


def read_json_lines(file: TextFile) -> tuple[pa.Table, RowNumbers]:
    """Read a file; return its columns and the numbers of its rows. Text stays text, dates too."""
    with file.open_text() as lines:
        check_depth(lines, str(file.path))
    try:
        table = read_in_blocks(partial(_read_json_lines, file, pa.schema([])))
        dates = [field for field in table.schema if field.type != _without_dates(field.type)]
        if dates:
            schema = pa.schema([pa.field(x.name, _without_dates(x.type)) for x in dates])
            table = read_in_blocks(partial(_read_json_lines, file, schema))
    except pa.ArrowInvalid as error:
        raise _describe_json_lines(file, error) from error
    return table, RowNumbers(read=partial(_json_row_numbers, file))


def _read_json_lines(file: TextFile, schema: pa.Schema, block: int) -> pa.Table:
    import pyarrow.json as pj

    parse = pj.ParseOptions(explicit_schema=schema)
    with file.open_utf8() as stream:
        return pj.read_json(
            stream, read_options=pj.ReadOptions(block_size=block), parse_options=parse
        )


def _without_dates(kind: pa.DataType) -> pa.DataType:
    """Return a type with text where pyarrow takes text for dates."""
    if pa.types.is_timestamp(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_without_dates(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(x.name, _without_dates(x.type)) for x in kind])
    return kind


def _json_row_numbers(file: TextFile) -> list[int]:
    """Return the numbers of the lines that are not blank."""
    with file.open_text() as lines:
        return [number for number, line in enumerate(lines, start=1) if line.strip()]


def _describe_json_lines(file: TextFile, error: pa.ArrowInvalid) -> FusionZooError:
    """Return the error of a file that cannot be parsed, with its first row that is no object."""
    with file.open_text() as lines:
        for number, line in enumerate(lines, start=1):
            try:
                is_object = not line.strip() or isinstance(json.loads(line), dict)
            except ValueError as problem:
                return FusionZooError(f"{file.path}, row {number} is not JSON: {one_line(problem)}")
            if not is_object:
                return FusionZooError(f"{file.path}, row {number} is no object {{...}}")
    return FusionZooError(f"{file.path} cannot be read: {one_line(error)}")
