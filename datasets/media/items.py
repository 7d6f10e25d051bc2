"""Several items of one modality in a sample: decoded one by one, within a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from torch import Tensor

from fusionzoo.errors import FusionZooError, located

from .budgets import check_budget

T = TypeVar("T")


def decode_items(values: Sequence[Any], decode_one: Callable[[Any], Any]) -> Any:
    """Decode each item of a list, videos as several images; a single item gives the item itself."""
    decoded: list[Any] = []
    for item in each_item(values, decode_one):
        decoded += item if isinstance(item, list) else [item]
        pixels = sum(x[0].numel() for x in decoded if isinstance(x, Tensor))
        check_budget("pixels of all images", pixels, "the list")
    if not decoded:
        raise FusionZooError("the list is empty")
    return decoded[0] if len(decoded) == 1 else decoded


def each_item(values: Sequence[Any], read: Callable[[Any], T]) -> Iterator[T]:
    """Read the items of a list in turn; an error names the item."""
    check_budget("items", len(values), "the list")
    for number, value in enumerate(values, start=1):
        with located(f"item {number} of {len(values)}"):
            item = read(value)
        yield item
