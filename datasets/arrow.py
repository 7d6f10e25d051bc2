"""Operations on whole columns of a table, by Arrow: a loop over a million rows takes seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor


def repeated_value(column: Any) -> tuple[Any, int] | None:
    """Return the first value that a column holds several times, and its count.

    >>> repeated_value(pa.chunked_array([["a", "b", "b"]]))
    ('b', 2)
    """
    if pc.count_distinct(column).as_py() == len(column):
        return None
    counts = pc.value_counts(column).to_pylist()
    entry = next(entry for entry in counts if entry["counts"] > 1)
    return entry["values"], entry["counts"]


def count_values(column: Any) -> dict[Any, int]:
    """Return how often each value occurs, in the order of first occurrence.

    >>> count_values(pa.chunked_array([["train", "test", "train"]]))
    {'train': 2, 'test': 1}
    """
    return {entry["values"]: entry["counts"] for entry in pc.value_counts(column).to_pylist()}


def rows_equal_to(column: Any, value: str) -> Tensor:
    """Return the positions of a value, int64."""
    return torch.from_numpy(np.flatnonzero(pc.equal(column, value).to_numpy()))


def positions_in(column: Any, values: Sequence[str]) -> Tensor:
    """Return the index in `values` of each cell, int64; -1 where it is not among them.

    >>> positions_in(pa.chunked_array([["b", "a", "c"]]), ["a", "b"]).tolist()
    [1, 0, -1]
    """
    indices = pc.index_in(column, value_set=pa.array(values, column.type))
    return torch.from_numpy(pc.fill_null(indices, -1).to_numpy().astype(np.int64))


def cell_lengths(column: Any) -> Tensor | None:
    """Return the characters of each text, or the entries of each list, float64; 0 where empty.

    None: the column holds neither.
    """
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        lengths = pc.utf8_length(column)
    elif pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        lengths = pc.list_value_length(column)
    else:
        return None
    return torch.from_numpy(pc.fill_null(lengths, 0).to_numpy().astype(np.float64))


def is_list_of_text(kind: pa.DataType) -> bool:
    """Return whether the cells of a column of this type are lists of text.

    >>> is_list_of_text(pa.list_(pa.string())), is_list_of_text(pa.string())
    (True, False)
    """
    return pa.types.is_list(kind) and (
        pa.types.is_string(kind.value_type) or pa.types.is_large_string(kind.value_type)
    )


def first_true(mask: Any) -> int | None:
    """Return the position of the first True in a column, or None; a null is False.

    >>> first_true(pa.chunked_array([[False, None], [True]]))
    2
    """
    position = pc.index(mask, True).as_py()
    return None if position < 0 else position
