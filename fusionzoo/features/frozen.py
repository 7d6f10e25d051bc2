"""Features of encoders that stay frozen, in place of their inputs: encoded once, read by row."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fusionzoo.datasets import Collate, PairedDataset
from fusionzoo.encoders import WRAPPED, Encoder, Item, Processor, varies
from fusionzoo.errors import FusionZooError
from fusionzoo.features.cache import CachedParts, feature_cache, load_features
from fusionzoo.features.encode import Compute, NotCacheable, StoredFeatures, describe, encode
from fusionzoo.fusion import fusion_info
from fusionzoo.machine.distributed import World, gather
from fusionzoo.model.fusion_model import FusionModel, hide_absent
from fusionzoo.structures import Features

HEARTBEAT = 10.0  # seconds between two signs of life of a process that the others wait for
MEMORY_SHARE = (
    4  # features may take up to 1 / MEMORY_SHARE of the memory, and half of the free disk
)


class SameInTraining(Processor):
    """Prepare as in evaluation; refuse a value that training would prepare in another way."""

    def __init__(self, evaluation: Processor, training: Processor) -> None:
        self.evaluation, self.training = evaluation, training

    def __call__(self, value: Any, generator: torch.Generator | None = None) -> Item:
        return self.items(value)[0]

    def items(self, value: Any, generator: torch.Generator | None = None) -> list[Item]:
        if varies(self.training, value):
            raise NotCacheable("training crops or augments it at random")
        return self.evaluation.items(value)

    def blank(self) -> Item:
        return self.evaluation.blank()

    def collate(self, items: Sequence[Item]) -> Item:
        return self.evaluation.collate(items)


class StoredModality:
    """Reads the cached features of one modality: a data set's reader, and a collate's processor."""

    def __init__(self, description: Mapping[str, Any], rows: Tensor, with_tokens: bool) -> None:
        self.description, self.with_tokens = dict(description), with_tokens
        self.position = {row: number for number, row in enumerate(rows.tolist())}
        self._stored: StoredFeatures | None = None

    @property
    def stored(self) -> StoredFeatures:
        """The features, mapped into memory on first use, in each loader process anew."""
        if self._stored is None:
            self._stored = load_features(self.description)
        return self._stored

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stored": None}

    def holds(self, rows: Tensor) -> bool:
        """Whether rows of the data set's table are all among the features."""
        return self.position.keys() >= set(rows.tolist())

    def read(self, row: int) -> int:
        """Return the position of a row of the data set's table among the features."""
        position = self.position[row]
        if self.stored.offsets[position] == self.stored.offsets[position + 1]:
            raise FusionZooError("it could not be decoded when its features were cached")
        return position

    def __call__(self, value: int, generator: torch.Generator | None = None) -> Item:
        return {"position": torch.tensor(value)}

    def blank(self) -> Item:
        return {"position": torch.tensor(-1)}

    def collate(self, items: Sequence[Item]) -> Features:
        """Return the features of some samples, zeros where one lacks the modality."""
        positions = torch.stack([item["position"] for item in items])
        present = positions >= 0
        if not present.any():
            tokens = torch.zeros(len(items), 1, self.stored.pooled.shape[1])
            return Features(tokens, present[:, None], tokens[:, 0])
        # The first present sample stands in for absent ones, which adds no padding.
        stand_in = positions[present][0]
        features = self.stored.take(positions.where(present, stand_in), self.with_tokens)
        return features if present.all() else hide_absent(features, present)


class FrozenFeatures(NamedTuple):
    """The modalities whose features are cached, and lines that say what was done."""

    modalities: dict[str, StoredModality]
    notes: list[str]

    def view(self, dataset: PairedDataset) -> PairedDataset:
        """Return the same samples; the values of cached modalities are not decoded."""
        return dataset.read_by({name: x.read for name, x in self.modalities.items()})

    def collate(self, collate: Collate) -> Collate:
        """Return a collate that takes stored features, where there are any."""
        return Collate({**collate.processors, **self.modalities}, collate.columns)


