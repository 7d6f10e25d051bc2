"""Open sound files; those of long clips stay open until a part of them is read."""

from __future__ import annotations

import io
import os
import threading
from functools import cache
from pathlib import Path
from typing import Any

MOST_KEPT = 64  # files that a thread keeps open: loaders decode a batch, then prepare it


class _Kept(threading.local):
    """The files that a thread keeps open, by the identity of their source, oldest first."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.files: dict[int, tuple[Any, Any]] = {}

    def here(self) -> dict[int, tuple[Any, Any]]:
        """Return the files; those opened before a fork belong to the other process."""
        if self.process != os.getpid():
            self.process, self.files = os.getpid(), {}
        return self.files


_kept = _Kept()


@cache
def _reader() -> Any:
    """Return the class of open files."""
    import soundfile

    class Reader(soundfile.SoundFile):  # type: ignore[misc]  # it has no type hints
        """A file in which soundfile does not seek after each read, which decodes a block again."""

        def seekable(self) -> bool:
            return not is_seekable(self) and super().seekable()  # asked by `read`, not by `seek`

    return Reader


def open_handle(source: Path | bytes) -> Any:
    """Open a file, as a `soundfile.SoundFile`."""
    return _reader()(io.BytesIO(source) if isinstance(source, bytes) else source)


def is_seekable(file: Any) -> bool:
    """Return whether a part read after `seek` is exact, whatever was read before.

    Lossy formats carry state from one block to the next.
    """
    return file.format in ("FLAC", "WAV", "WAVEX") and file.subtype.startswith(("PCM_", "FLOAT"))


def is_kept(source: Path | bytes, file: Any) -> bool:
    """Return whether the file of a source stays open after use."""
    return _kept.here().get(id(source), (None, None))[1] is file


def keep_handle(source: Path | bytes, file: Any) -> None:
    """Keep a seekable file open until `take_handle`, or until too many are kept after it."""
    files = _kept.here()
    if not is_seekable(file):
        return
    while len(files) >= MOST_KEPT:
        files.pop(next(iter(files)))[1].close()
    files[id(source)] = (source, file)


def take_handle(source: Path | bytes) -> Any:
    """Return the open file of a source, the very object, and forget it; None: not kept."""
    return _kept.here().pop(id(source), (None, None))[1]
