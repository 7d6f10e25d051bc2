"""Features in memory-mapped files, found again by what made them."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

from fusionzoo.errors import FusionZooError
from fusionzoo.files import cache_root, cannot_write

from .encode import Stored, key_of

FILES = Stored._fields


@dataclass(frozen=True)
class CacheEntry:
    """What `fusionzoo cache` shows."""

    key: str
    about: dict[str, Any]
    size: int  # bytes
    used: float  # seconds since the epoch


class FeatureCache:
    """A folder of entries; each is complete or not there, whoever writes or dies meanwhile.

    An entry is written under a name of its own and renamed when whole; the first of several
    writers wins, and the others read what it wrote. What a killed writer leaves behind is removed
    by `prune`.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def load(self, description: Mapping[str, Any]) -> Stored | None:
        """Map an entry into memory; None where there is none. A damaged one is removed."""
        folder = self.root / key_of(description)
        if not (folder / "about.json").is_file():
            return None
        about = json.loads((folder / "about.json").read_text())
        for name in FILES:
            path = folder / f"{name}.bin"
            if not path.is_file() or path.stat().st_size != about["bytes"][name]:
                print(f"warning: {path} is damaged; its entry is removed and made again")
                shutil.rmtree(folder)
                return None
        os.utime(folder / "about.json")
        return Stored(*(_map(folder / f"{name}.bin", *about["arrays"][name]) for name in FILES))

    def save(self, description: Mapping[str, Any], stored: Stored) -> Stored:
        """Write an entry and return it mapped; an entry that is there already stays."""
        folder = self.root / key_of(description)
        part = self.root / f"{folder.name}.part-{os.getpid()}-{uuid4().hex[:8]}"
        try:
            part.mkdir(parents=True)
            arrays = dict(zip(FILES, stored, strict=True))
            for name, array in arrays.items():
                _write(part / f"{name}.bin", array.contiguous().flatten().view(torch.uint8).numpy())
            about = {
                "description": description,
                "arrays": {n: [str(a.dtype)[6:], list(a.shape)] for n, a in arrays.items()},
                "bytes": {name: (part / f"{name}.bin").stat().st_size for name in FILES},
            }
            _write(part / "about.json", json.dumps(about, indent=1, default=str).encode())
        except OSError as error:
            shutil.rmtree(part, ignore_errors=True)
            raise cannot_write(self.root, error) from error
        try:
            part.rename(folder)
        except OSError:  # another writer was first
            shutil.rmtree(part)
        found = self.load(description)
        assert found is not None
        return found

    def has(self, description: Mapping[str, Any]) -> bool:
        """Whether an entry is there."""
        return (self.root / key_of(description) / "about.json").is_file()

    def get(self, description: Mapping[str, Any], make: Callable[[], Stored]) -> Stored:
        """Load an entry, or make and store it."""
        found = self.load(description)
        return self.save(description, make()) if found is None else found

    def entries(self) -> Iterator[CacheEntry]:
        """Yield all whole entries, the one that was used last first."""
        found = []
        for path in self.root.glob("*/about.json"):
            if ".part-" in path.parent.name:
                continue
            size = sum(file.stat().st_size for file in path.parent.iterdir())
            about = json.loads(path.read_text())
            found.append(CacheEntry(path.parent.name, about, size, path.stat().st_mtime))
        yield from sorted(found, key=lambda one: -one.used)

    def prune(self, keep_days: float | None = None, keep_bytes: int | None = None) -> int:
        """Remove entries unused for `keep_days`, then the least recently used beyond `keep_bytes`,
        and what killed writers left; return the bytes that are free now."""
        freed = 0
        for part in self.root.glob("*.part-*"):
            if not _alive(int(part.name.rpartition(".part-")[2].split("-")[0])):
                freed += sum(file.stat().st_size for file in part.iterdir())
                shutil.rmtree(part)
        kept = 0
        for entry in self.entries():
            old = keep_days is not None and time.time() - entry.used >= keep_days * 86400
            large = keep_bytes is not None and kept + entry.size > keep_bytes
            if old or large:
                shutil.rmtree(self.root / entry.key)
                freed += entry.size
            else:
                kept += entry.size
        return freed


def _map(path: Path, dtype: str, shape: list[int]) -> Tensor:
    kind = getattr(torch, dtype)
    if not path.stat().st_size:
        return torch.zeros(shape, dtype=kind)
    # Copy on write: torch has no read-only tensors, and the file must never change.
    mapped = np.memmap(path, dtype=np.uint8, mode="c")
    return torch.from_numpy(mapped).view(kind).reshape(shape)


def _write(path: Path, data: Any) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def feature_cache() -> FeatureCache:
    """Return the cache in $FUSIONZOO_CACHE, else in ~/.cache/fusionzoo."""
    return FeatureCache(cache_root() / "features")


def load_features(description: Mapping[str, Any]) -> Stored:
    """Map cached features into memory."""
    stored = feature_cache().load(description)
    if stored is None:
        raise FusionZooError(
            f"features {key_of(description)} are gone from {feature_cache().root}:"
            " run again to make them anew"
        )
    return stored
