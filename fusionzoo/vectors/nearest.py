"""Exact nearest neighbours in blocks of rows: memory does not grow with the file.

Shapes: `Q` queries, `N` rows, `D` width, `k` results.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .file import Block, unit

COPIED = 0.25  # of a block: where fewer rows are allowed, comparing all of them would take longer


def nearest(
    blocks: Iterable[Block],
    queries: Tensor,
    k: int,
    allowed: Tensor | None = None,
    *,
    are_units: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return cosines and rows of the k nearest, both (Q, k), best first, equal ones by row.

    `queries` (Q, D); `allowed` (N,) bool restricts the rows. `are_units`: the blocks' vectors have
    length 1. Where fewer than k rows are allowed, the last cosines are -inf and their rows -1.
    """
    queries = unit(queries)
    best = torch.full((len(queries), 0), -torch.inf)
    best_rows = torch.full((len(queries), 0), -1, dtype=torch.int64)
    for start, vectors, usable in blocks:
        if allowed is not None:
            usable = usable & allowed[start : start + len(usable)]
        rows = usable.nonzero()[:, 0]
        if not len(rows):
            continue
        if len(rows) < COPIED * len(usable):
            vectors, start_rows = vectors[rows], start + rows
            usable = usable[rows]
        else:
            start_rows = torch.arange(start, start + len(usable))
        cosines = queries @ vectors.T
        if not are_units:  # the products are divided: a division of the vectors would copy them
            cosines = (cosines / vectors.norm(dim=1).clamp_(min=1e-12)).nan_to_num_(nan=0.0)
        cosines.masked_fill_(~usable, -torch.inf)
        top = cosines.topk(min(k, len(rows)), dim=1)
        best = torch.cat([best, top.values], dim=1)
        best_rows = torch.cat([best_rows, start_rows[top.indices]], dim=1)
        best, best_rows = _keep(best, best_rows, k)
    missing = k - best.shape[1]
    if missing > 0:
        best = torch.cat([best, best.new_full((len(best), missing), -torch.inf)], dim=1)
        best_rows = torch.cat([best_rows, best_rows.new_full((len(best), missing), -1)], dim=1)
    return best, best_rows


def _keep(cosines: Tensor, rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Sort candidates by cosine, equal ones by row, and keep k."""
    by_row = rows.argsort(dim=1)
    rows, cosines = rows.gather(1, by_row), cosines.gather(1, by_row)
    order = cosines.argsort(dim=1, descending=True, stable=True)[:, :k]
    return cosines.gather(1, order), rows.gather(1, order)


def array_blocks(
    vectors: NDArray[np.float32], usable: NDArray[np.bool_], size: int
) -> Iterable[Block]:
    """Yield an array, or a file that is mapped copy-on-write, in blocks without a copy."""
    for start in range(0, len(vectors), size):
        rows = slice(start, start + size)
        yield Block(start, torch.from_numpy(vectors[rows]), torch.from_numpy(usable[rows]))
