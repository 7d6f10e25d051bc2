"""How much work the samples of a table are: the sizes of their values."""

from __future__ import annotations

import pyarrow as pa
import torch
from torch import Tensor

from .arrow import cell_lengths
from .shards.order import Blocking, sort_by_window
from .shards.rows import find_blocking, stored_lengths
from .stretch import cost
from .table import SampleTable


class Measured(SampleTable):
    """A `SampleTable` whose samples are ordered by length."""

    def lengths(self) -> Tensor:
        """Return a rough cost per sample, from the sizes of its text, audio and sequences."""
        total = torch.zeros(len(self.table), dtype=torch.float64)
        for name, kind in self.modalities.items():
            counts = getattr(self.memory.get(name), "counts", None)  # of items in shards
            has_lists = counts is not None or pa.types.is_list(self.table[name].type)
            if kind in ("text", "audio", "sequence") or (kind == "image" and has_lists):
                sizes = self._lengths(name, kind)
                total += sizes / sizes.mean().clamp(min=1e-9)
        return total[self.rows]

    def by_length(self) -> list[int]:
        """Return the samples' positions, the longest first; in shards, the longest of a window."""
        order, blocking = self.lengths().argsort(descending=True, stable=True), self.blocking()
        if blocking is not None:
            order = sort_by_window(order, blocking.windows(torch.arange(len(self)), None))
        return order.tolist()

    def blocking(self) -> Blocking | None:
        """Return the blocks of shards that the samples are in; None: they are in none."""
        return find_blocking(self)

    def _lengths(self, name: str, kind: str) -> Tensor:
        """Return the size of each value of a modality, float64 (rows of the table,)."""
        is_plain = name not in self.memory and not (name in self.paths and kind == "text")
        is_list = kind == "sequence" and not pa.types.is_string(self.table[name].type)
        is_list |= kind == "image"  # here only if a sample may have several
        sizes = cell_lengths(self.table[name]) if is_plain and (kind == "text" or is_list) else None
        if sizes is not None:
            return sizes
        known = stored_lengths(self, name)
        if known is not None:
            return known
        rows = range(len(self.table))
        costs = [cost(self.reference(name, row)) for row in rows]
        return torch.tensor(costs, dtype=torch.float64)
