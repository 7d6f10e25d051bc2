"""Model inputs for the rows of a step: cached features, or batches of prepared samples."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fusionzoo.config import BenchmarkConfig
from fusionzoo.datasets import Collate, PairedDataset
from fusionzoo.datasets.loader import make_loader
from fusionzoo.devices import pick_device
from fusionzoo.distributed import World
from fusionzoo.encoders import Item, Processor, varies
from fusionzoo.errors import FusionZooError
from fusionzoo.evaluation.robustness import LOST_PART, corrupt_sample
from fusionzoo.features.cache import load_features
from fusionzoo.features.encode import StoredFeatures
from fusionzoo.model import FusionModel
from fusionzoo.standardise import RAW_KINDS, Standardise
from fusionzoo.structures import Batch, Features, Sample, seed_of
from fusionzoo.training.loaders import num_workers

from .bench import Bench, Fold, Job
from .candidates import modalities_of, parse, reads_tokens

SEVERITY = 3  # the middle one
MOST = 1 << 30  # bytes of prepared samples that a process keeps
WHOLE_BYTES = 2**27  # of a modality's padded tokens, up to which all are scaled once


def damaged_modalities(bench: Bench, job: Job) -> Tensor | None:
    """Return which modalities lose a part in a job's training and validation, bool (N, M).

    M are the modalities of the candidate. None: all samples are whole.
    """
    rate = parse(job.candidate).damaged
    if not rate:
        return None
    columns = [list(bench.modalities).index(m) for m in modalities_of(bench, job.candidate)]
    return draw_damaged(bench, bench.folds[job.fold], rate)[:, columns]


def draw_damaged(bench: Bench, fold: Fold, rate: float) -> Tensor:
    """Draw which modalities of a fold's training and validation samples lose a part, bool (N, M).

    Each that a sample has is drawn with this rate, the same ones for every candidate; a higher rate
    adds to those of a lower one. The test split stays whole.
    """
    generator = torch.Generator().manual_seed(seed_of("damaged in training", bench.cfg.seed))
    damaged = bench.present & (torch.rand(bench.present.shape, generator=generator) < rate)
    learned = torch.zeros(len(damaged), dtype=torch.bool)
    learned[torch.cat([fold.train, fold.val])] = True
    return damaged & learned[:, None]


def with_lost_parts(dataset: PairedDataset, damaged: Mapping[str, Tensor]) -> PairedDataset:
    """Return a data set in which some samples lose a part of a modality, always the same part.

    `damaged` maps modalities to the samples whose value loses a part, bool (N,).
    """
    ids = {name: {*dataset.subset(mask.nonzero()[:, 0]).ids} for name, mask in damaged.items()}
    return dataset.edited(partial(_lose_parts, kinds=dataset.modalities, ids=ids))


def _lose_parts(
    whole: Sample, kinds: Mapping[str, str], ids: Mapping[str, Collection[str]]
) -> Sample | None:
    sample: Sample | None = whole
    for name in whole.values:
        if sample is not None and whole.id in ids.get(name, ()):
            kind = kinds[name]
            sample = corrupt_sample(sample, name, kind, LOST_PART[kind], SEVERITY)
    return sample


class DamagedFeatures(NamedTuple):
    """Cached features of a modality's damaged samples, which replace those of the whole ones."""

    places: Tensor  # (N,) in `stored`; -1: the sample stays whole
    stored: StoredFeatures


def damaged_features(stored: StoredFeatures, rows: Tensor, damaged: Tensor) -> DamagedFeatures:
    """Select samples of a cache entry; `rows` (n,) are those of the entry, `damaged` is (N,)."""
    places = torch.full(damaged.shape, -1)
    places[rows] = torch.arange(len(rows))
    return DamagedFeatures(places.masked_fill(~damaged, -1), stored)


def replace_rows(features: Features, rows: Tensor, others: Features) -> Features:
    """Replace the features of some samples; both are padded to the larger number of tokens.

    Shapes: features (..., B, T, D); `rows` bool (..., B) with n ones; others (n, T, D).
    """
    missing = others.mask.shape[-1] - features.mask.shape[-1]
    short, long = max(missing, 0), max(-missing, 0)
    tokens, mask = F.pad(features.tokens, (0, 0, 0, short)), F.pad(features.mask, (0, short))
    tokens, mask, pooled = tokens.clone(), mask.clone(), features.pooled.clone()
    tokens[rows] = F.pad(others.tokens, (0, 0, 0, long))
    mask[rows] = F.pad(others.mask, (0, long))
    pooled[rows] = others.pooled
    return Features(tokens, mask, pooled)


class _Prepared(NamedTuple):
    """A value that its processor has prepared already."""

    items: list[Item]


