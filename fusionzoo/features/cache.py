"""Features of frozen encoders on disk: entries written once, checked, memory-mapped."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

from fusionzoo.errors import FusionZooError, one_line
from fusionzoo.files import cache_root, cannot_write

from .encode import StoredFeatures, key_of

FILES = StoredFeatures._fields
ABOUT = "about.json"  # describes an entry
DIGEST = "sha256"  # of a file, and of the rest of `about.json`
KEY = "[0-9a-f]{24}"  # what `key_of` returns
PART = ".part-"  # in the name of what is being written or removed
PART_NAME = rf"{KEY}{re.escape(PART)}(\d+-)?[0-9a-f]{{8,12}}"
ABANDONED = 86_400  # seconds without a write after which a part is of a process that was killed
Signature = tuple[tuple[int, int, int], ...]  # of an entry's files: inode, size, time of change
# What this process has verified and mapped. A mapping outlives the removal of its entry.
_mapped: dict[Path, tuple[Signature, StoredFeatures]] = {}


@dataclass(frozen=True)
class CacheEntry:
    """An entry as `fusionzoo cache` lists it."""

    key: str
    metadata: dict[str, Any] | None  # None: damaged, or of another version
    size: int  # bytes
    used: float  # time of the last use, in seconds since 1970


class _Damaged(Exception):
    """A file of an entry, and what is wrong with it."""


class FeatureCache:
    """A folder of entries that are complete or absent, whatever other processes do meanwhile.

    An entry is written under a temporary name and renamed once complete; the first of several
    writers wins, and the others read its entry. One that is removed is renamed first. `prune`
    removes what killed processes left. Digests are checked when a process first maps an entry.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def load(self, description: Mapping[str, Any]) -> StoredFeatures | None:
        """Map an entry into memory; None if there is none. A damaged one is removed."""
        folder = self.root / key_of(description)
        if not os.path.lexists(folder):
            return None
        try:
            stored = _read(folder)
        except PermissionError as error:
            raise FusionZooError(
                f"cannot read {error.filename}: permission denied; the environment variable"
                " FUSIONZOO_CACHE names another folder for the cache"
            ) from None
        except (_Damaged, OSError) as error:
            _mapped.pop(folder, None)
            if os.path.lexists(folder):  # else another process removed it
                reason = f"{folder} is damaged: {error}" if isinstance(error, OSError) else error
                print(f"warning: {reason}; the entry is removed and computed again")
                self._remove(folder)
            return None
        with suppress(OSError):  # a cache that may only be read
            os.utime(folder / ABOUT)
        return stored

    def save(self, description: Mapping[str, Any], stored: StoredFeatures) -> StoredFeatures:
        """Write an entry and return it mapped; one that exists already is kept."""
        folder = self.root / key_of(description)
        part = self._temporary(folder.name)
        try:
            part.mkdir(parents=True)
            _write_entry(part, folder.name, description, stored)
            written = _signature(part), _map_files(part, _read_about(part, folder.name))
        except OSError as error:
            if self.root.is_dir() and not part.exists():
                print(f"warning: {part} was removed while it was written: it is kept in memory")
                _mapped[folder] = (), stored
                return stored
            shutil.rmtree(part, ignore_errors=True)
            raise cannot_write(self.root, error) from error
        try:
            part.rename(folder)
        except OSError:  # another writer was first
            shutil.rmtree(part, ignore_errors=True)
            if (other := self.load(description)) is not None:
                return other
        _mapped[folder] = written
        return written[1]

    def get(
        self, description: Mapping[str, Any], compute: Callable[[CachedParts], StoredFeatures]
    ) -> StoredFeatures:
        """Load an entry, or compute and save it; `compute` gets the entry's unfinished parts."""
        if (stored := self.load(description)) is not None:
            return stored
        parts = CachedParts(self, description)
        stored = self.save(description, compute(parts))
        parts.remove()
        return stored

    def entries(self) -> Iterator[CacheEntry]:
        """Yield all entries, the most recently used first."""
        entries = []
        for path in self.root.glob("*"):
            if not re.fullmatch(KEY, path.name):
                continue
            metadata: dict[str, Any] | None = None
            with suppress(_Damaged, OSError):
                metadata = _read_about(path, path.name)
            about = path / ABOUT if metadata else path
            with suppress(OSError):  # another process removed it
                entries.append(CacheEntry(path.name, metadata, _size(path), about.stat().st_mtime))
        yield from sorted(entries, key=lambda entry: -entry.used)

    def prune(self, keep_days: float | None = None, keep_bytes: int | None = None) -> int:
        """Remove what killed processes left, damaged and old entries; return the bytes freed.

        Killed, here or on another host, is a process that has not written for a day. Old are those
        unused for `keep_days`, and the least recently used ones beyond `keep_bytes` in total. A
        process that has mapped an entry keeps its memory.
        """
        freed = 0
        for part in self.root.glob(f"*{PART}*"):
            is_ours = re.fullmatch(PART_NAME, part.name)
            if is_ours and time.time() - _last_write(part) > ABANDONED:
                freed += self._remove(part)
        kept_bytes = 0
        for entry in self.entries():
            old = keep_days is not None and time.time() - entry.used >= keep_days * 86400
            large = keep_bytes is not None and kept_bytes + entry.size > keep_bytes
            if old or large or entry.metadata is None:
                freed += self._remove(self.root / entry.key)
            else:
                kept_bytes += entry.size
        return freed

    def remove(self, description: Mapping[str, Any]) -> None:
        """Remove an entry, if there is one, and let go of its memory."""
        folder = self.root / key_of(description)
        _mapped.pop(folder, None)
        self._remove(folder)

    def _remove(self, path: Path) -> int:
        """Remove an entry, whatever it is, at once; return its bytes if this process did."""
        removed = self._temporary(path.name.partition(PART)[0])
        try:
            path.rename(removed)
        except OSError:  # another process removed it, or the cache may only be read
            return 0
        size = _size(removed)
        if removed.is_dir() and not removed.is_symlink():
            shutil.rmtree(removed, ignore_errors=True)
        else:
            removed.unlink(missing_ok=True)
        return size

    def _temporary(self, key: str) -> Path:
        return self.root / f"{key}{PART}{uuid4().hex[:12]}"


