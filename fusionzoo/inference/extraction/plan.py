"""Divide a table into parts of consecutive rows, and a part into batches of similar lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class PlannedBatch(NamedTuple):
    """A batch: some rows of a part."""

    part: int
    rows: Tensor  # (B,) int64, positions in the data set
    is_last: bool  # of its part


class Plan:
    """The parts of an extraction and their batches, a function of the data and settings alone.

    So the vectors, whose last bits depend on what is computed together, are those of an
    uninterrupted run whatever was computed before, and by whichever process.
    """

    def __init__(self, lengths: Tensor, rows_per_part: int, batch_size: int) -> None:
        self.lengths, self.rows_per_part, self.batch_size = lengths, rows_per_part, batch_size

    @property
    def num_parts(self) -> int:
        return -(-len(self.lengths) // self.rows_per_part)

    def rows(self, part: int) -> range:
        """Return the rows of a part."""
        start = part * self.rows_per_part
        return range(start, min(start + self.rows_per_part, len(self.lengths)))

    def longest_first(self, parts: Sequence[int]) -> list[int]:
        """Move the part with the longest row to the front: where memory is short, it shows there.

        >>> Plan(torch.tensor([1.0, 2, 9, 3, 4, 4]), 2, 1).longest_first([0, 1, 2])
        [1, 0, 2]
        """
        if not parts:
            return []
        first = max(parts, key=lambda part: self._part_lengths(part).max())
        return [first, *(part for part in parts if part != first)]

    def batches(self, parts: Sequence[int]) -> Iterator[PlannedBatch]:
        """Yield the batches of some parts, in each part those with the longest rows first."""
        for part in parts:
            order = self._part_lengths(part).argsort(descending=True, stable=True)
            batches = (order + self.rows(part).start).split(self.batch_size)
            for number, rows in enumerate(batches, start=1):
                yield PlannedBatch(part, rows, number == len(batches))

    def _part_lengths(self, part: int) -> Tensor:
        rows = self.rows(part)
        return self.lengths[rows.start : rows.stop]


def share_of(parts: Sequence[int], rank: int, size: int) -> list[int]:
    """Return the parts of one process.

    >>> share_of([3, 4, 7, 9, 10], 1, 2)
    [4, 9]
    """
    return list(parts[rank::size])


def no_lengths(num_rows: int) -> Tensor:
    """Return lengths for batches in the table's order."""
    return torch.zeros(num_rows)
