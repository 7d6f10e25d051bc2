"""Which answers are right: those paired with the query, of equal content, or of the same group.

Shapes: `N` samples, `Q` distinct queries, `A` distinct answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from fusionzoo.datasets import PairedDataset

Codes = NDArray[np.int64]
PLAIN = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_integer)
GROUP = "group"


class AnswerKeys:
    """Codes by sample: equal ones mean equal content of a modality, or the same group.

    Content is compared by cells of the table: the same text, the same path, the same bytes.
    """

    def __init__(self, dataset: PairedDataset) -> None:
        self.content = {name: codes(dataset.chosen(name)) for name in dataset.modalities}
        has_group = GROUP in dataset.table.column_names
        self.groups = codes(dataset.chosen(GROUP)) if has_group else None
        self._row_of = {sample_id: row for row, sample_id in enumerate(dataset.ids)}

    @cached_property
    def all_distinct(self) -> bool:
        """Whether each sample is the only right answer to its query."""
        every = [*self.content.values(), *([] if self.groups is None else [self.groups])]
        return all(len(np.unique(x[x >= 0])) == int((x >= 0).sum()) for x in every)

    def of(self, ids: Sequence[str]) -> dict[str, Tensor]:
        """Return `content/<modality>` and `group` of some samples, int64 (B,).

        Nothing where each sample is the only right answer to its query, which is faster to rank.
        """
        if self.all_distinct:
            return {}
        rows = [self._row_of[sample_id] for sample_id in ids]
        named = {f"content/{name}": x for name, x in self.content.items()}
        if self.groups is not None:
            named[GROUP] = self.groups
        return {name: torch.from_numpy(x[rows]) for name, x in named.items()}


def codes(cells: Any) -> Codes:
    """Number the distinct cells of a column; -1 where it is empty."""
    column = cells.combine_chunks() if isinstance(cells, pa.ChunkedArray) else cells
    if _is_matrix(column):
        values = pc.list_flatten(column).to_numpy(zero_copy_only=False)
        rows = np.ascontiguousarray(values.reshape(len(column), -1))
        whole_rows = rows.view(np.dtype((np.void, rows.dtype.itemsize * rows.shape[1])))
        return np.unique(whole_rows, return_inverse=True)[1].reshape(-1).astype(np.int64)
    if not any(is_type(column.type) for is_type in PLAIN):
        text = [None if cell is None else repr(cell) for cell in column.to_pylist()]
        column = pa.array(text, pa.string())
    indices = pc.dictionary_encode(column).indices
    return np.asarray(indices.fill_null(-1).to_numpy(zero_copy_only=False), np.int64)


def _is_matrix(column: Any) -> bool:
    """Whether cells are vectors of one length, which need no Python lists to be compared."""
    kind = column.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    is_list = is_list or pa.types.is_fixed_size_list(kind)
    if not is_list or column.null_count:
        return False
    if not (pa.types.is_floating(kind.value_type) or pa.types.is_integer(kind.value_type)):
        return False
    widths = pc.unique(pc.list_value_length(column)).to_pylist()
    return len(widths) == 1 and widths[0] > 0


_cache: WeakKeyDictionary[PairedDataset, AnswerKeys] = WeakKeyDictionary()


def answer_keys(dataset: PairedDataset) -> AnswerKeys:
    """Return a data set's keys, computed once: validation asks for them in every epoch."""
    if dataset not in _cache:
        _cache[dataset] = AnswerKeys(dataset)
    return _cache[dataset]


@dataclass(frozen=True)
class Matching:
    """Distinct queries and answers, as rows of the samples, and which answers are right."""

    queries: Codes  # (Q,) a row of each
    answers: Codes  # (A,)
    _items_of_queries: Any  # sparse (Q, items): what a query and its right answers share
    _items_of_answers: Any  # sparse (items, A)
    without_self: bool

    def right(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return the right answers of queries start to stop, padded: columns and mask (B, T)."""
        pairs = (self._items_of_queries[start:stop] @ self._items_of_answers).tocoo()
        rows, columns = pairs.row, pairs.col
        if self.without_self:
            others = columns != rows + start
            rows, columns = rows[others], columns[others]
        order = np.argsort(rows, kind="stable")
        rows, columns = rows[order], columns[order]
        counts = np.bincount(rows, minlength=stop - start)
        most = max(1, int(counts.max(initial=0)))
        places = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        padded = np.zeros((stop - start, most), np.int64)
        mask = np.zeros((stop - start, most), bool)
        padded[rows, places], mask[rows, places] = columns, True
        return torch.from_numpy(padded), torch.from_numpy(mask)


def match(
    queries: Sequence[Codes], answers: Sequence[Codes], items: Codes | None = None
) -> Matching:
    """Match queries and answers that stand in the same row or share an item: codes (N,) each.

    Rows of equal codes are one query, or one answer. A query is what several modalities give if
    `queries` has several codes.
    """
    count = len(answers[0])
    items = np.arange(count) if items is None else np.unique(items, return_inverse=True)[1]
    first_query, query_of = _distinct(queries)
    first_answer, answer_of = _distinct(answers)
    width = int(items.max(initial=0)) + 1
    return Matching(
        first_query,
        first_answer,
        _sparse(query_of, items, (len(first_query), width)),
        _sparse(items, answer_of, (width, len(first_answer))),
        without_self=False,
    )


def match_others(content: Codes, items: Codes) -> Matching:
    """Match each sample with the others that share its item, say its class; copies are one."""
    first, place_of = _distinct([content])
    items = np.unique(items, return_inverse=True)[1]
    width = int(items.max(initial=0)) + 1
    table = _sparse(place_of, items, (len(first), width))
    return Matching(first, first, table, table.T.tocsr(), without_self=True)


def content_of(content: Mapping[str, Tensor] | None, name: str, rows: NDArray[np.bool_]) -> Codes:
    """Return a modality's codes in some rows; each row is its own content where none are known."""
    if content is None or name not in content:
        return np.arange(int(rows.sum()))
    return np.asarray(content[name].cpu().numpy()[rows], np.int64)


def _distinct(parts: Sequence[Codes]) -> tuple[Codes, Codes]:
    """Return the first row of each distinct combination, and the combination of each row."""
    stacked = np.stack(parts, axis=1)
    _, first, inverse = np.unique(stacked, axis=0, return_index=True, return_inverse=True)
    return first.astype(np.int64), inverse.reshape(-1).astype(np.int64)


def _sparse(rows: Codes, columns: Codes, shape: tuple[int, int]) -> Any:
    from scipy.sparse import coo_array

    table = coo_array((np.ones(len(rows), np.float32), (rows, columns)), shape=shape).tocsr()
    table.sum_duplicates()
    return table