class CachedParts:
    """What is encoded of an entry that is not complete: entries of their own, by their first
    sample's number."""

    def __init__(self, cache: FeatureCache, description: Mapping[str, Any]) -> None:
        self.cache, self.description = cache, description

    def load(self) -> Iterator[StoredFeatures]:
        """Yield the parts, from the first sample on without a gap."""
        start = 0
        while (part := self.cache.load(self._describe(start))) is not None:
            yield part
            start += len(part.pooled)

    def save(self, start: int, part: StoredFeatures) -> None:
        """Store a part; where that fails, nothing is lost but time."""
        with suppress(FusionZooError):
            self.cache.save(self._describe(start), part)

    def remove(self) -> None:
        """Remove all parts."""
        start = 0
        for part in self.load():
            self.cache.remove(self._describe(start))
            start += len(part.pooled)

    def _describe(self, start: int) -> dict[str, Any]:
        return {**self.description, "unfinished_from": start}


def _write_entry(
    folder: Path, key: str, description: Mapping[str, Any], stored: StoredFeatures
) -> None:
    arrays = dict(zip(FILES, stored, strict=True))
    digests = {}
    for name, array in arrays.items():
        data = array.contiguous().flatten().view(torch.uint8).numpy().data
        digests[name] = hashlib.sha256(data).hexdigest()
        _write(folder / f"{name}.bin", data)
    about = {
        "key": key,
        "description": description,
        "arrays": {name: [str(x.dtype)[6:], list(x.shape)] for name, x in arrays.items()},
        "files": digests,
    }
    about = json.loads(json.dumps(about, default=str))
    _write(folder / ABOUT, json.dumps({**about, DIGEST: key_of(about)}, indent=1).encode())


def _read(folder: Path) -> StoredFeatures:
    """Map an entry, whose files are verified unless this process did so before."""
    about, signature = _read_about(folder, folder.name), _signature(folder)
    known = _mapped.get(folder)
    if known is not None and known[0] == signature:
        return known[1]
    stored = _map_files(folder, about)
    for name, array in zip(FILES, stored, strict=True):
        data = array.flatten().view(torch.uint8).numpy().data
        if hashlib.sha256(data).hexdigest() != about["files"][name]:
            raise _Damaged(f"{folder / name}.bin is damaged: its sha256 is another one")
    _mapped[folder] = signature, stored
    return stored


def _read_about(folder: Path, key: str) -> dict[str, Any]:
    """Return what describes an entry, as it was written."""
    path = folder / ABOUT
    try:
        about = json.loads(path.read_bytes())
        digest = about.pop(DIGEST)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _Damaged(f"{path} is damaged: {one_line(error)}") from None
    if digest != key_of(about):
        raise _Damaged(f"{path} is damaged: its sha256 is another one")
    if about.get("key") != key:
        raise _Damaged(f"{path} is of another entry, {about.get('key')}")
    return dict(about)


def _signature(folder: Path) -> Signature:
    states = [(folder / f"{name}.bin").stat() for name in FILES]
    return tuple((state.st_ino, state.st_size, state.st_mtime_ns) for state in states)


def _map_files(folder: Path, about: Mapping[str, Any]) -> StoredFeatures:
    return StoredFeatures(*(_map(folder / f"{n}.bin", *about["arrays"][n]) for n in FILES))


def _map(path: Path, dtype: str, shape: list[int]) -> Tensor:
    torch_dtype = getattr(torch, dtype)
    size, expected = path.stat().st_size, math.prod(shape) * torch_dtype.itemsize
    if size != expected:
        raise _Damaged(f"{path} is damaged: it has {size:,} bytes instead of {expected:,}")
    if not size:
        return torch.zeros(shape, dtype=torch_dtype)
    # Copy on write: torch has no read-only tensors, and the file must never change.
    mapped = np.memmap(path, dtype=np.uint8, mode="c")
    return torch.from_numpy(mapped).view(torch_dtype).reshape(shape)


def _last_write(part: Path) -> float:
    """Return when a part or a file in it was written last, in seconds of the clock; 0: it went."""
    times = [0.0]
    with suppress(OSError):  # another process renamed or removed it
        times.append(part.lstat().st_mtime)
        times += [path.lstat().st_mtime for path in part.iterdir()]
    return max(times)


def _size(path: Path) -> int:
    """Return the bytes of a file, or of those in a folder that are there."""
    total = 0
    for file in path.iterdir() if path.is_dir() else [path]:
        with suppress(OSError):
            total += file.lstat().st_size
    return total


def _write(path: Path, data: Any) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def feature_cache() -> FeatureCache:
    """Return the cache in $FUSIONZOO_CACHE, else in ~/.cache/fusionzoo."""
    return FeatureCache(cache_root() / "features")


def load_features(description: Mapping[str, Any]) -> StoredFeatures:
    """Map cached features into memory; what this process has mapped outlives its entry."""
    cache = feature_cache()
    if (stored := cache.load(description)) is not None:
        return stored
    if (known := _mapped.get(cache.root / key_of(description))) is not None:
        return known[1]
    raise FusionZooError(
        f"features {key_of(description)} are gone from {cache.root}: run again to compute them"
    )