class _Processor(Processor):
    """Passes prepared values on, and prepares the others."""

    def __init__(self, processor: Processor) -> None:
        self.processor = processor

    def __call__(self, value: Any, generator: torch.Generator | None = None) -> Item:
        return self.processor(value, generator)

    def items(self, value: Any, generator: torch.Generator | None = None) -> list[Item]:
        is_prepared = isinstance(value, _Prepared)
        return value.items if is_prepared else self.processor.items(value, generator)

    def blank(self) -> Item:
        return self.processor.blank()

    def collate(self, items: Sequence[Item]) -> Item:
        return self.processor.collate(items)


class KeptSamples:
    """Reads samples for one process; those that augmentation does not change are read once."""

    def __init__(self, dataset: PairedDataset) -> None:
        self.dataset, self.bytes = dataset, 0
        self._samples: dict[tuple[int, bool], Sample] = {}

    def batch(self, keys: Sequence[tuple[int, int]], collate: Collate, train: bool) -> Any:
        """Collate samples given by (row, seed), as a DataLoader would."""
        wrapped = Collate(
            {name: _Processor(x) for name, x in collate.processors.items()}, collate.columns
        )
        return wrapped([self._sample(key, collate, train) for key in keys])

    def _sample(self, key: tuple[int, int], collate: Collate, train: bool) -> Sample | None:
        place = key[0], train
        if place in self._samples:
            return self._samples[place]
        sample = self.dataset[key]
        if sample is None or self.bytes > MOST:
            return sample
        values: dict[str, Any] = {}
        for name, processor in collate.processors.items():
            value = sample.values.get(name)
            if value is not None and train and varies(processor, value):
                return sample
            values[name] = value
        for name, value in values.items():
            if value is not None:
                try:
                    values[name] = _Prepared(collate.processors[name].items(value))
                except FusionZooError:  # Collate reports it
                    return sample
                self.bytes += sum(x.nbytes for item in values[name].items for x in item.values())
        self._samples[place] = sample._replace(values=values)
        return self._samples[place]


class BatchFeed:
    """Batches of prepared samples; a data set of vectors only is collated once, as a whole."""

    def __init__(
        self,
        dataset: PairedDataset,
        model: FusionModel,
        cfg: BenchmarkConfig,
        removed: Tensor | None = None,
    ) -> None:
        self.dataset, self.model, self.cfg = dataset, model, cfg
        self.removed = removed  # (N, M), by the model's modalities
        self.kept = KeptSamples(dataset)
        self.whole: Batch | None = None
        if set(dataset.modalities.values()) == {"vector"}:
            whole: Batch = model.collate()([dataset[row] for row in range(len(dataset))])
            self.whole = whole.to(device_of(cfg))

    def __call__(self, chunks: Sequence[Tensor], epoch: int) -> Iterator[Batch]:
        """Yield a batch for each chunk of rows; in training a sample's seed is new each epoch."""
        for rows, batch in zip(chunks, self._batches(chunks, epoch), strict=True):
            if self.removed is not None:
                removed = self.removed[rows].to(batch.present.device)
                batch = batch._replace(present=batch.present & ~removed)
            yield batch

    def _batches(self, chunks: Sequence[Tensor], epoch: int) -> Iterator[Batch]:
        if self.whole is not None:
            yield from (self.whole.take(rows) for rows in chunks)
            return
        base, train = (epoch + 1) * len(self.dataset), epoch >= 0
        keys = [  # seed 0 in evaluation: no augmentation
            [(row, 1 + base + row if train else 0) for row in rows.tolist()] for rows in chunks
        ]
        collate, device = self.model.collate(train=train), device_of(self.cfg)
        if workers := loader_workers(self.cfg):
            generator = torch.default_generator  # as in the results that are recorded
            loader = make_loader(
                self.dataset, keys, collate, num_workers=workers, generator=generator
            )
            yield from (batch.to(device) for batch in loader)
        else:
            yield from (self.kept.batch(chunk, collate, train).to(device) for chunk in keys)


