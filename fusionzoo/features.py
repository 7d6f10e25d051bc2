"""Features of frozen encoders: computed once per data set, kept in a memory-mapped cache."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fusionzoo.datasets import Collate, PairedDataset
from fusionzoo.datasets.arrays import ArrayItem
from fusionzoo.datasets.audio import Segment
from fusionzoo.datasets.media import decode
from fusionzoo.encoders import Encoder, Processor
from fusionzoo.errors import FusionZooError, one_line
from fusionzoo.files import cache_root, cannot_write
from fusionzoo.plugins import code_digest
from fusionzoo.progress import progress_bar
from fusionzoo.structures import Audio, Batch, Features
from fusionzoo.worker_memory import make_loader

FORMAT = 5  # of an entry; also raised when an encoder or processor computes something else
LIBRARIES = ("torch", "torchvision", "torchaudio", "timm", "transformers")


class StoredFeatures(NamedTuple):
    """Features of one modality of N samples; a sample without tokens lacks the modality."""

    pooled: Tensor  # (N, D) float32 or bfloat16
    tokens: Tensor  # (sum of T, D), ragged: of sample i offsets[i] to offsets[i + 1]
    offsets: Tensor  # (N + 1,) int64

    @property
    def present(self) -> Tensor:
        """Whether each sample has the modality, bool (N,)."""
        return self.offsets.diff() > 0

    @property
    def padded_bytes(self) -> int:
        """The memory of all tokens in single precision, padded to the most of a sample."""
        longest = int(self.offsets.diff().max()) if len(self.pooled) else 0
        return 4 * len(self.pooled) * longest * self.tokens.shape[1]

    def take(self, rows: Tensor, with_tokens: bool = True) -> Features:
        """Return some samples, padded: rows (..., B) -> Features of (..., B, T, D), ...

        With `with_tokens` false the pooled vector is the only token.
        """
        pooled = self.pooled[rows].float()
        start, stop = self.offsets[rows], self.offsets[rows + 1]
        if not with_tokens:
            return Features(pooled[..., None, :], (stop > start)[..., None], pooled)
        index = start[..., None] + torch.arange(max(1, int((stop - start).max())))
        mask = index < stop[..., None]
        tokens = self.tokens[index.clamp(max=len(self.tokens) - 1)].float()
        return Features(tokens.masked_fill(~mask[..., None], 0), mask, pooled)

    def subset(self, rows: Tensor) -> StoredFeatures:
        """Return some samples, in memory."""
        start, stop = self.offsets[rows], self.offsets[rows + 1]
        counts = stop - start
        offsets = F.pad(counts.cumsum(0), (1, 0))
        index = torch.arange(int(offsets[-1])) + (start - offsets[:-1]).repeat_interleave(counts)
        return StoredFeatures(self.pooled[rows], self.tokens[index], offsets)


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
    amp: torch.dtype | None = None,
    processor: Processor | None = None,
    after_batch: Callable[[Features], None] | None = None,
    progress: bool = True,
) -> StoredFeatures:
    """Run one encoder over the samples that have its modality, in batches of similar lengths.

    View 0 is prepared as in evaluation; each further view as in training, with an augmentation of
    its own. `max_tokens` averages neighbouring tokens down to that many. The longest samples come
    first; `after_batch` is called with the features of each batch. `amp` is the precision of
    autocast, and `processor` stands in for the encoder's. The global generators stay as they are.
    """
    name, device = encoder.modality, device or torch.device("cpu")
    samples = dataset.only(name)
    collate = Collate({name: processor or encoder.loader_processor(train=view > 0)})
    loader = _longest_first(samples, collate, batch_size, view, num_workers)
    row_of = {sample_id: row for row, sample_id in enumerate(samples.ids)}
    pooled = torch.zeros(len(samples), encoder.dim, dtype=dtype)
    tokens = [torch.zeros(0, encoder.dim, dtype=dtype)] * len(samples)
    encoder = encoder.to(device).eval()
    desc = f"encode {name}" + (f", view {view}" if view else "")
    bar = progress_bar(total=len(samples), desc=desc, unit="sample", disable=not progress)
    for batch in loader:
        present = batch.present[:, 0].tolist()
        ids = [sample_id for sample_id, has in zip(batch.ids, present, strict=True) if has]
        if ids:
            features = _encode_present(encoder, batch, device, amp)
            for sample_id, own_tokens, mask, vector in zip(ids, *features, strict=True):
                pooled[row_of[sample_id]] = vector
                tokens[row_of[sample_id]] = shorten(own_tokens[mask], max_tokens).to(dtype)
            if after_batch is not None:
                after_batch(features)
        bar.update(len(batch.ids))
    bar.close()
    _warn_of_failures(samples, name)
    offsets = F.pad(torch.tensor([len(x) for x in tokens]).cumsum(0), (1, 0))
    return StoredFeatures(pooled, torch.cat(tokens), offsets)


def _longest_first(
    samples: PairedDataset, collate: Collate, batch_size: int, view: int, num_workers: int
) -> DataLoader[Batch]:
    """Load all samples, the longest first; those of a further view get a seed for augmentation."""
    rows = [(row, 1 + row + view * len(samples) if view else 0) for row in samples.by_length()]
    batches = [rows[at : at + batch_size] for at in range(0, len(rows), batch_size)]
    return make_loader(samples, batches, collate, num_workers=num_workers)


def _warn_of_failures(samples: PairedDataset, name: str) -> None:
    if failures := samples.failures():
        first_id = failures[0][0]
        print(f"warning: {len(failures)} values of {name} could not be decoded, such as {first_id}")


def _encode_present(
    encoder: Encoder, batch: Batch, device: torch.device, amp: torch.dtype | None
) -> Features:
    """Encode the rows that have the only modality of a batch; return features on the CPU."""
    raw, present = batch.inputs[encoder.modality], batch.present[:, 0]
    assert isinstance(raw, dict)
    inputs = {key: x[present].to(device) for key, x in raw.items()}
    with torch.autocast(device.type, dtype=amp, enabled=amp is not None):
        return Features(*(x.cpu() for x in encoder(inputs)))


def shorten(tokens: Tensor, max_tokens: int | None) -> Tensor:
    """Average neighbouring tokens (T, D) down to at most `max_tokens`."""
    if max_tokens is None or len(tokens) <= max_tokens:
        return tokens
    return F.adaptive_avg_pool1d(tokens.T[None], max_tokens)[0].T


# ---- descriptions, whose hashes are the keys of the cache


def describe(encoder: Encoder, dataset: PairedDataset, **options: Any) -> dict[str, Any]:
    """Return everything that determines the features; its hash is the key of the cache entry."""
    spec = {key: value for key, value in encoder.spec.items() if key not in ("freeze", "weights")}
    if encoder.augmentation is not None:  # of further views, and of what trained the encoder
        spec["augmentation"] = encoder.augmentation.note
    code = code_digest(type(encoder))
    if code is not None:
        spec["code"] = code
    if encoder.checkpoint_settings:
        spec["checkpoint_settings"] = dict(encoder.checkpoint_settings)
    return {
        "format": FORMAT,
        "data": dataset.source,
        "modality": encoder.modality,
        "samples": fingerprint(dataset, encoder.modality),
        "encoder": json.loads(json.dumps(spec, default=str)),
        "weights": weights_hash(encoder),
        "versions": {name: version(name) for name in LIBRARIES},
        **options,
    }


def key_of(description: Mapping[str, Any] | Sequence[Any]) -> str:
    """Return the hash of a description."""
    text = json.dumps(description, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def weights_hash(module: nn.Module) -> str:
    """Return the hash of all parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _decoded_bytes(kind: str, value: Any) -> bytes:
    """Return the contents of an image or clip in memory; of one that cannot be read, why."""
    try:
        decoded = decode(kind, value)
    except FusionZooError as error:
        return str(error).encode()
    items = decoded if isinstance(decoded, list) else [decoded]
    parts = [(x.samples, x.rate) if isinstance(x, Audio) else (x,) for x in items]
    return b"".join(np.asarray(part).tobytes() for item in parts for part in item)


