"""Samples with several pictures or clips: decode the items of a list, and batch them.

Shapes: `B` batch, `I` items of the sample with most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from fusionzoo.errors import FusionZooError
from fusionzoo.structures import ITEM_COUNTS, Inputs

from .budgets import check_budget

Item = dict[str, Tensor]
T = TypeVar("T")


def decode_items(values: Sequence[Any], decode_one: Callable[[Any], Any]) -> Any:
    """Decode each item of a list; a list of a single item gives the item itself.

    An item that is a video gives several pictures.
    """
    decoded: list[Any] = []
    for item in each_item(values, decode_one):
        decoded += item if isinstance(item, list) else [item]
        pixels = sum(x[0].numel() for x in decoded if isinstance(x, Tensor))
        check_budget("pixels of all pictures", pixels, "the list")
    if not decoded:
        raise FusionZooError("the list is empty")
    return decoded[0] if len(decoded) == 1 else decoded


def each_item(values: Sequence[Any], read: Callable[[Any], T]) -> Iterator[T]:
    """Read the items of a list in turn; an error names the item."""
    check_budget("items", len(values), "the list")
    for number, value in enumerate(values, start=1):
        try:
            item = read(value)
        except FusionZooError as error:
            raise FusionZooError(f"item {number} of {len(values)}: {error}") from error
        yield item


def prepare(processor: Any, value: Any, generator: torch.Generator | None = None) -> list[Item]:
    """Return the items that a processor makes of a sample's value."""
    if hasattr(processor, "items"):
        items: list[Item] = processor.items(value, generator)
        return items
    return [processor(value, generator)]


def collate_items(processor: Any, rows: Sequence[list[Item]], blank: Item) -> Inputs:
    """Batch the items of each sample, (B, ...); with several of them, (B, I, ...) and their counts.

    Blank items fill up the samples with fewer.
    """
    counts = [len(items) for items in rows]
    most = max(counts)
    padded = [item for items in rows for item in (*items, *[blank] * (most - len(items)))]
    inputs: Inputs = processor.collate(padded)
    if most == 1 or not isinstance(inputs, dict):
        return inputs
    stacked = {name: x.unflatten(0, (len(rows), most)) for name, x in inputs.items()}
    return {**stacked, ITEM_COUNTS: torch.tensor(counts)}
