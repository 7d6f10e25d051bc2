"""Frozen encoders run once: their features in memory-mapped files, found again by what made them.

Shapes: `N` samples, `T` tokens, `D` width.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from ..datasets import Collate, PairedDataset
from ..encoders import Encoder
from ..errors import FusionZooError
from ..structures import Audio, Features

FORMAT = 1  # of an entry; also raise it when what an encoder or processor computes changes
LIBRARIES = ("torch", "torchvision", "torchaudio", "timm", "transformers")
FILES = ("pooled", "tokens", "offsets")


class Stored(NamedTuple):
    """One modality of N samples; a sample without tokens lacks it."""

    pooled: Tensor  # (N, D) float32 or bfloat16
    tokens: Tensor  # (sum of T, D), ragged: sample i owns offsets[i] to offsets[i + 1]
    offsets: Tensor  # (N + 1,) int64

    @property
    def present(self) -> Tensor:
        """Which samples have the modality, (N,)."""
        return self.offsets.diff() > 0

    def take(self, rows: Tensor, with_tokens: bool = True) -> Features:
        """Return some samples, padded: rows (..., B) -> Features of (..., B, T, D), ...

        Without tokens the pooled vector stands in as the only one.
        """
        pooled = self.pooled[rows].float()
        start, stop = self.offsets[rows], self.offsets[rows + 1]
        if not with_tokens:
            return Features(pooled[..., None, :], (stop > start)[..., None], pooled)
        place = start[..., None] + torch.arange(max(1, int((stop - start).max())))
        mask = place < stop[..., None]
        tokens = self.tokens[place.clamp(max=len(self.tokens) - 1)].float()
        return Features(tokens.masked_fill(~mask[..., None], 0), mask, pooled)

    def subset(self, rows: Tensor) -> Stored:
        """Return some samples, in memory."""
        start, stop = self.offsets[rows], self.offsets[rows + 1]
        counts = stop - start
        offsets = F.pad(counts.cumsum(0), (1, 0))
        place = torch.arange(int(offsets[-1])) + (start - offsets[:-1]).repeat_interleave(counts)
        return Stored(self.pooled[rows], self.tokens[place], offsets)


class Scaler(NamedTuple):
    """Bring features to mean 0 and deviation 1, by what the training split has."""

    pooled: tuple[Tensor, Tensor]  # mean and deviation, (D,)
    tokens: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, stored: Stored, rows: Tensor, with_tokens: bool = True) -> Scaler:
        """Measure the samples of `rows` that have the modality."""
        there = rows[stored.present[rows]]
        pooled = _spread(stored.pooled[there])
        return cls(pooled, _spread(stored.subset(there).tokens) if with_tokens else pooled)

    def __call__(self, features: Features) -> Features:
        """Scale; what is not there is zero."""
        tokens = (features.tokens - self.tokens[0]) / self.tokens[1]
        pooled = (features.pooled - self.pooled[0]) / self.pooled[1]
        there = features.mask.any(-1, keepdim=True)
        return Features(
            tokens.masked_fill(~features.mask[..., None], 0),
            features.mask,
            pooled.masked_fill(~there, 0),
        )


def _spread(rows: Tensor) -> tuple[Tensor, Tensor]:
    rows = rows.float()
    if not len(rows):
        return torch.zeros(rows.shape[1]), torch.ones(rows.shape[1])
    deviation, mean = torch.std_mean(rows, dim=0, correction=0)
    # A feature that never changes stays where it is.
    return mean, deviation.clamp(min=1e-6)


@torch.no_grad()
def encode(
    encoder: Encoder,
    dataset: PairedDataset,
    *,
    batch_size: int = 64,
    num_workers: int = 0,
    max_tokens: int | None = None,
    dtype: torch.dtype = torch.float32,
    view: int = 0,
    device: torch.device | None = None,
    progress: bool = True,
) -> Stored:
    """Run one encoder over the samples that have its modality; similar lengths meet in a batch.

    `view` 0 prepares samples as in evaluation, a higher one as in training, with its own
    augmentation. `max_tokens` averages neighbouring tokens down to that many.
    """
    name, device = encoder.modality, device or torch.device("cpu")
    alone = dataset.only(name)
    rows = [(row, 1 + row + view * len(alone) if view else 0) for row in alone.by_length()]
    loader = DataLoader(
        alone,
        batch_sampler=[rows[at : at + batch_size] for at in range(0, len(rows), batch_size)],
        collate_fn=Collate({name: encoder.processor(train=view > 0)}),
        num_workers=num_workers,
    )
    number = {key: row for row, key in enumerate(alone.ids)}
    pooled = torch.zeros(len(alone), encoder.dim, dtype=dtype)
    tokens = [torch.zeros(0, encoder.dim, dtype=dtype)] * len(alone)
    encoder = encoder.to(device).eval()
    desc = f"encode {name}, view {view}" if view else f"encode {name}"
    bar = tqdm(total=len(rows), desc=desc, unit="sample", disable=not progress, dynamic_ncols=True)
    for batch in loader:
        there = batch.present[:, 0]
        inputs = {key: x[there].to(device) for key, x in batch.inputs[name].items()}
        keys = [key for key, own in zip(batch.ids, there.tolist(), strict=True) if own]
        if keys:
            found = Features(*(x.cpu() for x in encoder(inputs)))
            for key, own, real, one in zip(keys, *found, strict=True):
                pooled[number[key]] = one
                tokens[number[key]] = shorten(own[real], max_tokens).to(dtype)
        bar.update(len(batch.ids))
    bar.close()
    if failed := alone.failures():
        print(
            f"warning: {len(failed)} values of {name} could not be decoded, such as {failed[0][0]}"
        )
    offsets = F.pad(torch.tensor([len(own) for own in tokens]).cumsum(0), (1, 0))
    return Stored(pooled, torch.cat(tokens), offsets)


def shorten(tokens: Tensor, most: int | None) -> Tensor:
    """Average neighbouring tokens (T, D) down to at most `most`."""
    if most is None or len(tokens) <= most:
        return tokens
    return F.adaptive_avg_pool1d(tokens.T[None], most)[0].T


# ---- what an entry is known by


def describe(encoder: Encoder, dataset: PairedDataset, **how: Any) -> dict[str, Any]:
    """Return everything that the features follow from; its hash is the entry's key."""
    given = {key: value for key, value in encoder.spec.items() if key not in ("freeze", "weights")}
    return {
        "format": FORMAT,
        "data": dataset.source,
        "modality": encoder.modality,
        "samples": fingerprint(dataset, encoder.modality),
        "encoder": json.loads(json.dumps(given, default=str)),
        "weights": weights_hash(encoder),
        "versions": {name: version(name) for name in LIBRARIES},
        **how,
    }


