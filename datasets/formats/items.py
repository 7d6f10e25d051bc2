"""Map-style data sets, such as PyTorch's: items are read when their samples are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from fusionzoo.errors import FusionZooError, one_line

from .embedded import media_value

SKIPPED = "_"  # in `fields`: an entry that nothing uses


class Items:
    """The items of a map-style data set as mappings; the last one is remembered.

    All modalities of a sample are read one after another, so the item is made once for them.
    """

    def __init__(self, dataset: Any, fields: Sequence[str], source: str) -> None:
        self.dataset, self.fields, self.source = dataset, fields, source
        self._last: tuple[int, Mapping[str, Any]] = (-1, {})

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        if self._last[0] != index:
            where = f"{self.source}, item {index}"
            try:
                item = self.dataset[index]
            except Exception as error:
                reason = f"{type(error).__name__}: {one_line(error)}"
                raise FusionZooError(f"{where} cannot be read: {reason}") from error
            self._last = (index, as_row(item, self.fields, where))
        return self._last[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_last": (-1, {})}


class ItemCells:
    """The values of an entry of each item, read on access."""

    def __init__(self, items: Items, name: str) -> None:
        self.items, self.name = items, name

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return media_value(self.items[index].get(self.name), None)


class Entry:
    """What one pass over the items tells of one of their entries."""

    def __init__(self, skipped: int) -> None:
        self.values: list[Any] = [None] * skipped  # text, numbers and lists of text
        self.present = [False] * skipped
        self.first_large: Any = None  # a picture, clip or array; not None: values are read again

    def add(self, value: Any) -> None:
        """Note the value of the next item."""
        is_short = _is_short(value)
        if not is_short and self.first_large is None:
            self.first_large = value
        self.values.append(value if is_short else None)
        self.present.append(value is not None)


def read_entries(items: Items) -> dict[str, Entry]:
    """Read every item once."""
    entries: dict[str, Entry] = {}
    for index in range(len(items)):
        row = items[index]
        for name in row:
            if name not in entries:
                entries[name] = Entry(index)
        for name, entry in entries.items():
            entry.add(row.get(name))
    return entries


def as_row(item: Any, fields: Sequence[str], where: str) -> dict[str, Any]:
    """Return an item as a mapping: one already, a named tuple, or a tuple with `fields`."""
    if isinstance(item, Mapping):
        return {str(name): value for name, value in item.items()}
    if not isinstance(item, tuple | list):
        raise FusionZooError(f"{where} is of type {type(item).__name__}: expected a dict or tuple")
    names = list(fields) or list(getattr(item, "_fields", ()))
    if not names:
        raise FusionZooError(
            f"{where} is a {type(item).__name__} of {len(item)} entries: fields names them, such as"
            f" fields={['image', 'target', *[SKIPPED] * len(item)][: len(item)]}"
        )
    if len(names) != len(item):
        raise FusionZooError(
            f"{where} has {len(item)} entries, but fields names {len(names)}: {', '.join(names)}"
        )
    return {name: x for name, x in zip(names, item, strict=True) if name != SKIPPED}


def _is_short(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(x, str) for x in value)
    is_number = isinstance(value, Tensor | np.ndarray) and not value.ndim
    return value is None or is_number or isinstance(value, str | int | float | np.generic)
