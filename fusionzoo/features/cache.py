"""The feature cache: memory-mapped files under the hash of what determines their contents."""

from __future__ import annotations

import json
import os
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

from fusionzoo.errors import FusionZooError
from fusionzoo.files import cache_root, cannot_write, is_running

from .encode import StoredFeatures, key_of

FILES = StoredFeatures._fields


@dataclass(frozen=True)
class CacheEntry:
    """An entry as `fusionzoo cache` lists it."""

    key: str
    metadata: dict[str, Any]
    size: int  # bytes
    used: float  # time of the last use, in seconds since 1970


class FeatureCache:
    """A folder of entries that are complete or absent, whatever other processes do meanwhile.

    An entry is written under a temporary name and renamed once complete; the first of several
    writers wins, and the others read its entry. `prune` removes what killed writers left.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def load(self, description: Mapping[str, Any]) -> StoredFeatures | None:
        """Map an entry into memory; None if there is none. A damaged one is removed."""
        folder = self.root / key_of(description)
        if not (folder / "about.json").is_file():
            return None
        metadata = json.loads((folder / "about.json").read_text())
        for name in FILES:
            path = folder / f"{name}.bin"
            if not path.is_file() or path.stat().st_size != metadata["bytes"][name]:
                print(f"warning: {path} is damaged; its entry is removed and computed again")
                shutil.rmtree(folder)
                return None
        with suppress(OSError):  # a cache that may only be read
            os.utime(folder / "about.json")
        arrays = (_map(folder / f"{name}.bin", *metadata["arrays"][name]) for name in FILES)
        return StoredFeatures(*arrays)

    def save(self, description: Mapping[str, Any], stored: StoredFeatures) -> StoredFeatures:
        """Write an entry and return it mapped; one that exists already is kept."""
        folder = self.root / key_of(description)
        part = self.root / f"{folder.name}.part-{os.getpid()}-{uuid4().hex[:8]}"
        try:
            part.mkdir(parents=True)
            arrays = dict(zip(FILES, stored, strict=True))
            for name, array in arrays.items():
                _write(part / f"{name}.bin", array.contiguous().flatten().view(torch.uint8).numpy())
            metadata = {
                "description": description,
                "arrays": {n: [str(a.dtype)[6:], list(a.shape)] for n, a in arrays.items()},
                "bytes": {name: (part / f"{name}.bin").stat().st_size for name in FILES},
            }
            _write(part / "about.json", json.dumps(metadata, indent=1, default=str).encode())
        except OSError as error:
            shutil.rmtree(part, ignore_errors=True)
            raise cannot_write(self.root, error) from error
        try:
            part.rename(folder)
        except OSError:  # another writer was first
            shutil.rmtree(part)
        mapped = self.load(description)
        assert mapped is not None
        return mapped

    def has(self, description: Mapping[str, Any]) -> bool:
        """Whether there is such an entry."""
        return (self.root / key_of(description) / "about.json").is_file()

    def get(
        self, description: Mapping[str, Any], compute: Callable[[], StoredFeatures]
    ) -> StoredFeatures:
        """Load an entry, or compute and save it."""
        stored = self.load(description)
        return self.save(description, compute()) if stored is None else stored

    def entries(self) -> Iterator[CacheEntry]:
        """Yield all complete entries, the most recently used first."""
        entries = []
        for path in self.root.glob("*/about.json"):
            if ".part-" in path.parent.name:
                continue
            size = sum(file.stat().st_size for file in path.parent.iterdir())
            metadata = json.loads(path.read_text())
            entries.append(CacheEntry(path.parent.name, metadata, size, path.stat().st_mtime))
        yield from sorted(entries, key=lambda entry: -entry.used)

    def prune(self, keep_days: float | None = None, keep_bytes: int | None = None) -> int:
        """Remove what killed writers left and entries that are too old; return the bytes freed.

        Too old are those unused for `keep_days`, and the least recently used ones beyond
        `keep_bytes` in total.
        """
        freed = 0
        for part in self.root.glob("*.part-*"):
            if not is_running(int(part.name.rpartition(".part-")[2].split("-")[0])):
                freed += sum(file.stat().st_size for file in part.iterdir())
                shutil.rmtree(part)
        kept_bytes = 0
        for entry in self.entries():
            old = keep_days is not None and time.time() - entry.used >= keep_days * 86400
            large = keep_bytes is not None and kept_bytes + entry.size > keep_bytes
            if old or large:
                shutil.rmtree(self.root / entry.key)
                freed += entry.size
            else:
                kept_bytes += entry.size
        return freed


def _map(path: Path, dtype: str, shape: list[int]) -> Tensor:
    torch_dtype = getattr(torch, dtype)
    if not path.stat().st_size:
        return torch.zeros(shape, dtype=torch_dtype)
    # Copy on write: torch has no read-only tensors, and the file must never change.
    mapped = np.memmap(path, dtype=np.uint8, mode="c")
    return torch.from_numpy(mapped).view(torch_dtype).reshape(shape)


def _write(path: Path, data: Any) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def feature_cache() -> FeatureCache:
    """Return the cache in $FUSIONZOO_CACHE, else in ~/.cache/fusionzoo."""
    return FeatureCache(cache_root() / "features")


def load_features(description: Mapping[str, Any]) -> StoredFeatures:
    """Map cached features into memory."""
    stored = feature_cache().load(description)
    if stored is None:
        raise FusionZooError(
            f"features {key_of(description)} are gone from {feature_cache().root}:"
            " run again to compute them"
        )
    return stored
