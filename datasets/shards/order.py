"""Orders of samples that are stored in blocks: each block is read about once per epoch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Blocking(NamedTuple):
    """The block of its shards that each of N samples is in, int64 (N,), and a window's size.

    A window is a number of blocks whose samples are shuffled together; a process keeps as many
    blocks in memory.
    """

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
