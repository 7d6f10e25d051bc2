"""Cross-modal retrieval: the rank of the relevant items among all items of another modality."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fusionzoo.datasets import PairedDataset
from fusionzoo.errors import FusionZooError

from .statistics import LEVEL, Interval

Codes = NDArray[np.int64]
PLAIN = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_integer)
GROUP = "group"
_cache: WeakKeyDictionary[PairedDataset, RelevanceLabels] = WeakKeyDictionary()
CELLS = 2**24  # similarities computed at a time: 64 MB
RESAMPLES = 1000
AT = (1, 5, 10)
TIE = 1e-6  # cosines this close count as ties, which worsen the relevant item's rank
FEW = 32  # relevant items per query up to which counting is faster than sorting
NAMES = (*(f"recall@{k}" for k in AT), "mrr", "map", "ndcg@10")


class Relevance(NamedTuple):
    """Relevance labels of B samples."""

    content: Mapping[str, Tensor] = {}  # modality -> int64 (B,); equal codes: equal content
    groups: Tensor | None = None  # int64 (B,); equal codes: the same group


class RelevanceLabels:
    """Relevance labels by sample: equal codes mean equal content, or the same group.

    Content is compared by cells of the table: the same text, the same path, the same bytes.
    """

    def __init__(self, dataset: PairedDataset) -> None:
        self.content = {name: codes(dataset.chosen(name)) for name in dataset.modalities}
        has_group = GROUP in dataset.table.column_names
        self.groups = codes(dataset.chosen(GROUP)) if has_group else None
        self._row_of = {sample_id: row for row, sample_id in enumerate(dataset.ids)}

    def of(self, ids: Sequence[str]) -> Relevance:
        """Return the labels of some samples."""
        rows = [self._row_of[sample_id] for sample_id in ids]
        content = {name: torch.from_numpy(x[rows]) for name, x in self.content.items()}
        groups = None if self.groups is None else torch.from_numpy(self.groups[rows])
        return Relevance(content, groups)


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


def relevance_labels(dataset: PairedDataset) -> RelevanceLabels:
    """Return a data set's labels, computed once: validation asks for them in every epoch."""
    if dataset not in _cache:
        _cache[dataset] = RelevanceLabels(dataset)
    return _cache[dataset]


