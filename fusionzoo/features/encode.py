"""Encode a data set with one encoder, and describe all that its features depend on."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusionzoo.datasets import Collate, PairedDataset
from fusionzoo.datasets.loader import make_loader
from fusionzoo.datasets.media.arrays import ArrayItem
from fusionzoo.datasets.media.audio import Segment
from fusionzoo.datasets.media.decode import decode
from fusionzoo.datasets.media.ranges import range_of
from fusionzoo.datasets.tables.table import check_unedited
from fusionzoo.encoders import Encoder, Processor
from fusionzoo.errors import FusionZooError
from fusionzoo.ground.plugins import code_digest
from fusionzoo.ground.progress import progress_bar
from fusionzoo.structures import Audio, Batch, Features

FORMAT = 6  # of an entry; also raised when an encoder or processor computes something else
# Settings that decide which weights an encoder has, or which of them learn: `weights` of an entry
# has their digest.
OF_WEIGHTS = ("freeze", "weights", "pretrained", "match", "prefix", "init")
LIBRARIES = ("torch", "torchvision", "timm", "transformers")
SAVE_EVERY = 60.0  # seconds of encoding after which what is encoded so far is stored


class StoredFeatures(NamedTuple):
    """Features of one modality of N samples; a sample without tokens lacks the modality."""

    pooled: Tensor  # (N, D) float32
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
        pooled = self.pooled[rows]
        start, stop = self.offsets[rows], self.offsets[rows + 1]
        if not with_tokens:
            return Features(pooled[..., None, :], (stop > start)[..., None], pooled)
        index = start[..., None] + torch.arange(max(1, int((stop - start).max())))
        mask = index < stop[..., None]
        tokens = self.tokens[index.clamp(max=len(self.tokens) - 1)]
        return Features(tokens.masked_fill(~mask[..., None], 0), mask, pooled)

    def subset(self, rows: Tensor) -> StoredFeatures:
        """Return some samples, in memory."""
        start, stop = self.offsets[rows], self.offsets[rows + 1]
        counts = stop - start
        offsets = F.pad(counts.cumsum(0), (1, 0))
        index = torch.arange(int(offsets[-1])) + (start - offsets[:-1]).repeat_interleave(counts)
        return StoredFeatures(self.pooled[rows], self.tokens[index], offsets)


class NotCacheable(Exception):
    """Why the features of a frozen encoder cannot stand in for its inputs."""


class PartStore(Protocol):
    """Where an encoding that is not finished keeps features, in the order of encoding."""

    def load(self) -> Iterator[StoredFeatures]:
        """Yield what is stored, from the first sample on without a gap."""
        ...

    def save(self, start: int, part: StoredFeatures) -> None:
        """Store the features of the samples from number `start` on."""
        ...


@dataclass(frozen=True, kw_only=True)
class Compute:
    """How `encode` computes; only `amp` changes the features."""

    batch_size: int = 64
    num_workers: int = 0
    device: torch.device = torch.device("cpu")
    amp: torch.dtype | None = None  # precision of autocast
    progress: bool = True  # shown on the console


COMPUTE = Compute()


@torch.no_grad()
def encode(
    encoder: Encoder,
    dataset: PairedDataset,
    compute: Compute = COMPUTE,
    *,
    max_tokens: int | None = None,
    processor: Processor | None = None,
    after_batch: Callable[[Features], None] | None = None,
    parts: PartStore | None = None,
) -> StoredFeatures:
    """Run one encoder over the samples that have its modality, in batches of similar lengths.

    `max_tokens` averages neighbouring tokens down to that many. The longest samples come first;
    `after_batch` is called with the features of each batch, and `processor` stands in for the
    encoder's. The global generators stay as they are. With `parts`, what a call that was stopped
    had encoded is not encoded again.
    """
    name, size = encoder.modality, compute.batch_size
    samples = dataset.only(name)
    order = samples.by_length()
    row_of = {sample_id: row for row, sample_id in enumerate(samples.ids)}
    encoded = _Encoded(order, torch.zeros(len(samples), encoder.dim), parts)
    collate = Collate({name: processor or encoder.loader_processor(train=False)})
    rest = [(row, 0) for row in order[encoded.done :]]
    batches = [rest[at : at + size] for at in range(0, len(rest), size)]
    loader = make_loader(samples, batches, collate, num_workers=compute.num_workers)
    encoder = encoder.to(compute.device).eval()
    total, hidden, desc = len(samples), not compute.progress, f"encode {name}"
    bar = progress_bar(total=total, initial=encoded.done, desc=desc, unit="sample", disable=hidden)
    with bar, encoded:
        for batch in loader:
            present = batch.present[:, 0].tolist()
            ids = [sample_id for sample_id, has in zip(batch.ids, present, strict=True) if has]
            if ids:
                features = _encode_present(encoder, batch, compute)
                for sample_id, tokens, mask, vector in zip(ids, *features, strict=True):
                    encoded.put(row_of[sample_id], vector, shorten(tokens[mask], max_tokens))
            bar.update(len(batch.ids))
            encoded.count(len(batch.ids))
            if ids and after_batch is not None:
                after_batch(features)
    if failures := samples.failures():
        first_id = failures[0][0]
        print(f"warning: {len(failures)} values of {name} could not be decoded, such as {first_id}")
    return encoded.take(range(len(samples)))


class _Encoded:
    """Features of samples as they are encoded; what an exception stops is stored.

    Shapes: pooled (N, D), zeros to begin with.
    """

    def __init__(self, order: Sequence[int], pooled: Tensor, parts: PartStore | None) -> None:
        self.order, self.pooled, self.parts = order, pooled, parts
        self.tokens = [pooled[:0]] * len(pooled)
        self.done, self.saved_at = 0, time.monotonic()
        for part in () if parts is None else parts.load():
            for place, (start, stop) in enumerate(pairwise(part.offsets.tolist())):
                row = order[self.done + place]
                self.put(row, part.pooled[place], part.tokens[start:stop])
            self.done += len(part.pooled)
        self.saved = self.done

    def put(self, row: int, pooled: Tensor, tokens: Tensor) -> None:
        self.pooled[row] = pooled
        self.tokens[row] = tokens.to(self.pooled.dtype)

    def count(self, samples: int) -> None:
        """Say that this many more samples are encoded; they are stored if it is time."""
        self.done += samples
        if time.monotonic() - self.saved_at > SAVE_EVERY:
            self._save()

    def _save(self) -> None:
        if self.parts is not None and self.done > self.saved:
            self.parts.save(self.saved, self.take(self.order[self.saved : self.done]))
        self.saved, self.saved_at = self.done, time.monotonic()

    def __enter__(self) -> None: ...

    def __exit__(self, stopped_by: type[BaseException] | None, *_: object) -> None:
        if stopped_by is not None and not issubclass(stopped_by, NotCacheable):
            self._save()

    def take(self, rows: Sequence[int]) -> StoredFeatures:
        """Return the features of some samples."""
        tokens = [self.tokens[row] for row in rows]
        offsets = F.pad(torch.tensor([len(x) for x in tokens]).cumsum(0), (1, 0))
        return StoredFeatures(self.pooled[list(rows)], torch.cat(tokens), offsets)


def _encode_present(encoder: Encoder, batch: Batch, compute: Compute) -> Features:
    """Encode the rows that have the only modality of a batch; return features on the CPU."""
    raw, present = batch.inputs[encoder.modality], batch.present[:, 0]
    assert isinstance(raw, dict)
    inputs = {key: x[present].to(compute.device) for key, x in raw.items()}
    with torch.autocast(compute.device.type, dtype=compute.amp, enabled=compute.amp is not None):
        return Features(*(x.cpu() for x in encoder(inputs)))


def shorten(tokens: Tensor, max_tokens: int | None) -> Tensor:
    """Average neighbouring tokens (T, D) down to at most `max_tokens`."""
    if max_tokens is None or len(tokens) <= max_tokens:
        return tokens
    return F.adaptive_avg_pool1d(tokens.T[None], max_tokens)[0].T


# ---- descriptions, whose hashes are the keys of the cache


def describe(encoder: Encoder, dataset: PairedDataset, **options: Any) -> dict[str, Any]:
    """Return everything that determines the features; its hash is the key of the cache entry."""
    spec = {key: value for key, value in encoder.spec.items() if key not in OF_WEIGHTS}
    if encoder.augmentation is not None:  # of what trained the encoder
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
    check_unedited(dataset, "looked up in the cache of features")
    digest = hashlib.sha256()
    kind, image_range = dataset.modalities[modality], range_of(dataset.image_range, modality)
    if image_range is not None:
        digest.update(f"{image_range}".encode())
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
