"""Model inputs for the rows of a step: cached features, or batches of prepared samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fusionzoo.config import BenchmarkConfig
from fusionzoo.datasets import PairedDataset
from fusionzoo.distributed.process_group import World, pick_device
from fusionzoo.features.cache import load_features
from fusionzoo.features.encode import StoredFeatures
from fusionzoo.model import FusionModel
from fusionzoo.rng import seed_of
from fusionzoo.standardise import RAW_KINDS, Standardise
from fusionzoo.structures import Batch, Features
from fusionzoo.training.data import num_workers
from fusionzoo.worker_memory import ReusedMemory

from ..bench import Bench, Unit
from ..strategies import modalities_of, parse, reads_tokens
from .kept import KeptSamples
from .lost_parts import DamagedFeatures, damaged_features, damaged_modalities, replace_rows

WHOLE_BYTES = 2**27  # of a modality's padded tokens, up to which all are scaled once


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
            loader: Any = DataLoader(
                self.dataset,
                batch_sampler=keys,
                collate_fn=ReusedMemory(collate),
                num_workers=workers,
            )
            yield from (batch.to(device) for batch in loader)
        else:
            yield from (self.kept.batch(chunk, collate, train).to(device) for chunk in keys)


class ProbeFeed:
    """Cached features; with several views, each epoch reads the next one."""

    def __init__(self, bench: Bench, unit: Unit) -> None:
        self.tokens = reads_tokens(unit.strategy)
        modalities = modalities_of(bench, unit.strategy)
        descriptions = bench.features[unit.fold]
        train = bench.folds[unit.fold].train
        removed = removed_modalities(bench, unit)
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
        self.damaged = self._load_damaged(bench, unit)
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

    def _load_damaged(self, bench: Bench, unit: Unit) -> list[dict[str, DamagedFeatures]]:
        """Return by view the features of samples that lose a part of a modality."""
        damaged = damaged_modalities(bench, unit)
        if damaged is None:
            return [{} for _ in self.views]
        masks = dict(zip(modalities_of(bench, unit.strategy), damaged.unbind(1), strict=True))
        entries = {
            condition[0]: entry for condition, entry in bench.damaged_train[unit.fold].items()
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


def removed_modalities(bench: Bench, unit: Unit) -> Tensor | None:
    """Return which modalities training and validation lack, (N, M) of the strategy's modalities.

    Each is removed with the strategy's missing rate, the same ones for every strategy; a sample
    keeps at least one of those that it has. The test split stays whole. None: nothing is removed.
    """
    rate = parse(unit.strategy).missing
    if not rate:
        return None
    generator = torch.Generator().manual_seed(seed_of("missing in training", bench.cfg.seed))
    draws = torch.rand(bench.present.shape, generator=generator)
    draws = draws.masked_fill(~bench.present, -1.0)
    last = draws == draws.max(1, keepdim=True).values  # the one that would be removed last
    removed = bench.present & (draws < rate) & ~last
    fold = bench.folds[unit.fold]
    learned = torch.zeros(len(removed), dtype=torch.bool)
    learned[torch.cat([fold.train, fold.val])] = True
    columns = [list(bench.modalities).index(m) for m in modalities_of(bench, unit.strategy)]
    return (removed & learned[:, None])[:, columns]


def loader_workers(cfg: BenchmarkConfig) -> int:
    """Return the number of the DataLoader's worker processes."""
    return num_workers(cfg.num_workers, World())


def device_of(cfg: BenchmarkConfig) -> torch.device:
    """Return the device of encoders and end-to-end training."""
    return pick_device(cfg.device)