def fingerprint(dataset: PairedDataset, modality: str) -> str:
    """Return the hash of ids and values: contents in memory, size and time of files."""
    digest = hashlib.sha256()
    kind = dataset.modalities[modality]
    for sample_id, value in zip(dataset.ids, dataset.references(modality), strict=True):
        digest.update(f"\0{sample_id}\0".encode())
        for part in value_bytes(value, kind):
            digest.update(part)
    return digest.hexdigest()


def value_bytes(value: Any, kind: str, root: Path | None = None) -> Iterator[bytes]:
    """Yield what identifies an undecoded value; of several images or clips, that of each.

    Of a file its size and time, and its path, from `root` on if that is given.
    """
    if isinstance(value, list) and kind in ("image", "audio"):
        for number, item in enumerate(value):
            yield f"\0{number}\0".encode()
            yield from value_bytes(item, kind, root)
    elif isinstance(value, Segment):
        yield f"{value.start} {value.end} {value.frames} ".encode()
        yield from value_bytes(value.source, kind, root)
    elif isinstance(value, Path | ArrayItem):
        path = value if isinstance(value, Path) else value.path
        stat = path.stat() if path.is_file() else None
        place = str(value) if root is None else str(value).removeprefix(f"{root}/")
        yield f"{place} {stat and (stat.st_size, stat.st_mtime_ns)}".encode()
    elif isinstance(value, Audio):
        yield f"{value.rate}".encode() + value.samples.numpy().tobytes()
    elif isinstance(value, Tensor | np.ndarray):
        yield np.ascontiguousarray(value).tobytes()
    elif isinstance(value, tuple) or hasattr(value, "getbands"):  # a clip, or a PIL image
        yield _decoded_bytes(kind, value)
    else:
        yield repr(value).encode()


FILES = StoredFeatures._fields
ABOUT = "about.json"  # describes an entry
DIGEST = "sha256"  # of a file, and of the rest of `about.json`
KEY = "[0-9a-f]{24}"  # what `key_of` returns
PART = ".part-"  # in the name of what is being written or removed
PART_NAME = rf"{KEY}{re.escape(PART)}(\d+-)?[0-9a-f]{{8,12}}"
ABANDONED = 86_400  # seconds without a write after which a part is of a process that was killed

Signature = tuple[tuple[int, int, int], ...]  # of an entry's files: inode, size, time of change


@dataclass(frozen=True)
class CacheEntry:
    """An entry as `fusionzoo cache` lists it."""

    key: str
    metadata: dict[str, Any] | None  # None: damaged, or of another version
    size: int  # bytes
    used: float  # time of the last use, in seconds since 1970


class _Damaged(Exception):
    """A file of an entry, and what is wrong with it."""


# What this process has verified and mapped. A mapping outlives the removal of its entry.
_mapped: dict[Path, tuple[Signature, StoredFeatures]] = {}


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
        self, description: Mapping[str, Any], compute: Callable[[], StoredFeatures]
    ) -> StoredFeatures:
        """Load an entry, or compute and save it."""
        stored = self.load(description)
        return self.save(description, compute()) if stored is None else stored

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
