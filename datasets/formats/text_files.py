"""Text files as users have them: compressed or not, and in any encoding."""

from __future__ import annotations

import codecs
import gzip
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import pyarrow as pa

from fusionzoo.errors import FusionZooError

from ..budgets import check_expansion

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


class BadByte(NamedTuple):
    """A byte that does not belong to an encoding."""

    row: int
    byte: int


def is_gzip(path: Path) -> bool:
    """Return whether a file's name says that it is compressed by gzip."""
    return path.suffix.lower() == ".gz"


def open_utf8(path: Path, encoding: str) -> Any:
    """Open a file as a stream of UTF-8 for pyarrow."""
    stream = pa.input_stream(str(path), compression="gzip" if is_gzip(path) else None)
    if encoding == "utf-8":
        return stream
    return pa.transcoding_input_stream(stream, encoding, "utf-8")


def open_text(path: Path, encoding: str) -> TextIO:
    """Open a file for reading text, with its line breaks as they are."""
    name = "utf-8-sig" if encoding == "utf-8" else encoding
    if is_gzip(path):
        return gzip.open(path, "rt", encoding=name, newline="")
    return path.open(encoding=name, newline="")


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
        raise FusionZooError(
            f"--data.encoding {encoding!r} is no encoding; usual are utf-8, cp1252, latin-1, utf-16"
        ) from None
    name = "utf-8" if codec.name == "utf-8-sig" else codec.name
    bad = find_bad_byte(path, name)
    if bad is not None:
        raise _not_in(path, bad, name, SET_ENCODING)
    return name


def find_encoding(path: Path) -> tuple[str, str]:
    """Find a file's encoding; return it with the reason, which is empty for UTF-8.

    A byte-order mark or, in UTF-16, zeros in every other byte decide. Else the file is UTF-8 if it
    can be; a file with accented letters in UTF-8 and a few other bytes is damaged, which is an
    error. What is left is taken for cp1252, the usual superset of latin-1.
    """
    encoding, reason = _find_mark(next(_chunks(path), b"")[:4096])
    bad = find_bad_byte(path, encoding)
    if bad is None:
        return encoding, reason
    if encoding != "utf-8":
        raise _not_in(path, bad, f"{encoding} (found {reason})", SET_ENCODING)
    letters, bad_bytes = _count_utf8(path)
    if letters > bad_bytes:
        repair = f"repair it, or {SET_ENCODING}"
        raise _not_in(
            path, bad, f"utf-8, in which the file's {letters:,} other letters are", repair
        )
    undefined = find_bad_byte(path, "cp1252")
    if undefined is not None:
        raise _not_in(path, undefined, "utf-8 or cp1252", SET_ENCODING)
    return "cp1252", "guessed, as it is not UTF-8: --data.encoding names another"


def _find_mark(head: bytes) -> tuple[str, str]:
    """Return the encoding that a mark or zero bytes at the start of a file show, and the reason."""
    for mark, encoding in MARKS:
        if head.startswith(mark) and encoding != "utf-8":
            return encoding, "by its byte-order mark"
    for encoding, zeros, others in (
        ("utf-16-le", head[1::2], head[0::2]),
        ("utf-16-be", head[0::2], head[1::2]),
    ):
        if zeros.count(0) > len(zeros) / 2 and not others.count(0):
            return encoding, "by its zero bytes"
    return "utf-8", ""


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
