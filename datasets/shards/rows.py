"""The blocks and sizes of samples whose values are in shards, also through a join."""

from __future__ import annotations

import numpy as np
import pyarrow.compute as pc
import torch
from torch import Tensor

from ..join import SourceValues
from ..table import SampleTable
from .blocks import Blocks, StoredCells
from .order import Blocking


def find_blocking(dataset: SampleTable) -> Blocking | None:
    """Return the blocks that a data set's samples are in; None: it has no values in shards.

    The first modality in shards decides, then others in the same ones; a sample that has none of
    them is read with the sample before it.
    """
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


def stored_lengths(dataset: SampleTable, name: str) -> Tensor | None:
    """Return the bytes of a modality's values by row of the table, float64; None: not in shards.

    Of lists of pictures, the number of items.
    """
    values = dataset.memory.get(name)
    if not isinstance(values, StoredCells):
        return None
    sizes = values.sizes
    if values.counts is not None and dataset.modalities[name] == "image":
        sizes = values.counts
    cells = pc.fill_null(dataset.table[name], -1).to_numpy()
    return torch.from_numpy(np.where(cells < 0, 0.0, sizes[cells]).astype(np.float64))


def _stored_rows(dataset: SampleTable, name: str) -> tuple[Blocks, np.ndarray] | None:
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
