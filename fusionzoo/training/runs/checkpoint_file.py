"""Checkpoint files: written atomically, verified when read, loaded without executing code.

A file is the zip archive that `torch.save` writes, with a digest of its bytes in the archive's
comment. `torch.load` reads it as usual, and a flipped bit is detected.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

from fusionzoo.errors import FusionZooError
from fusionzoo.files import replacing

Contents = dict[str, Any]
MARK = b"sha256:"  # start of the archive's comment; 64 hexadecimal digits follow
COMMENT = len(MARK) + 64
BLOCK = 1 << 22  # bytes hashed at once


def write(contents: Contents | Path, path: Path, keep: int = 1) -> None:
    """Write a checkpoint atomically, or copy one; the `keep - 1` previous files are kept,
    numbered."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial:
            if isinstance(contents, Path):
                shutil.copyfile(contents, partial)
            else:
                with partial.open("wb+") as file:
                    torch.save(contents, file)
                    _seal(file)
            _rotate(path, keep)
    except (OSError, RuntimeError) as error:
        previous = "the one before is kept" if path.is_file() else "there was none before"
        folder = next(folder for folder in path.parents if folder.is_dir())
        free = shutil.disk_usage(folder).free / 1e6  # torch does not say when a disk is full
        raise FusionZooError(
            f"cannot write {path} ({previous}; {free:,.1f} MB are free there): {error};"
            f" {_remedy(folder)}, then --resume"
        ) from error


def _remedy(folder: Path) -> str:
    if os.access(folder, os.W_OK):
        return "make room"
    return f"{folder} may not be written: ask for permission, or name another --out"


def read_newest(path: Path) -> tuple[Contents, list[str]]:
    """Read `path`, or the newest undamaged older file; also return warnings about damaged ones."""
    problems: list[str] = []
    for candidate in (path, *_before(path)):
        if candidate == path or candidate.is_file():
            try:
                contents = read(candidate)
                if problems:
                    step = contents["state"]["step"]
                    problems = [f"warning: {problems[0]}; {candidate.name} is whole: step {step}"]
                return contents, problems
            except FusionZooError as error:
                problems.append(str(error))
    raise FusionZooError(problems[0])


def read(path: Path) -> Contents:
    """Read a checkpoint after verifying its digest: tensors and plain values only."""
    if not path.is_file():
        raise FusionZooError(f"no checkpoint {path} to resume from")
    try:
        with path.open("rb") as file:
            _verify(file)
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise FusionZooError(f"{path} cannot be read: {error}") from error


def _seal(file: BinaryIO) -> None:
    """Write the digest of the file's content into the archive's comment."""
    digest = _digest(file, file.tell())
    file.seek(-2, os.SEEK_END)  # the comment's length: 0 so far
    file.write(COMMENT.to_bytes(2, "little") + MARK + digest)


def _verify(file: BinaryIO) -> None:
    size = file.seek(0, os.SEEK_END) - COMMENT
    if size < 0:
        raise ValueError("it is cut off")
    file.seek(size)
    comment = file.read()
    if not comment.startswith(MARK):
        raise ValueError("it is cut off, or was not written by fusionzoo")
    if _digest(file, size) != comment.removeprefix(MARK):
        raise ValueError("its bytes have changed since it was written")


def _digest(file: BinaryIO, size: int) -> bytes:
    """Hash the first `size` bytes, the comment's length counted as 0."""
    file.seek(0)
    digest, remaining = hashlib.sha256(), size - 2
    while block := file.read(min(BLOCK, remaining)):
        digest.update(block)
        remaining -= len(block)
    return digest.hexdigest().encode()


def _before(path: Path, number: int = 0) -> Iterator[Path]:
    """Yield the existing ones of last-1.pt, last-2.pt, ..., newest first."""
    numbered = [file.stem.rpartition("-")[2] for file in path.parent.glob(f"{path.stem}-*.pt")]
    for number in sorted(int(text) for text in numbered if text.isdigit()):
        yield path.with_stem(f"{path.stem}-{number}")


def _rotate(path: Path, keep: int) -> None:
    """Shift the numbers of previous files; by hard links, so that `path` never disappears."""
    for number in range(keep - 1, 0, -1):
        newer = path.with_stem(f"{path.stem}-{number - 1}") if number > 1 else path
        older = path.with_stem(f"{path.stem}-{number}")
        if newer.is_file():
            spare = older.with_suffix(".spare")
            spare.unlink(missing_ok=True)
            os.link(newer, spare)
            spare.replace(older)
