"""Where the samples of a step come from: cached features, or batches of raw samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fusionzoo.config import BenchmarkConfig
from fusionzoo.datasets import PairedDataset
from fusionzoo.distributed.process_group import World, pick_device
from fusionzoo.model import FusionModel
from fusionzoo.structures import Batch, Features
from fusionzoo.training.data import num_workers

from ..bench import Bench, Unit
from ..strategies import names_of, reads_tokens
from .cache import load_features
from .encode import Scaler, Stored


class BatchFeed:
    """Batches of prepared samples; vectors are collated once, the rest is loaded each time."""

    def __init__(self, dataset: PairedDataset, model: FusionModel, cfg: BenchmarkConfig) -> None:
        self.dataset, self.model, self.cfg = dataset, model, cfg
        self.whole: Batch | None = None
        if set(dataset.modalities.values()) == {"vector"}:
            whole: Batch = model.collate()([dataset[row] for row in range(len(dataset))])
            self.whole = whole.to(device(cfg))

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
            num_workers=workers(self.cfg),
        )
        yield from (batch.to(device(self.cfg)) for batch in loader)


def workers(cfg: BenchmarkConfig) -> int:
    """Return how many processes load."""
    return num_workers(cfg.num_workers, World())


def device(cfg: BenchmarkConfig) -> torch.device:
    """Return where encoders run."""
    return pick_device(cfg.device)


class ProbeFeed:
    """Cached features of rows; with several views, each epoch reads the next."""

    def __init__(self, bench: Bench, unit: Unit) -> None:
        self.tokens = reads_tokens(unit.strategy)
        found = bench.features[unit.fold]
        self.views = [
            {
                name: load_features({**found[name], "view": view})
                for name in names_of(bench, unit.strategy)
            }
            for view in range(bench.cfg.views)
        ]
        train = bench.folds[unit.fold].train
        self.scalers = {
            name: Scaler.of(one, train, self.tokens)
            for name, one in self.views[0].items()
            if bench.cfg.standardise
        }

    def __call__(self, chunks: Sequence[Tensor], epoch: int) -> Iterator[dict[str, Features]]:
        """Yield the features of each chunk of rows."""
        stored = self.views[max(epoch, 0) % len(self.views)]
        for rows in chunks:
            yield {name: self.take(name, one, rows) for name, one in stored.items()}

    def take(self, name: str, stored: Stored, rows: Tensor) -> Features:
        """Return some rows of one modality, scaled."""
        features = stored.take(rows, self.tokens)
        return self.scalers[name](features) if name in self.scalers else features