@dataclass(frozen=True, kw_only=True)
class Caching:
    """How the features of a run's frozen encoders are cached."""

    mode: Literal["auto", "on"]
    with_tokens: bool  # whether anything reads tokens, not pooled vectors only
    passes: float  # over the training split
    num_workers: int = 0
    amp: torch.dtype | None = None
    world: World = field(default_factory=World)

    def cached(self, encoders: Mapping[str, Encoder], dataset: PairedDataset) -> FrozenFeatures:
        """Encode the samples of the three splits, unless their features are in the cache.

        With `auto` an encoder whose features cannot be cached is left alone; with `on` that is an
        error.
        """
        samples, modalities, notes = _of_three_splits(dataset), {}, []
        start, computed = time.perf_counter(), 0
        for name, encoder in encoders.items():
            try:
                description, is_new = self._store(encoder, samples)
            except NotCacheable as error:
                if self.mode == "on":
                    raise FusionZooError(f"--train.cache_frozen on: {name}: {error}") from error
                notes.append(f"{name}: frozen, but encoded anew in every epoch: {error}")
            else:
                computed += is_new
                modalities[name] = StoredModality(description, samples.rows, self.with_tokens)
        if modalities:
            seconds = time.perf_counter() - start
            done = "encoded once" if computed else "encoded before, and found"
            notes.append(
                f"{', '.join(modalities)}: frozen, features of {len(samples):,} samples {done} in"
                f" {seconds:.1f} s (--train.cache_frozen {self.mode}; in {feature_cache().root})"
            )
        return FrozenFeatures(modalities, notes)

    def _store(self, encoder: Encoder, samples: PairedDataset) -> tuple[dict[str, Any], bool]:
        """Make sure that the cache has an encoder's features; return their description, and
        whether any process computed them."""
        if encoder.spec.get("name") == WRAPPED:
            raise NotCacheable("a wrapped module has no description to find its features by")
        options = {} if self.amp is None else {"amp": str(self.amp)}
        description = _entry_of(encoder, samples, self.with_tokens, **options)
        has_entry = feature_cache().load(description) is not None
        encodes = not has_entry and int(os.environ.get("LOCAL_RANK", self.world.rank)) == 0
        status: tuple[str, str] | None = None
        if encodes:
            status = self._try_to_encode(encoder, samples, description)
        while any(gather(False, self.world)):
            pass  # others still encode: their signs of life are answered
        for kind, text in filter(None, gather(status, self.world)):
            raise FusionZooError(text) if kind == "error" else NotCacheable(text)
        if not has_entry and feature_cache().load(description) is None:
            raise FusionZooError(
                f"process {self.world.rank} does not see the features that process 0 of its machine"
                f" stored in {feature_cache().root}: --train.cache_frozen off, or the same"
                " FUSIONZOO_CACHE for all of a machine"
            )
        return description, any(gather(encodes, self.world))

    def _try_to_encode(
        self, encoder: Encoder, samples: PairedDataset, description: dict[str, Any]
    ) -> tuple[str, str] | None:
        """Encode and store; return what went wrong as ("error" or "skip", reason)."""
        if self.mode == "auto" and self.passes <= 1:
            return "skip", "the run passes over the data once only"
        parts = CachedParts(feature_cache(), description)
        try:
            stored = encode(
                encoder,
                samples,
                Compute(
                    num_workers=self.num_workers,
                    device=self.world.device,
                    amp=self.amp,
                    progress=self.world.main,
                ),
                max_tokens=description["max_tokens"],
                processor=SameInTraining(encoder.processor(False), encoder.loader_processor(True)),
                after_batch=_Watch(self, encoder.dim, len(samples)),
                parts=parts,
            )
        except NotCacheable as error:
            parts.remove()
            # A loader process sends the text of its traceback, which ends with the reason.
            return "skip", str(error).strip().splitlines()[-1].rpartition("NotCacheable: ")[2]
        except FusionZooError as error:
            return "error", str(error)
        try:
            feature_cache().save(description, stored)
        except FusionZooError as error:
            return "skip" if self.mode == "auto" else "error", str(error)
        parts.remove()
        return None


def stored_features(model: FusionModel, dataset: PairedDataset) -> FrozenFeatures:
    """Return the features that a training in single precision stored of these samples, as they and
    their encoders still are; nothing is encoded."""
    encoders = [x for _, x in model.named_encoders() if x.modality in dataset.modalities]
    frozen = [x for x in encoders if x.frozen and x.spec.get("name") != WRAPPED]
    entries = feature_cache().entries() if frozen and not dataset.edits else ()
    described = [x.metadata["description"] for x in entries if x.metadata]
    stored = {x["modality"] for x in described if x.get("data") == dataset.source}
    if not stored:  # else the values of all samples are digested
        return FrozenFeatures({}, [])
    with_tokens = fusion_info(model.spec["fusion"]["name"]).reads == "tokens"
    samples, modalities = _of_three_splits(dataset.whole()), {}
    for encoder in frozen:
        description = _entry_of(encoder, samples, with_tokens)
        features = StoredModality(description, samples.rows, with_tokens)
        if feature_cache().load(description) and features.holds(dataset.rows):
            modalities[encoder.modality] = features
    found = f"{', '.join(modalities)}: features that training stored are read"
    return FrozenFeatures(modalities, [found] if modalities else [])


def _of_three_splits(dataset: PairedDataset) -> PairedDataset:
    """Return the samples of train, val and test."""
    used = [n for n, name in enumerate(dataset.split_names) if name in ("train", "val", "test")]
    return dataset if len(used) == len(dataset) else dataset.subset(used)


def _entry_of(
    encoder: Encoder, samples: PairedDataset, with_tokens: bool, **options: str
) -> dict[str, Any]:
    """Return the description of features of a run, as evaluation prepares the samples."""
    # Without tokens, one per sample tells which samples have the modality.
    max_tokens = None if with_tokens else 1
    return describe(encoder, samples, max_tokens=max_tokens, view=0, **options)


class _Watch:
    """Checks each batch of features, and answers processes that wait."""

    def __init__(self, caching: Caching, dim: int, num_samples: int) -> None:
        self.caching, self.bytes_per_token = caching, 4 * dim * num_samples
        self.beat = time.monotonic()
        self.limit: float | None = None

    def __call__(self, features: Features) -> None:
        if time.monotonic() - self.beat > HEARTBEAT:
            gather(True, self.caching.world)
            self.beat = time.monotonic()
        if not self.caching.with_tokens:
            return
        mask = features.mask
        if bool((mask.long().diff(dim=1) > 0).any()):
            raise NotCacheable("its tokens have gaps, which stored features do not keep")
        if self.limit is None and self.caching.mode == "auto":
            self.limit = _room(feature_cache().root)
            needed = int(mask.sum(1).max()) * self.bytes_per_token  # the longest samples come first
            if needed > self.limit:
                raise NotCacheable(
                    f"its features may take {needed / 1e9:.1f} GB, and there is room for"
                    f" {self.limit / 1e9:.1f} GB (--train.cache_frozen on stores them anyway)"
                )


def _room(folder: Path) -> float:
    """Return how many bytes the features of one encoder may take, in memory and on disk."""
    existing = next(x for x in (folder, *folder.parents) if x.is_dir())
    on_disk = shutil.disk_usage(existing).free / 2
    if not hasattr(os, "sysconf"):  # Windows
        return on_disk
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(memory / MEMORY_SHARE, on_disk)
