"""Modalities whose values in shards are lists of pictures or clips: the index of their items."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fusionzoo.errors import FusionZooError

from .blocks import Blocks, StoredCells
from .index import BYTES, ITEMS, OFFSETS, SAMPLES, struct_entries


def has_items(table: pa.Table, name: str) -> bool:
    """Whether `samples.arrow` has a number for each item of a modality's values."""
    structs = table.schema.field(BYTES).type
    if not pa.types.is_struct(structs) or structs.get_field_index(name) < 0:
        raise FusionZooError(f"{SAMPLES}: {BYTES} has no field {name}")
    return pa.types.is_list(structs.field(name).type)


def stored_items(table: pa.Table, column: str, name: str, num_rows: int) -> pa.ListArray:
    """Return the lists of a struct of `samples.arrow` by row of the shards, null without one."""
    rows, entries = struct_entries(table, column, name, num_rows)
    lists = entries.combine_chunks()
    if lists.type != ITEMS or lists.null_count or lists.flatten().null_count:
        raise FusionZooError(f"{SAMPLES}: {column} lacks the items of {name}")
    positions = np.full(num_rows, -1, np.int64)
    positions[rows] = np.arange(len(rows))
    return lists.take(pa.array(positions, mask=positions < 0))


def check_items(offsets: Any, sizes: Any, name: str) -> None:
    """Raise an error if the items of a modality have more places than sizes, or fewer."""
    if not pc.list_value_length(offsets).equals(pc.list_value_length(sizes)):
        raise FusionZooError(f"{SAMPLES}: {BYTES} and {OFFSETS} of {name} differ in their items")


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
