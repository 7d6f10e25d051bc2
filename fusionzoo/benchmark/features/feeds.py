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
from fusionzoo.features.encode import Scaler, StoredFeatures
from fusionzoo.model import FusionModel
from fusionzoo.structures import Batch, Features
from fusionzoo.training.data import num_workers

from ..bench import Bench, Unit
from ..strategies import modalities_of, reads_tokens


class BatchFeed:
    """Batches of prepared samples; a data set of vectors only is collated once, as a whole."""

    def __init__(self, dataset: PairedDataset, model: FusionModel, cfg: BenchmarkConfig) -> None:
        self.dataset, self.model, self.cfg = dataset, model, cfg
        self.whole: Batch | None = None
        if set(dataset.modalities.values()) == {"vector"}:
            whole: Batch = model.collate()([dataset[row] for row in range(len(dataset))])
            self.whole = whole.to(device_of(cfg))

    def __call__(self, chunks: Sequence[Tensor], epoch: int) -> Iterator[Batch]:
        """Yield a batch for each chunk of rows; in training a sample's seed is new each epoch."""
        if self.whole is not None:
            for rows in chunks:
                yield self.whole.take(rows)
            return
        base = (epoch + 1) * len(self.dataset)  # 0 in evaluation: no augmentation
        loader: Any = DataLoader(
            self.dataset,
            batch_sampler=[
                [(row, 1 + base + row if base else 0) for row in rows.tolist()] for rows in chunks
            ],
            collate_fn=self.model.collate(train=epoch >= 0),
            num_workers=loader_workers(self.cfg),
        )
        yield from (batch.to(device_of(self.cfg)) for batch in loader)


class ProbeFeed:
    """Cached features; with several views, each epoch reads the next one."""

    def __init__(self, bench: Bench, unit: Unit) -> None:
        self.tokens = reads_tokens(unit.strategy)
        descriptions = bench.features[unit.fold]
        self.views = [
            {
                name: load_features({**descriptions[name], "view": view})
                for name in modalities_of(bench, unit.strategy)
            }
            for view in range(bench.cfg.views)
        ]
        self.scalers: dict[str, Scaler] = {}
        if bench.cfg.standardise:
            train = bench.folds[unit.fold].train
            self.scalers = {
                name: Scaler.of(stored, train, self.tokens)
                for name, stored in self.views[0].items()
            }

    def __call__(self, chunks: Sequence[Tensor], epoch: int) -> Iterator[dict[str, Features]]:
        """Yield the features of each chunk of rows."""
        view = self.views[max(epoch, 0) % len(self.views)]
        for rows in chunks:
            yield {name: self.take(name, stored, rows) for name, stored in view.items()}

    def take(self, name: str, stored: StoredFeatures, rows: Tensor) -> Features:
        """Return the features of one modality for some rows, scaled if so configured."""
        features = stored.take(rows, self.tokens)
        return self.scalers[name](features) if name in self.scalers else features


def loader_workers(cfg: BenchmarkConfig) -> int:
    """Return the number of the DataLoader's worker processes."""
    return num_workers(cfg.num_workers, World())


def device_of(cfg: BenchmarkConfig) -> torch.device:
    """Return the device of encoders and end-to-end training."""
    return pick_device(cfg.device)
