"""Frozen encoders run once: what they say of all samples, and what it is known by.

Shapes: `N` samples, `T` tokens, `D` width.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from fusionzoo.datasets import Collate, PairedDataset
from fusionzoo.encoders import Encoder
from fusionzoo.sources import code_digest
from fusionzoo.structures import Audio, Features

FORMAT = 2  # of an entry; also raise it when what an encoder or processor computes changes
LIBRARIES = ("torch", "torchvision", "torchaudio", "timm", "transformers")


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
    code = code_digest(type(encoder))
    if code is not None:
        given["code"] = code
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


def key_of(description: Mapping[str, Any] | Sequence[Any]) -> str:
    """Hash a description: equal keys, equal contents."""
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
