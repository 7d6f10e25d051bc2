"""Keep prepared samples in memory between the epochs of a training on real inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fusionzoo.datasets import Collate, PairedDataset
from fusionzoo.encoders import Item, Processor, varies
from fusionzoo.errors import FusionZooError
from fusionzoo.structures import Sample

MOST = 1 << 30  # bytes of prepared samples that a process keeps


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
