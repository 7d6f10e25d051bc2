"""Model inputs for the rows of a step: cached features, or batches of prepared samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fusionzoo.config import BenchmarkConfig
from fusionzoo.datasets import Collate, PairedDataset
from fusionzoo.datasets.loader import make_loader
from fusionzoo.encoders import Item, varies
from fusionzoo.features.cache import load_features
from fusionzoo.features.encode import StoredFeatures
from fusionzoo.machine.devices import pick_device
from fusionzoo.machine.distributed import World
from fusionzoo.model.fusion_model import FusionModel
from fusionzoo.model.standardise import RAW_KINDS, Standardise
from fusionzoo.structures import Batch, Features, Sample
from fusionzoo.training.loaders import num_workers, whole_batch

from .bench import Bench, Job
from .candidates import modalities_of, reads_tokens

MOST = 1 << 30  # bytes of prepared samples that a process keeps
WHOLE_BYTES = 2**27  # of a modality's padded tokens, up to which all are scaled once
PreparedSample = tuple[Sample, dict[str, list[Item]]]  # with its items by modality


class KeptSamples:
    """Reads samples for one process; those that augmentation does not change are prepared once."""

    def __init__(self, dataset: PairedDataset) -> None:
        self.dataset, self.bytes = dataset, 0
        self._prepared: dict[tuple[int, bool], PreparedSample] = {}  # by row, and for training

    def batch(self, keys: Sequence[tuple[int, int]], collate: Collate, train: bool) -> Batch:
        """Collate samples given by (row, seed), as a DataLoader would."""
        prepared = [self._prepare(key, collate, train) for key in keys]
        return collate.join([x for x in prepared if x is not None])

    def _prepare(
        self, key: tuple[int, int], collate: Collate, train: bool
    ) -> PreparedSample | None:
        place = key[0], train
        if place in self._prepared:
            return self._prepared[place]
        sample = self.dataset[key]
        prepared = None if sample is None else collate.prepare(sample)
        if sample is None or prepared is None or self.bytes > MOST:
            return prepared
        values = ((x, sample.values.get(name)) for name, x in collate.processors.items())
        if train and any(x is not None and varies(processor, x) for processor, x in values):
            return prepared
        kept, items = prepared
        tensors = (x for part in items.values() for item in part for x in item.values())
        self.bytes += sum(x.nbytes for x in tensors)
        present = {name: True for name, x in kept.values.items() if x is not None}
        self._prepared[place] = kept._replace(values=present), items  # without what was decoded
        return prepared


class BatchFeed:
    """Batches of prepared samples; a data set of fixed shapes is collated once, as a whole."""

    def __init__(self, dataset: PairedDataset, model: FusionModel, cfg: BenchmarkConfig) -> None:
        self.dataset, self.model, self.cfg = dataset, model, cfg
        self.kept = KeptSamples(dataset)
        whole = whole_batch(dataset, model.collate(train=True))
        self.whole = None if whole is None else whole.to(device_of(cfg))

    def __call__(self, chunks: Sequence[Tensor], epoch: int) -> Iterator[Batch]:
        """Yield a batch for each chunk of rows; in training a sample's seed is new each epoch."""
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
    """Cached features."""

    def __init__(self, bench: Bench, job: Job) -> None:
        self.tokens = reads_tokens(job.candidate)
        modalities = modalities_of(bench, job.candidate)
        descriptions = bench.features[job.fold]
        train = bench.folds[job.fold].train
        self.stored = {name: load_features(descriptions[name]) for name in modalities}
        self.standardise: dict[str, Standardise] = {}
        if bench.cfg.standardise:
            self.standardise = {
                name: measure(x, train, bench.modalities[name], self.tokens)
                for name, x in self.stored.items()
            }
        self.whole = {  # padded and scaled once, where memory allows
            name: self.take(name, x, torch.arange(len(x.pooled)))
            for name, x in self.stored.items()
            if not self.tokens or x.padded_bytes <= WHOLE_BYTES
        }

    def __call__(self, chunks: Sequence[Tensor], epoch: int) -> Iterator[dict[str, Features]]:
        """Yield the features of each chunk of rows."""
        for rows in chunks:
            yield {name: self._rows(name, stored, rows) for name, stored in self.stored.items()}

    def take(self, name: str, stored: StoredFeatures, rows: Tensor) -> Features:
        """Return the features of one modality for some rows, scaled if so configured."""
        features = stored.take(rows, self.tokens)
        return self.standardise[name](features) if name in self.standardise else features

    def _rows(self, name: str, stored: StoredFeatures, rows: Tensor) -> Features:
        if name not in self.whole:
            return self.take(name, stored, rows)
        tokens, mask, pooled = self.whole[name]
        mask = mask[rows]
        longest = max(1, int(mask.sum(-1).max())) if self.tokens else 1
        return Features(tokens[:, :longest][rows], mask[..., :longest], pooled[rows])


def measure(stored: StoredFeatures, rows: Tensor, kind: str, with_tokens: bool) -> Standardise:
    """Measure how to standardise a modality, on the samples of `rows` that have it."""
    present_rows = rows[stored.present[rows]]
    tokens = stored.subset(present_rows).tokens if with_tokens else None
    return Standardise.measure(stored.pooled[present_rows], tokens, kind in RAW_KINDS)


def loader_workers(cfg: BenchmarkConfig) -> int:
    """Return the number of the DataLoader's worker processes."""
    return num_workers(cfg.num_workers, World())


def device_of(cfg: BenchmarkConfig) -> torch.device:
    """Return the device of encoders and end-to-end training."""
    return pick_device(cfg.device)
