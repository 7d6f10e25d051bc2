"""Read vectors of a file of embeddings in blocks, and find exact nearest neighbours."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fusionzoo.datasets.tables.arrow import is_list
from fusionzoo.embeddings.files import EmbeddingFile, matrix_of, open_embedding_file
from fusionzoo.errors import FusionZooError, check_known, explained, located

BLOCK = 1 << 15  # rows in memory that are compared at a time; torch starts threads for more
READ = 1 << 14  # rows read at a time
OTHER_LISTS = ("probabilities", "weights")  # columns of lists that are no embeddings
ALIGNED = "aligned"  # the mean of a row's `aligned_<modality>` vectors
FEW = 100  # rows; the 99th percentile of fewer is little more than their maximum
SAMPLED = 8192  # rows from which percentiles of cosines are measured
NEAR = 0.99  # quantile of the cosines that has a score of 1; the median has 0
KEPT = 256  # bytes of a cell; columns of larger ones, such as texts, are read again for each search
COPIED = 0.25  # of a block: where fewer rows are allowed, comparing all of them would take longer


class VectorBlock(NamedTuple):
    """Consecutive rows of a column of vectors."""

    start: int  # row of the first
    vectors: Tensor  # (B, D) float32
    usable: Tensor  # (B,) bool; False where the row lacks the vector


@dataclass(frozen=True)
class VectorFile:
    """A file of embeddings: one row per sample, vectors in columns of lists."""

    path: Path
    rows: int
    dims: dict[str, int]  # column of vectors -> width
    columns: list[str]  # the others
    stored: EmbeddingFile = field(repr=False, compare=False)
    metadata: dict[str, Any] = field(default_factory=dict)
    keeps: bool = False  # whether columns that are no vectors are read once and stay in memory

    def check_column(self, name: str) -> None:
        """Raise an error that lists the columns of vectors, if there is none of this name."""
        check_known(name, self.dims, f"{self.path} has no vectors {name!r}")

    def modality(self, name: str) -> str:
        """Return the modality whose presence decides whether a row has a vector, or ""."""
        modality = name.removeprefix(f"{ALIGNED}_")
        return modality if f"present_{modality}" in self.columns else ""

    def blocks(self, name: str, size: int = READ) -> Iterator[VectorBlock]:
        """Yield the vectors of a column in blocks, so that memory does not grow with the file."""
        self.check_column(name)
        start = 0
        for batch in self.batches(self._needed(name), size):
            yield VectorBlock(start, *self._decode(batch, name))
            start += len(batch)

    def matrix(self, name: str) -> tuple[Tensor, Tensor]:
        """Return all vectors of a column, (N, D) float32, and which rows have one, (N,) bool."""
        self.check_column(name)
        vectors = torch.empty(self.rows, self.dims[name])
        usable = torch.zeros(self.rows, dtype=torch.bool)
        for block in self.blocks(name):
            rows = slice(block.start, block.start + len(block.usable))
            vectors[rows], usable[rows] = block.vectors, block.usable
        return vectors, usable

    def parts(self, name: str) -> list[str]:
        """Return the columns of which a column that is not stored is the mean."""
        is_stored = name != ALIGNED or ALIGNED in self.stored.schema.names
        return [] if is_stored else [x for x in self.dims if x.startswith(f"{ALIGNED}_")]

    def has_parts(self, name: str) -> Tensor:
        """Return of which of its parts each row's vector is the mean, bool (N, M)."""
        parts, start = self.parts(name), 0
        has = torch.zeros(self.rows, len(parts), dtype=torch.bool)
        for batch in self.batches(self._needed(name)):
            usable = torch.stack([self._decode(batch, part)[1] for part in parts], dim=1)
            has[start : start + len(batch)] = usable
            start += len(batch)
        return has

    def some(self, name: str, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the vectors of some rows, (n, D) float32, and which have one, (n,) bool."""
        self.check_column(name)
        wanted, places = np.unique(np.asarray(rows, np.int64), return_inverse=True)
        with self._one_line_errors():
            table = self.stored.take(wanted.tolist(), self._needed(name)).combine_chunks()
        batches = table.to_batches() or [pa.RecordBatch.from_pylist([], table.schema)]
        vectors, usable = self._decode(batches[0], name)
        return vectors[places], usable[places]

    def batches(self, columns: Sequence[str], size: int = READ) -> Iterator[pa.RecordBatch]:
        """Yield some columns in batches of rows."""
        if {*columns} <= {*self._kept.column_names}:
            yield from self._kept.select(columns).to_batches(size)
            return
        with self._one_line_errors():
            yield from self.stored.batches(columns, size)

    def take(self, rows: Sequence[int], columns: Sequence[str]) -> list[dict[str, Any]]:
        """Return some cells of some rows; only their row groups are read."""
        in_memory = {*self._kept.column_names}
        others = [name for name in columns if name not in in_memory]
        kept = self._kept.select([name for name in columns if name in in_memory])
        cells = kept.take(np.array(rows, np.int64)).to_pylist() if in_memory else [{} for _ in rows]
        if not others:
            return cells
        wanted = sorted(set(rows))
        with self._one_line_errors():
            read = self.stored.take(wanted, others).to_pylist()
        by_row = dict(zip(wanted, read, strict=True))
        every = [cell | by_row[row] for row, cell in zip(rows, cells, strict=True)]
        return [{name: cell[name] for name in columns} for cell in every]

    @cached_property
    def _kept(self) -> pa.Table:
        """The columns in memory: none of them, unless the file `keeps` them."""
        if not self.keeps:
            return pa.table({})
        with self._one_line_errors():
            names = [name for name in self.columns if _width_of_cells(self.stored, name) <= KEPT]
            batches = self.stored.batches(names, READ)
            schema = pa.schema([self.stored.schema.field(name) for name in names])
            return pa.Table.from_batches(batches, schema).combine_chunks()

    def rows_of(self, ids: Sequence[str]) -> list[int]:
        """Return the rows of ids."""
        if not ids:
            return []
        wanted, start = {sample_id: -1 for sample_id in ids}, 0
        values = pa.array(list(wanted), pa.string())
        for batch in self.batches(["id"]):
            column = batch.column(0).cast(pa.string())
            for row in pc.indices_nonzero(pc.is_in(column, values)).to_pylist():
                wanted[column[row].as_py()] = start + row
            start += len(batch)
        for sample_id, row in wanted.items():
            if row < 0:
                raise FusionZooError(f"{self.path} has no row with the id {sample_id!r}")
        return [wanted[sample_id] for sample_id in ids]

    def state(self) -> dict[str, Any]:
        """Return what changes when the file is written anew."""
        stats = [path.stat() for path in self.stored.files]
        modified = max(about.st_mtime_ns for about in stats)
        size = sum(about.st_size for about in stats)
        return {"bytes": size, "modified_ns": modified, "rows": self.rows}

    def _one_line_errors(self) -> AbstractContextManager[None]:
        return explained(f"{self.path} cannot be read", pa.ArrowException, OSError)

    def _needed(self, name: str) -> list[str]:
        """Return the stored columns from which the vectors of a column are decoded."""
        if parts := self.parts(name):
            return list(dict.fromkeys(x for part in parts for x in self._needed(part)))
        presence = [f"present_{self.modality(name)}"] if self.modality(name) else []
        return [name, *presence]

    def _decode(self, batch: pa.RecordBatch, name: str) -> tuple[Tensor, Tensor]:
        """Return a column's vectors (B, D), zero where a row has none, and which rows have one."""
        if parts := self.parts(name):
            decoded = [self._decode(batch, part) for part in parts]
            total = torch.stack([unit(vectors) for vectors, _ in decoded]).sum(0)
            return total, (total != 0).any(1)
        with located(f"{self.path}: {name!r}"):
            matrix = matrix_of(batch.column(name), self.dims[name])
        matrix = matrix.astype(np.float32, copy=not matrix.flags.writeable)
        vectors = torch.from_numpy(matrix)
        usable = _have_directions(vectors)
        if self.modality(name):
            present = batch.column(f"present_{self.modality(name)}").fill_null(False)
            usable &= torch.from_numpy(np.array(present))
        return (vectors if usable.all() else vectors.masked_fill(~usable[:, None], 0)), usable


def open_vectors(path: str | Path | VectorFile) -> VectorFile:
    """Open a file of embeddings, without reading its vectors."""
    if isinstance(path, VectorFile):
        return path
    path = Path(path)
    damages = (pa.ArrowException, ValueError, OSError)
    with explained(f"{path} cannot be read as embeddings", *damages):
        stored = open_embedding_file(path)
        schema, rows = stored.schema, stored.rows
        metadata = json.loads((schema.metadata or {}).get(b"fusionzoo", b"{}"))
    lists = [x for x in schema if is_list(x.type) and pa.types.is_floating(x.type.value_type)]
    dims = {x.name: _width(stored, x) for x in lists if x.name not in OTHER_LISTS}
    if "id" not in schema.names or not dims:
        raise FusionZooError(
            f"{path} is no file of embeddings: it needs a column `id` and columns of vectors; it"
            f" has {', '.join(schema.names)}"
        )
    columns = [x.name for x in schema if x not in lists]
    aligned = {dim for name, dim in dims.items() if name.startswith(f"{ALIGNED}_")}
    if len(aligned) == 1 and ALIGNED not in dims:
        dims[ALIGNED] = aligned.pop()
    return VectorFile(path, rows, dims, columns, stored, metadata)


def unit(vectors: Tensor) -> Tensor:
    """Scale vectors to length 1; zeros stay zeros."""
    return F.normalize(vectors.float(), dim=-1)


def _have_directions(vectors: Tensor) -> Tensor:
    """Return which rows are finite and not all zero, bool (N,)."""
    lengths = vectors.norm(dim=1)
    usable = lengths.isfinite() & (lengths > 0)
    if not usable.all():  # the length of very large or small numbers overflows
        doubtful = vectors[~usable]
        usable[~usable] = doubtful.isfinite().all(1) & (doubtful != 0).any(1)
    return usable


def _width_of_cells(stored: EmbeddingFile, name: str) -> float:
    """Return the bytes of a column's cells on average over the first rows."""
    first = next(iter(stored.batches([name], 64)), None)
    return first.nbytes / max(1, len(first)) if first is not None else 0


def _width(stored: EmbeddingFile, column: pa.Field) -> int:
    """Return a fixed-size list's width, else that of the first vector."""
    if pa.types.is_fixed_size_list(column.type):
        return int(column.type.list_size)
    for batch in stored.batches([column.name], 1024):
        rows = batch.column(0).drop_null()
        if len(rows):
            return len(rows[0])
    return 0


class Scale(NamedTuple):
    """What each query's cosines to rows with the same parts are compared with."""

    set_of: Tensor  # (N,) each row's set of parts
    median: Tensor  # (Q, P) by set
    spread: Tensor  # (Q, P) from the median to the 99th percentile

    def scores(self, cosines: Tensor, rows: Tensor) -> Tensor:
        """Return the scores (Q, B) of cosines (Q, B) to rows, (B,) or (Q, B)."""
        median, spread = self._of(rows)
        return (cosines - median) / spread

    def cosines(self, scores: Tensor, rows: Tensor) -> Tensor:
        """Return the cosines that `scores` were made of."""
        median, spread = self._of(rows)
        return scores * spread + median

    def _of(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        sets = self.set_of[rows].expand(len(self.median), -1)
        return self.median.gather(1, sets), self.spread.gather(1, sets)


class PartsOfRows:
    """Which parts each row's mean vector has, and how near a query is to such means in general.

    A mean of fewer vectors, or of the query's own modality, has other cosines than a complete one
    whatever its content. A row is therefore compared with what rows that have its parts, and maybe
    more, would get if they had those alone: 0 is their median, 1 their 99th percentile. Mean and
    standard deviation would not do: such cosines are skewed, and hits come from their upper tail.
    Where fewer than 100 rows have all of a set's parts, vectors of the parts are paired at random.
    """

    def __init__(self, file: VectorFile, column: str) -> None:
        self.has = file.has_parts(column)  # (N, M)
        self.modalities = [file.modality(x) or x.partition("_")[2] for x in file.parts(column)]
        self.sets, self.set_of = self.has.unique(dim=0, return_inverse=True)  # (P, M) bool, (N,)
        self.is_even = int(self.sets.any(1).sum()) < 2  # rows that have a vector have equal parts
        if not self.is_even:
            self._sample(file, column)

    def scale(self, queries: Tensor) -> Scale:
        """Return what makes cosines of queries (Q, D) comparable between sets."""
        medians, spreads = [], []
        for members in self.sets:
            vectors, weights = self._means(members)
            cosines = unit(queries) @ unit(vectors).T
            medians.append(_quantile(cosines, weights, 0.5))
            spreads.append(_quantile(cosines, weights, NEAR) - medians[-1])
        spread = torch.stack(spreads, dim=1).clamp(min=1e-6)  # 0 where all rows are equal
        return Scale(self.set_of, torch.stack(medians, dim=1), spread)

    def _sample(self, file: VectorFile, column: str) -> None:
        """Draw rows of each set; each stands for its share of the set."""
        draw = torch.Generator().manual_seed(0)
        most = max(FEW, SAMPLED // len(self.sets))
        members = [(self.set_of == place).nonzero()[:, 0] for place in range(len(self.sets))]
        chosen = [rows[torch.randperm(len(rows), generator=draw)[:most]] for rows in members]
        rows = torch.cat(chosen)
        sizes = [(len(x), len(y)) for x, y in zip(chosen, members, strict=True)]
        self._weights = torch.cat([torch.full((drawn,), of / drawn) for drawn, of in sizes])
        parts = [unit(file.some(part, rows.tolist())[0]) for part in file.parts(column)]
        self._vectors, self._sampled = torch.stack(parts, dim=1), self.has[rows]  # (S, M, D)

    def _means(self, members: Tensor) -> tuple[Tensor, Tensor]:
        """Return sums of the vectors of some parts, (S, D), and their rows' weights."""
        rows = self._sampled[:, members].all(1)
        if not members.any() or int(rows.sum()) >= FEW:
            return self._vectors[rows][:, members].sum(1), self._weights[rows]
        draw, total = torch.Generator().manual_seed(0), torch.zeros(1)
        for part in members.nonzero()[:, 0].tolist():
            weights = self._weights * self._sampled[:, part]
            total = total + self._vectors[weights.multinomial(1024, True, generator=draw), part]
        return total, torch.ones(len(total))


def _quantile(values: Tensor, weights: Tensor, level: float) -> Tensor:
    """Return a quantile of each row of values (Q, S), of which each counts by its weight (S,)."""
    ordered, order = values.sort(dim=1)
    below = (weights[order].cumsum(1) < level * weights.sum()).sum(1, keepdim=True)
    return ordered.gather(1, below.clamp(max=len(weights) - 1))[:, 0]


def nearest(
    blocks: Iterable[VectorBlock],
    queries: Tensor,
    k: int,
    allowed: Tensor | None = None,
    *,
    are_units: bool = False,
    scale: Scale | None = None,
) -> tuple[Tensor, Tensor]:
    """Return cosines and rows of the k nearest, both (Q, k), best first, equal ones by row.

    `queries` (Q, D); `allowed` (N,) bool restricts the rows. `are_units`: the blocks' vectors have
    length 1. With `scale`, its scores rank instead of cosines. Where fewer than k rows are allowed,
    the last cosines are -inf and their rows -1.
    """
    queries = unit(queries)
    best = torch.full((len(queries), 0), -torch.inf)
    best_rows = torch.full((len(queries), 0), -1, dtype=torch.int64)
    for start, vectors, usable in blocks:
        if allowed is not None:
            usable = usable & allowed[start : start + len(usable)]
        count = int(np.count_nonzero(usable.numpy()))
        if not count:
            continue
        rows = torch.arange(start, start + len(usable))
        if count < COPIED * len(usable):
            vectors, rows, usable = vectors[usable], rows[usable], usable[usable]
        cosines = _products(queries, vectors)
        if not are_units:  # the products are divided: a division of the vectors would copy them
            cosines = (cosines / vectors.norm(dim=1).clamp_(min=1e-12)).nan_to_num_(nan=0.0)
        if scale is not None:
            cosines = scale.scores(cosines, rows)
        if count < len(usable):
            cosines.masked_fill_(~usable, -torch.inf)
        top = cosines.topk(min(k, count), dim=1)
        best = torch.cat([best, top.values], dim=1)
        best_rows = torch.cat([best_rows, rows[top.indices]], dim=1)
        best, best_rows = _keep(best, best_rows, k)
    missing = k - best.shape[1]
    if missing > 0:
        best = torch.cat([best, best.new_full((len(best), missing), -torch.inf)], dim=1)
        best_rows = torch.cat([best_rows, best_rows.new_full((len(best), missing), -1)], dim=1)
    return best, best_rows


def _products(queries: Tensor, vectors: Tensor) -> Tensor:
    """Return products of queries (Q, D) and vectors (B, D), both on the CPU: (Q, B).

    NumPy multiplies by a single vector 3 times faster than torch, and equal rows to equal products.
    """
    if len(queries) > 1:
        return queries @ vectors.T
    rows, query = vectors.numpy(), queries[0].numpy()
    has_vecdot = hasattr(np, "vecdot")  # since NumPy 2
    products = np.vecdot(rows, query) if has_vecdot else np.einsum("bd,d->b", rows, query)
    return torch.from_numpy(products)[None]


def _keep(cosines: Tensor, rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Sort candidates by cosine, equal ones by row, and keep k."""
    by_row = rows.argsort(dim=1)
    rows, cosines = rows.gather(1, by_row), cosines.gather(1, by_row)
    order = cosines.argsort(dim=1, descending=True, stable=True)[:, :k]
    return cosines.gather(1, order), rows.gather(1, order)


def array_blocks(
    vectors: NDArray[np.float32], usable: NDArray[np.bool_], size: int
) -> Iterable[VectorBlock]:
    """Yield an array, or a file that is mapped copy-on-write, in blocks without a copy."""
    for start in range(0, len(vectors), size):
        rows = slice(start, start + size)
        yield VectorBlock(start, torch.from_numpy(vectors[rows]), torch.from_numpy(usable[rows]))