@dataclass(frozen=True)
class Matching:
    """Distinct queries and gallery items, as rows of the samples, and which are relevant."""

    queries: Codes  # (Q,) a row of each
    gallery: Codes  # (A,)
    _labels_of_queries: Any  # sparse (Q, labels): what a query and its relevant items share
    _labels_of_gallery: Any  # sparse (labels, A)

    def relevant(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return the relevant items of queries start to stop, padded: columns and mask (B, T)."""
        pairs = (self._labels_of_queries[start:stop] @ self._labels_of_gallery).tocoo()
        rows, columns = pairs.row, pairs.col
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
    queries: Sequence[Codes], gallery: Sequence[Codes], labels: Codes | None = None
) -> Matching:
    """Match queries and items that stand in the same row or share a label: codes (N,) each.

    Rows of equal codes are one query, or one item. A query is what several modalities give if
    `queries` has several codes.
    """
    count = len(gallery[0])
    labels = np.arange(count) if labels is None else np.unique(labels, return_inverse=True)[1]
    first_query, query_of = _distinct(queries)
    first_item, item_of = _distinct(gallery)
    width = int(labels.max(initial=0)) + 1
    labels_of_queries = _sparse(query_of, labels, (len(first_query), width))
    labels_of_gallery = _sparse(labels, item_of, (width, len(first_item)))
    return Matching(first_query, first_item, labels_of_queries, labels_of_gallery)


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


class Scores(NamedTuple):
    """Figures of each query (Q,), and the row of the samples at which it stands."""

    rows: NDArray[np.int64]
    values: dict[str, NDArray[np.float64]]  # of NAMES, and `rank` of the first relevant item


def retrieval_figures(
    embeddings: Mapping[str, Tensor],
    present: Tensor,
    *,
    content: Mapping[str, Tensor] | None = None,
    groups: Tensor | None = None,
) -> dict[str, float]:
    """Return recall@1, 5, 10, median rank, MRR, mAP and nDCG@10 of every pair of modalities.

    `embeddings` maps each modality to (N, D); `present` (N, M) has its columns in that order, and
    only samples that have both modalities count, as queries and as items. Names are
    `image_to_text.recall@1`; those without a direction are means over all directions.

    `content` holds codes (N,) by modality, `groups` codes (N,): samples of equal content are one
    query and one item, and an item is relevant if its content is paired with the query's in any
    sample, or in a sample of the same group. recall@k is the share of queries with a relevant
    item among the first k.
    """
    every = direction_scores(embeddings, present, content, groups)
    by_direction = {direction: summary(scores) for direction, scores in every.items()}
    lines = list(by_direction.values())
    mean = {name: sum(line[name] for line in lines) / len(lines) for name in lines[0]}
    return mean | {
        f"{direction}.{name}": x
        for direction, figures in by_direction.items()
        for name, x in figures.items()
    }


def retrieval_intervals(
    embeddings: Mapping[str, Tensor],
    present: Tensor,
    *,
    content: Mapping[str, Tensor] | None = None,
    groups: Tensor | None = None,
) -> dict[str, dict[str, Interval]]:
    """Return each direction's figures with 95 % intervals, see `retrieval_figures`.

    With three modalities or more also queries of all others together, `audio+text_to_image`. The
    intervals come from a bootstrap over queries, of whole groups where there are some.
    """
    clusters = None if groups is None else groups.cpu().numpy()
    every = direction_scores(embeddings, present, content, groups)
    if len(embeddings) > 2:
        every |= direction_scores(embeddings, present, content, groups, together=True)
    return {direction: intervals(scores, clusters) for direction, scores in every.items()}


def direction_scores(
    embeddings: Mapping[str, Tensor],
    present: Tensor,
    content: Mapping[str, Tensor] | None = None,
    groups: Tensor | None = None,
    *,
    together: bool = False,
) -> dict[str, Scores]:
    """Return the scores of each direction; with `together` of queries by all other modalities."""
    columns = {name: present[:, i].bool().cpu().numpy() for i, name in enumerate(embeddings)}
    scores: dict[str, Scores] = {}
    pairs = [(tuple(n for n in embeddings if n != to), to) for to in embeddings]
    if not together:
        both = combinations(embeddings, 2)
        pairs = [((x,), y) for first, second in both for x, y in ((first, second), (second, first))]
    for names, to in pairs:
        mask = np.logical_and.reduce([columns[name] for name in (*names, to)])
        if not mask.any():
            continue
        labels = None if groups is None else groups.cpu().numpy()[mask]
        codes = [content_of(content, name, mask) for name in names]
        matching = match(codes, [content_of(content, to, mask)], labels)
        query = sum(F.normalize(embeddings[n][mask].float(), dim=-1) for n in names)
        assert isinstance(query, Tensor)
        ranking = ranked(query, embeddings[to][mask], matching)
        direction = f"{'+'.join(names)}_to_{to}"
        scores[direction] = ranking._replace(rows=np.flatnonzero(mask)[ranking.rows])
    if not scores and not together:
        raise FusionZooError("no sample has two modalities, so there is nothing to retrieve")
    return scores


def ranked(queries: Tensor, gallery: Tensor, matching: Matching) -> Scores:
    """Score each distinct query by the ranks of its relevant items: (N, D), (N, D).

    Ties and NaN count against the relevant items. Runs in blocks of queries.
    """
    a = F.normalize(queries.float(), dim=-1)[matching.queries]
    b = F.normalize(gallery.float(), dim=-1)[matching.gallery]
    parts: list[dict[str, Tensor]] = []
    size = max(1, CELLS // max(1, len(b)))
    for start in range(0, len(a), size):
        stop = min(start + size, len(a))
        cosines = a[start:stop] @ b.T
        columns, mask = matching.relevant(start, stop)
        parts.append(figures_of(relevant_ranks(cosines, columns.to(a.device), mask.to(a.device))))
    values = {name: torch.cat([x[name] for x in parts]).cpu().numpy() for name in parts[0]}
    has_relevant = values["rank"] > 0  # a query without any relevant item says nothing
    return Scores(matching.queries[has_relevant], {n: x[has_relevant] for n, x in values.items()})


def summary(scores: Scores) -> dict[str, float]:
    """Return the means of the figures, and the median rank."""
    figures = {name: float(scores.values[name].mean()) for name in NAMES}
    return figures | {"median_rank": float(np.median(scores.values["rank"]))}


def intervals(scores: Scores, clusters: NDArray[np.int64] | None = None) -> dict[str, Interval]:
    """Return the means of the figures with percentile intervals of a bootstrap over queries.

    `clusters` (N,) are codes of the samples; queries of one cluster are drawn together.
    """
    values = np.stack([scores.values[name] for name in NAMES], axis=1)
    keys = scores.rows if clusters is None else clusters[scores.rows]
    _, place = np.unique(keys, return_inverse=True)
    count = int(place.max()) + 1
    sums = np.stack([np.bincount(place, x, count) for x in values.T], axis=1)
    sizes = np.bincount(place, minlength=count).astype(np.float64)
    draw, means = np.random.default_rng(0), np.empty((RESAMPLES, len(NAMES)))
    for resample in range(RESAMPLES):  # one at a time, so memory does not grow with the queries
        weights = np.bincount(draw.integers(0, count, count), minlength=count)
        means[resample] = weights @ sums / (weights @ sizes)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    bounds = zip(values.mean(0).tolist(), low.tolist(), high.tolist(), strict=True)
    return {name: Interval(*of_one) for name, of_one in zip(NAMES, bounds, strict=True)}


def any_pair(present: Tensor) -> bool:
    """Whether any sample has two modalities: (N, M)."""
    return bool((present.sum(1) > 1).any())


def relevant_ranks(cosines: Tensor, columns: Tensor, mask: Tensor) -> Tensor:
    """Return the ranks, from 1, of each query's relevant items, best first, 0 as padding: (B, T).

    Items that are not relevant and (nearly) as near come first. Cosines (B, A), columns (B, T).
    """
    cosines = cosines.nan_to_num(nan=torch.inf)
    relevant = cosines.gather(1, columns)
    is_nothing = (relevant == torch.inf) | ~mask
    descending = relevant.masked_fill(is_nothing, -torch.inf).sort(dim=1, descending=True).values
    thresholds = descending - TIE
    padded = relevant.masked_fill(~mask, torch.inf).sort(dim=1).values
    relevant_below = torch.searchsorted(padded, thresholds.contiguous())
    if columns.shape[1] <= FEW:
        counts = [(cosines < t[:, None]).sum(1) for t in thresholds.unbind(1)]
        below = torch.stack(counts, dim=1)
    else:
        below = torch.searchsorted(cosines.sort(dim=1).values, thresholds.contiguous())
    num_relevant = mask.sum(1, keepdim=True)
    at_least = cosines.shape[1] - below  # all items that are not farther, relevant ones too
    wrong_ahead = at_least - (num_relevant - relevant_below)
    places = torch.arange(1, columns.shape[1] + 1, device=cosines.device)
    return torch.where(places <= num_relevant, wrong_ahead + places, 0)


def figures_of(ranks: Tensor) -> dict[str, Tensor]:
    """Return the figures of each query from the ranks of its relevant items (B, T)."""
    is_relevant, values = ranks > 0, ranks.double().clamp(min=1)
    places = torch.arange(1, ranks.shape[1] + 1, device=ranks.device)
    count = is_relevant.sum(1).clamp(min=1)
    gains = (1 + values).log2().reciprocal() * (is_relevant & (ranks <= AT[-1]))
    ideal = (1 + places.double()).log2().reciprocal()[: AT[-1]].cumsum(0)
    first = ranks[:, 0]
    return {
        **{f"recall@{k}": ((first <= k) & (first > 0)).double() for k in AT},
        "mrr": values[:, 0].reciprocal(),
        "map": (places / values * is_relevant).sum(1) / count,
        "ndcg@10": gains.sum(1) / ideal[count.clamp(max=len(ideal)) - 1],
        "rank": first.double(),
    }
