"""Orders of samples that are stored in blocks: each block is read about once per epoch."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from ..join import SourceValues
from ..tables.table import Samples
from .blocks import Blocks, StoredCells


class Blocking(NamedTuple):
    """The block of each of N samples, int64 (N,), and how many blocks are shuffled together."""

    blocks: Tensor
    window: int

    def windows(self, indices: Tensor, generator: torch.Generator | None) -> Tensor:
        """Return the window of each sample, int64 (N,); of those not in `indices` it is 0.

        The blocks of the samples at `indices` are put into windows at random, or without a
        generator in their order.
        """
        used, positions = torch.unique(self.blocks[indices], return_inverse=True)
        count = len(used)
        rank = (
            torch.arange(count) if generator is None else torch.randperm(count, generator=generator)
        )
        windows = torch.zeros(len(self.blocks), dtype=torch.int64)
        windows[indices] = rank[positions] // self.window
        return windows


def sort_by_window(order: Tensor, windows: Tensor) -> Tensor:
    """Put samples of one window together; within each the order stays.

    >>> sort_by_window(torch.tensor([3, 0, 2, 1]), torch.tensor([0, 0, 1, 1])).tolist()
    [0, 1, 3, 2]
    """
    return order[windows[order].argsort(stable=True)]


def window_sizes(order: Tensor, windows: Tensor) -> list[int]:
    """Return the numbers of samples of one window that follow each other.

    >>> window_sizes(torch.tensor([0, 1, 3, 2]), torch.tensor([0, 0, 1, 1]))
    [2, 2]
    """
    counts: list[int] = torch.unique_consecutive(windows[order], return_counts=True)[1].tolist()
    return counts


def find_blocking(dataset: Samples) -> Blocking | None:
    """Return the blocks that samples are in, by the first modality in shards; None: none is."""
    blocks: Blocks | None = None
    rows = np.full(len(dataset), -1, np.int64)
    for name in dataset.modalities:
        stored = _stored_rows(dataset, name)
        if stored is None or (blocks is not None and stored[0] is not blocks):
            continue
        blocks = stored[0]
        rows = np.where(rows < 0, stored[1], rows)
    if blocks is None:
        return None
    last = np.maximum.accumulate(np.where(rows >= 0, np.arange(len(rows)), 0))
    numbers = blocks.blocks_of(np.maximum(rows[last], 0))
    return Blocking(torch.from_numpy(numbers.astype(np.int64)), blocks.window)


def stored_lengths(dataset: Samples, name: str) -> Tensor | None:
    """Return a modality's bytes, or images of lists, by row, float64; None: it is not in shards."""
    values = dataset.memory.get(name)
    if not isinstance(values, StoredCells):
        return None
    sizes = values.sizes
    if values.counts is not None and dataset.modalities[name] == "image":
        sizes = values.counts
    cells = pc.fill_null(dataset.table[name], -1).to_numpy()
    return torch.from_numpy(np.where(cells < 0, 0.0, sizes[cells]).astype(np.float64))


def _stored_rows(dataset: Samples, name: str) -> tuple[Blocks, np.ndarray] | None:
    """Return the row in shards of each sample's value, -1 without one, and the shards' blocks."""
    values = dataset.memory.get(name)
    if not isinstance(values, StoredCells | SourceValues):
        return None
    cells = pc.fill_null(dataset.chosen(name), -1).to_numpy()
    if isinstance(values, StoredCells):
        return values.blocks, cells
    inner = _stored_rows(values.source, values.modality)
    if inner is None:
        return None
    return inner[0], np.where(cells < 0, -1, inner[1][cells])


def stored_cells(blocks: Blocks, column: str, kind: str, sizes: Any) -> StoredCells:
    """Return a modality's values; `sizes` are an Arrow array of lists if the values are lists."""
    if not isinstance(sizes, pa.Array):
        return StoredCells(blocks, column, kind, sizes)
    counts = pc.fill_null(pc.list_value_length(sizes), -1).to_numpy().astype(np.int64)
    ends = np.cumsum(counts.clip(0))
    sums = np.concatenate([[0], np.cumsum(sizes.flatten().to_numpy())])
    totals = np.where(counts < 0, -1, sums[ends] - sums[ends - counts.clip(0)])
    cells = StoredCells(blocks, column, kind, totals)
    cells.has_lists, cells.counts = True, counts
    return cells
