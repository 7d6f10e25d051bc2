"""Turn a list of samples into an aligned, padded batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fusionzoo.errors import FusionZooError
from fusionzoo.structures import ITEM_COUNTS, Batch, Features, Inputs, Sample, seed_of

Item = dict[str, Tensor]


def prepare(processor: Any, value: Any, generator: torch.Generator | None = None) -> list[Item]:
    """Return the items that a processor makes of a sample's value."""
    if hasattr(processor, "items"):
        items: list[Item] = processor.items(value, generator)
        return items
    return [processor(value, generator)]


def collate_items(processor: Any, rows: Sequence[list[Item]], blank: Item) -> Inputs:
    """Batch the items of each sample, (B, ...); of several (B, I, ...), padded, with counts."""
    counts = [len(items) for items in rows]
    most = max(counts)
    padded = [item for items in rows for item in (*items, *[blank] * (most - len(items)))]
    inputs: Inputs = processor.collate(padded)
    if most == 1 or not isinstance(inputs, dict):
        return inputs
    stacked = {name: x.unflatten(0, (len(rows), most)) for name, x in inputs.items()}
    return {**stacked, ITEM_COUNTS: torch.tensor(counts)}


class Collate:
    """Prepare each modality with its encoder's processor and align the rows, in loader workers.

    A sample that lacks a modality gets the processor's blank item, marked as absent in `present`;
    one with several images or clips gets several items, see `several.collate_items`. A
    sample that the data set skips (`on_error="skip"`) has no row; a value that a processor refuses
    is treated like one that cannot be decoded. `columns` is the width of a target of numbers, or
    None for a class. With `second_view` the batch also holds the inputs of another augmentation.
    """

    second_view = False

    def __init__(self, processors: Mapping[str, Any], columns: int | None = None) -> None:
        self.processors, self.columns = dict(processors), columns
        self.blanks = {name: processor.blank() for name, processor in self.processors.items()}

    def __call__(self, samples: Sequence[Sample | None]) -> Batch:
        prepared = self._prepare_all([sample for sample in samples if sample is not None])
        pairs = [pair for pair in prepared if pair is not None]
        second: dict[str, Inputs] | None = None
        if self.second_view:
            again = self._prepare_all([_other_seed(sample) for sample, _ in pairs])
            both = [(x, y) for x, y in zip(pairs, again, strict=True) if y is not None]
            # Of the second's sample: it lacks what the processor refused in either view.
            pairs = [(other[0]._replace(seed=first[0].seed), first[1]) for first, other in both]
            second = self._collate_inputs([other[1] for _, other in both])
        return self.join(pairs)._replace(second=second)

    def join(self, pairs: Sequence[tuple[Sample, Mapping[str, list[Item]]]]) -> Batch:
        """Pad and align samples that `prepare` has prepared."""
        rows = [sample for sample, _ in pairs]
        weights = [row.weight for row in rows]
        inputs = self._collate_inputs([items for _, items in pairs])
        present = [[row.values.get(name) is not None for name in self.processors] for row in rows]
        return Batch(
            [row.id for row in rows],
            inputs,
            torch.tensor(present, dtype=torch.bool).reshape(len(rows), len(self.processors)),
            self._stack_targets([row.target for row in rows]),
            weight=None if None in weights else torch.tensor(weights, dtype=torch.float32),
        )

    def _collate_inputs(self, rows: Sequence[Mapping[str, list[Item]]]) -> dict[str, Inputs]:
        """Collate the prepared items of each modality."""
        if not rows:  # cut from a blank item, so that the shapes are right
            return {
                name: _without_rows(processor.collate([self.blanks[name]]))
                for name, processor in self.processors.items()
            }
        return {
            name: collate_items(processor, [items[name] for items in rows], self.blanks[name])
            for name, processor in self.processors.items()
        }

    def _stack_targets(self, targets: Sequence[Any]) -> torch.Tensor | None:
        """Return classes, int64 (B,), or numbers, float32 (B, W); None if one is missing."""
        if None in targets:
            return None
        if not (isinstance(targets[0], tuple) if targets else self.columns is not None):
            return torch.tensor(targets, dtype=torch.int64)
        width = len(targets[0]) if targets else self.columns
        return torch.tensor(targets, dtype=torch.float32).reshape(len(targets), width or 0)

    def _prepare_all(
        self, samples: Sequence[Sample]
    ) -> list[tuple[Sample, dict[str, list[Item]]] | None]:
        """Prepare samples, in one call where a processor takes batches."""
        ready: list[dict[str, list[Item]]] = [{} for _ in samples]
        for name, processor in self.processors.items():
            rows = [n for n, sample in enumerate(samples) if sample.values.get(name) is not None]
            if not rows or not getattr(processor, "takes_batches", False):
                continue
            values = [samples[n].values[name] for n in rows]
            try:
                prepared = processor.batch_items(values, [_draws(samples[n]) for n in rows])
            except FusionZooError:
                continue  # `prepare` finds which sample it is
            for n, items in zip(rows, prepared, strict=True):
                ready[n][name] = items
        return [self.prepare(sample, items) for sample, items in zip(samples, ready, strict=True)]

    def prepare(
        self, sample: Sample, ready: Mapping[str, list[Item]] | None = None
    ) -> tuple[Sample, dict[str, list[Item]]] | None:
        """Return a sample and its items (some `ready`), without values refused; None: skipped."""
        items: dict[str, list[Item]] = {}
        for name in self.processors:
            try:
                items[name] = (ready or {}).get(name) or self._items(name, sample)
            except FusionZooError as error:
                remaining = sample.without(name, error)
                if remaining is None:
                    return None
                sample, items[name] = remaining, [self.blanks[name]]
        return sample, items

    def _items(self, name: str, sample: Sample) -> list[Item]:
        value = sample.values.get(name)
        if value is None:
            return [self.blanks[name]]
        return prepare(self.processors[name], value, _draws(sample))


def _draws(sample: Sample) -> torch.Generator | None:
    """Return a generator per modality for its augmentation; None: evaluation."""
    return torch.Generator().manual_seed(sample.seed) if sample.seed else None


def _other_seed(sample: Sample) -> Sample:
    """Return the sample with the seed of its second augmentation."""
    return sample._replace(seed=seed_of(sample.seed, "second view")) if sample.seed else sample


def _without_rows(inputs: Inputs) -> Inputs:
    if isinstance(inputs, Features):
        return Features(*(x[:0] for x in inputs))
    return {key: x[:0] for key, x in inputs.items()}
