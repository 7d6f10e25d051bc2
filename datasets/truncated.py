"""Notice audio files that were cut off, of which libsndfile reads what is left.

It raises an error for a cut FLAC file; for the others the announced length is compared here.
"""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import BinaryIO

UNKNOWN = (0, 0xFFFFFFFF)  # sizes that programs write into a pipe, not knowing the length
PAGE = 65_307  # bytes of the longest OGG page


def missing_bytes(source: Path | bytes) -> int:
    """Return how many bytes a WAV or OGG file announces beyond its end; 0 for whole ones."""
    with io.BytesIO(source) if isinstance(source, bytes) else source.open("rb") as file:
        head = file.read(12)
        size = file.seek(0, io.SEEK_END)
        if head[:4] in (b"RIFF", b"RIFX") and head[8:12] == b"WAVE":
            return _missing_in_wav(file, size, "<" if head[:4] == b"RIFF" else ">")
        if head[:4] == b"OggS":
            return _missing_in_ogg(file, size)
    return 0


def _missing_in_wav(file: BinaryIO, size: int, order: str) -> int:
    """Walk over the chunks until that of the samples."""
    position = 12
    while position + 8 <= size:
        file.seek(position)
        name, length = struct.unpack(f"{order}4sI", file.read(8))
        if name == b"data":
            end = position + 8 + length
            return 0 if length in UNKNOWN else max(0, end - size)
        position += 8 + length + length % 2
    return 0  # no samples: libsndfile raises an error


def _missing_in_ogg(file: BinaryIO, size: int) -> int:
    """Compare the length of the last page with the end of the file.

    The flag of the last page is no test: some programs never set it.
    """
    start = max(0, size - 2 * PAGE)
    file.seek(start)
    tail = file.read()
    page = tail.rfind(b"OggS\0")
    if page < 0:
        return 0
    header = tail[page : page + 27]
    if len(header) < 27:
        return 27 - len(header)
    table = tail[page + 27 : page + 27 + header[26]]
    missing = header[26] - len(table)
    return missing or max(0, 27 + len(table) + sum(table) - (len(tail) - page))
