"""From a list of samples to an aligned, padded batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fusionzoo.errors import FusionZooError
from fusionzoo.structures import Batch, Sample

Item = dict[str, torch.Tensor]


class Collate:
    """Prepare each modality with its processor and align the rows; runs in the loader's workers.

    A sample that lacks a modality gets the processor's blank item, and `present` says so. A sample
    that the data set skips (`on_error="skip"`) leaves no row; what a processor refuses is treated
    like what cannot be decoded. `processors` are the encoders'.
    `columns` is how many numbers a target is; None: it is a class.
    """

    def __init__(self, processors: Mapping[str, Any], columns: int | None = None) -> None:
        self.processors, self.columns = dict(processors), columns
        self.blanks = {name: processor.blank() for name, processor in self.processors.items()}

    def __call__(self, samples: Sequence[Sample | None]) -> Batch:
        prepared = [self._prepare(sample) for sample in samples if sample is not None]
        kept = [pair for pair in prepared if pair is not None]
        rows = [sample for sample, _ in kept]
        items = {name: [own[name] for _, own in kept] for name in self.processors}
        inputs = {
            # An empty list still has to say what shape nothing has.
            name: self.processors[name].collate(own or [self.blanks[name]])
            for name, own in items.items()
        }
        if not rows:
            inputs = {name: {k: x[:0] for k, x in own.items()} for name, own in inputs.items()}
        present = [[one.values.get(name) is not None for name in self.processors] for one in rows]
        shaped = torch.tensor(present, dtype=torch.bool).reshape(len(rows), len(self.processors))
        return Batch(
            [one.id for one in rows], inputs, shaped, self._targets([one.target for one in rows])
        )

    def _targets(self, given: Sequence[Any]) -> torch.Tensor | None:
        if None in given:
            return None
        if not (isinstance(given[0], tuple) if given else self.columns is not None):
            return torch.tensor(given, dtype=torch.int64)
        width = len(given[0]) if given else self.columns
        return torch.tensor(given, dtype=torch.float32).reshape(len(given), width or 0)

    def _prepare(self, sample: Sample) -> tuple[Sample, dict[str, Item]] | None:
        """Return a sample and its items, without what a processor refuses; None: skipped."""
        items = {}
        for name in self.processors:
            try:
                items[name] = self._item(name, sample)
            except FusionZooError as error:
                remaining = sample.without(name, error)
                if remaining is None:
                    return None
                sample, items[name] = remaining, self.blanks[name]
        return sample, items

    def _item(self, name: str, sample: Sample) -> Item:
        value = sample.values.get(name)
        if value is None:
            return self.blanks[name]
        generator = torch.Generator().manual_seed(sample.seed) if sample.seed else None
        prepare: Callable[..., Item] = self.processors[name]
        return prepare(value, generator)