def key_of(description: Mapping[str, Any]) -> str:
    """Hash a description."""
    stable = json.dumps(description, sort_keys=True, default=str)
    return hashlib.sha256(stable.encode()).hexdigest()[:24]


def weights_hash(encoder: Encoder) -> str:
    """Hash every parameter and buffer."""
    digest = hashlib.sha256()
    for name, tensor in sorted(encoder.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(raw.numpy())
    return digest.hexdigest()


def fingerprint(dataset: PairedDataset, modality: str) -> str:
    """Hash ids and values: contents of what is in memory, size and time of files."""
    digest = hashlib.sha256()
    for key, value in zip(dataset.ids, dataset.references(modality), strict=True):
        digest.update(f"\0{key}\0".encode())
        if isinstance(value, Path):
            found = value.stat() if value.is_file() else None
            digest.update(f"{value} {found and (found.st_size, found.st_mtime_ns)}".encode())
        elif isinstance(value, Audio):
            digest.update(f"{value.rate}".encode() + value.samples.numpy().tobytes())
        elif isinstance(value, Tensor | np.ndarray):
            digest.update(np.ascontiguousarray(value).tobytes())
        else:
            digest.update(repr(value).encode())
    return digest.hexdigest()


# ---- the cache


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
            raise FusionZooError(f"cannot write the feature cache {self.root}: {error}") from error
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
