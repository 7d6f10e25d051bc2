"""Parts of recordings: seconds of a clip or a video, and how many pictures of a video are used."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusionzoo.errors import FusionZooError

from .arrays import ArrayItem
from .conversion import BRANDS

FRAMES = 8  # pictures taken of a video
SLACK = 0.5  # s by which a segment may exceed its file, as lengths are often rounded
VIDEOS = {".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ogv"}


@dataclass(frozen=True)
class Stretch:
    """A recording from `start` to `end`, in seconds; `frames` is how many pictures are taken."""

    source: Any  # a path, bytes or, of sound, what `decode_audio` reads
    start: float = 0.0
    end: float | None = None  # None: the recording's end
    frames: int = FRAMES

    def __str__(self) -> str:
        name = "<bytes>" if isinstance(self.source, bytes) else str(self.source)
        if not self.start and self.end is None:
            return name
        return f"{name} from {self.start:g} s to {'its end' if self.end is None else self.end}"

    def bounds(self, seconds: float, name: str) -> tuple[float, float]:
        """Return start and end of the part, in a recording of that length."""
        if self.start >= seconds > 0 or (self.end or 0) > seconds + SLACK:
            edge, time = ("starts", self.start) if self.start >= seconds else ("ends", self.end)
            raise FusionZooError(
                f"the segment {edge} at {time:g} s, but {name} is {seconds:.6g} s long (segments"
                " are in seconds)"
            )
        return self.start, seconds if self.end is None else min(self.end, seconds)

    def samples(self, total: int, rate: int, name: str) -> tuple[int, int]:
        """Return the first sample of the part and the number of its samples."""
        start, end = self.bounds(total / rate, name)
        first = min(round(start * rate), max(0, total - 1))
        stop = total if self.end is None else min(total, round(end * rate))
        return first, max(min(1, total), stop - first)


def container_of(head: bytes) -> str:
    """Return FFmpeg's name for the container of a video, from a file's first bytes, or nothing.

    FFmpeg is given this name rather than left to guess, as some formats (playlists) open other
    files.

    >>> container_of(b"\\0\\0\\0\\x18ftypisom"), container_of(b"#EXTM3U")
    ('mov', '')
    """
    if head[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        return "" if head[4:12] in BRANDS else "mov"
    if head[:4] == b"RIFF":
        return "avi" if head[8:12] == b"AVI " else ""
    names = {b"\x1a\x45\xdf\xa3": "matroska", b"\x00\x00\x01\xba": "mpeg", b"OggS": "ogg"}
    return names.get(head[:4], "")


def is_video(value: Any) -> bool:
    """Whether a value is a video: a path by its ending, bytes by their beginning."""
    value = value.source if isinstance(value, Stretch) else value
    if isinstance(value, bytes):
        return not value.startswith(b"OggS") and container_of(value[:16]) != ""
    return isinstance(value, str | Path) and os.path.splitext(value)[1].lower() in VIDEOS


def cut(kind: str, value: Any, start: float | None, end: float | None, frames: int | None) -> Any:
    """Return the part of an undecoded value, or of each in a list, that a sample uses."""
    if isinstance(value, list):
        return [cut(kind, item, start, end, frames) for item in value]
    if value is None or isinstance(value, Stretch):
        return value
    if kind == "image":
        is_plain = (start, end, frames) == (None, None, None)
        return (
            Stretch(value, start or 0.0, end, frames or FRAMES)
            if not is_plain and is_video(value)
            else value
        )
    return value if start is None and end is None else Stretch(value, start or 0.0, end)


def spread(values: Sequence[Any], count: int | None) -> list[Any]:
    """Return `count` of the values, uniformly spaced; all of them if there are no more.

    >>> spread(range(10), 3)
    [1, 5, 8]
    """
    if count is None or len(values) <= count:
        return list(values)
    return [values[(2 * number + 1) * len(values) // (2 * count)] for number in range(count)]


def cost(value: Any) -> float:
    """Return a rough size of an undecoded value: bytes of a file, or of its part, or samples."""
    if value is None:
        return 0.0
    if isinstance(value, list):
        return sum(cost(item) for item in value)
    if isinstance(value, Stretch):
        # 16 bits at 16 kHz
        return cost(value.source) if value.end is None else 32_000 * (value.end - value.start)
    if isinstance(value, ArrayItem):
        return value.cost
    if isinstance(value, Path):
        return float(value.stat().st_size) if value.is_file() else 0.0
    return float(len(value[0] if isinstance(value, tuple) else value))