class ProbeFeed:
    """Cached features; with several views, each epoch reads the next one."""

    def __init__(self, bench: Bench, job: Job) -> None:
        self.tokens = reads_tokens(job.candidate)
        modalities = modalities_of(bench, job.candidate)
        descriptions = bench.features[job.fold]
        train = bench.folds[job.fold].train
        removed = removed_modalities(bench, job)
        self.removed: dict[str, Tensor] = {}  # modality -> (N,)
        if removed is not None:
            self.removed = dict(zip(modalities, removed.unbind(1), strict=True))
        self.standardise: dict[str, Standardise] = {}
        self.views: list[dict[str, StoredFeatures]] = []
        for view in range(bench.cfg.views):
            stored = {
                name: load_features({**descriptions[name], "view": view}) for name in modalities
            }
            if view == 0 and bench.cfg.standardise:
                self.standardise = {
                    name: measure(x, train, bench.modalities[name], self.tokens)
                    for name, x in stored.items()
                }
            self.views.append(stored)
        self.damaged = self._load_damaged(bench, job)
        self.whole = [  # padded and scaled once, where memory allows
            {
                name: self._with_damaged(number, name, x, torch.arange(len(x.pooled)))
                for name, x in view.items()
                if not self.tokens or x.padded_bytes <= WHOLE_BYTES
            }
            for number, view in enumerate(self.views)
        ]

    def __call__(self, chunks: Sequence[Tensor], epoch: int) -> Iterator[dict[str, Features]]:
        """Yield the features of each chunk of rows."""
        view = max(epoch, 0) % len(self.views)
        for rows in chunks:
            features = {
                name: self._rows(view, name, stored, rows)
                for name, stored in self.views[view].items()
            }
            for name, removed in self.removed.items():
                x = features[name]
                features[name] = x._replace(mask=x.mask & ~removed[rows][..., None])
            yield features

    def take(self, name: str, stored: StoredFeatures, rows: Tensor) -> Features:
        """Return the features of one modality for some rows, scaled if so configured."""
        features = stored.take(rows, self.tokens)
        return self.standardise[name](features) if name in self.standardise else features

    def _load_damaged(self, bench: Bench, job: Job) -> list[dict[str, DamagedFeatures]]:
        """Return by view the features of samples that lose a part of a modality."""
        damaged = damaged_modalities(bench, job)
        if damaged is None:
            return [{} for _ in self.views]
        masks = dict(zip(modalities_of(bench, job.candidate), damaged.unbind(1), strict=True))
        entries = {
            condition[0]: entry for condition, entry in bench.damaged_train[job.fold].items()
        }
        return [
            {
                name: damaged_features(
                    load_features({**entries[name].description, "view": view}),
                    entries[name].rows,
                    mask,
                )
                for name, mask in masks.items()
                if name in entries
            }
            for view in range(len(self.views))
        ]

    def _with_damaged(self, view: int, name: str, stored: StoredFeatures, rows: Tensor) -> Features:
        features = self.take(name, stored, rows)
        if name not in self.damaged[view]:
            return features
        places, damaged = self.damaged[view][name]
        changed = places[rows] >= 0
        if not changed.any():
            return features
        return replace_rows(features, changed, self.take(name, damaged, places[rows][changed]))

    def _rows(self, view: int, name: str, stored: StoredFeatures, rows: Tensor) -> Features:
        if name not in self.whole[view]:
            return self._with_damaged(view, name, stored, rows)
        tokens, mask, pooled = self.whole[view][name]
        mask = mask[rows]
        longest = max(1, int(mask.sum(-1).max())) if self.tokens else 1
        return Features(tokens[:, :longest][rows], mask[..., :longest], pooled[rows])


def measure(stored: StoredFeatures, rows: Tensor, kind: str, with_tokens: bool) -> Standardise:
    """Measure how to standardise a modality, on the samples of `rows` that have it."""
    present_rows = rows[stored.present[rows]]
    tokens = stored.subset(present_rows).tokens if with_tokens else None
    return Standardise.measure(stored.pooled[present_rows], tokens, kind in RAW_KINDS)


def removed_modalities(bench: Bench, job: Job) -> Tensor | None:
    """Return which modalities training and validation lack, (N, M) of the candidate's modalities.

    Each is removed with the candidate's missing rate, the same ones for every candidate; a sample
    keeps at least one of those that it has. The test split stays whole. None: nothing is removed.
    """
    rate = parse(job.candidate).missing
    if not rate:
        return None
    generator = torch.Generator().manual_seed(seed_of("missing in training", bench.cfg.seed))
    draws = torch.rand(bench.present.shape, generator=generator)
    draws = draws.masked_fill(~bench.present, -1.0)
    last = draws == draws.max(1, keepdim=True).values  # the one that would be removed last
    removed = bench.present & (draws < rate) & ~last
    fold = bench.folds[job.fold]
    learned = torch.zeros(len(removed), dtype=torch.bool)
    learned[torch.cat([fold.train, fold.val])] = True
    columns = [list(bench.modalities).index(m) for m in modalities_of(bench, job.candidate)]
    return (removed & learned[:, None])[:, columns]


def loader_workers(cfg: BenchmarkConfig) -> int:
    """Return the number of the DataLoader's worker processes."""
    return num_workers(cfg.num_workers, World())


def device_of(cfg: BenchmarkConfig) -> torch.device:
    """Return the device of encoders and end-to-end training."""
    return pick_device(cfg.device)
