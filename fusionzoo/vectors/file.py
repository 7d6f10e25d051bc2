"""Read a file of embeddings: which vectors it has, and those vectors in blocks of rows.

`evaluation/embeddings.py` reads one column whole. Shapes: `N` rows, `D` width.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from torch import Tensor

from fusionzoo.errors import FusionZooError, did_you_mean, one_line

BLOCK = 1 << 16  # rows in memory that are compared at a time
READ = 1 << 14  # rows read at a time
OTHER_LISTS = ("probabilities", "weights")  # columns of lists that are no embeddings
ALIGNED = "aligned"  # the mean of a row's `aligned_<modality>` vectors


class Block(NamedTuple):
    """Consecutive rows of a column of vectors."""

    start: int  # row of the first
    vectors: Tensor  # (B, D) float32
    usable: Tensor  # (B,) bool; False where the row lacks the vector


@dataclass(frozen=True)
class VectorFile:
    """A Parquet file of embeddings: one row per sample, vectors in columns of lists."""

    path: Path
    rows: int
    dims: dict[str, int]  # column of vectors -> width
    columns: list[str]  # the others, without scales of vectors
    metadata: dict[str, Any] = field(default_factory=dict)

    def check_column(self, name: str) -> None:
        """Raise an error that lists the columns of vectors, if there is none of this name."""
        if name not in self.dims:
            raise FusionZooError(
                f"{self.path} has no vectors {name!r}.{did_you_mean(name, self.dims)}"
                f" It has: {', '.join(self.dims)}"
            )

    def modality(self, name: str) -> str:
        """Return the modality whose presence decides whether a row has a vector, or ""."""
        modality = name.removeprefix(f"{ALIGNED}_")
        return modality if f"present_{modality}" in self.columns else ""

    def blocks(self, name: str, size: int = READ) -> Iterator[Block]:
        """Yield the vectors of a column in blocks, so that memory does not grow with the file."""
        self.check_column(name)
        if name == ALIGNED and ALIGNED not in self._parquet().schema_arrow.names:
            yield from self._mean_blocks(size)
            return
        presence = [f"present_{self.modality(name)}"] if self.modality(name) else []
        start = 0
        for batch in self.batches([name, *presence, *self._scale(name)], size):
            vectors, usable = self._matrix(batch, name)
            for column in presence:
                usable &= torch.from_numpy(
                    batch.column(column).fill_null(False).to_numpy(zero_copy_only=False)
                )
            yield Block(start, vectors, usable & vectors.isfinite().all(1) & (vectors != 0).any(1))
            start += len(batch)

    def matrix(self, name: str) -> tuple[Tensor, Tensor]:
        """Return all vectors of a column, (N, D) float32, and which rows have one, (N,) bool."""
        self.check_column(name)
        vectors = torch.zeros(self.rows, self.dims[name])
        usable = torch.zeros(self.rows, dtype=torch.bool)
        for block in self.blocks(name):
            rows = slice(block.start, block.start + len(block.usable))
            vectors[rows], usable[rows] = block.vectors, block.usable
        return vectors, usable

    def batches(self, columns: Sequence[str], size: int = READ) -> Iterator[pa.RecordBatch]:
        """Yield some columns in batches of rows.

        Row groups are opened one by one: Arrow keeps what it has read of all that it was asked for.
        """
        try:
            parquet, names = self._parquet(), list(columns)
            for group in range(parquet.num_row_groups):
                yield from parquet.iter_batches(size, row_groups=[group], columns=names)
        except (pa.ArrowException, OSError) as error:
            raise FusionZooError(f"{self.path} cannot be read: {one_line(error)}") from error

    def take(self, rows: Sequence[int], columns: Sequence[str]) -> list[dict[str, Any]]:
        """Return some cells of some rows; only their row groups are read."""
        parquet = self._parquet()
        cells: dict[int, dict[str, Any]] = {}
        wanted, first = sorted(set(rows)), 0
        for group in range(parquet.num_row_groups):
            size = parquet.metadata.row_group(group).num_rows
            inside = [row for row in wanted if first <= row < first + size]
            if inside:
                table = parquet.read_row_group(group, columns=list(columns))
                chosen = table.take(pa.array([row - first for row in inside])).to_pylist()
                cells.update(zip(inside, chosen, strict=True))
            first += size
        return [cells[row] for row in rows]

    def strings(self, name: str) -> list[str | None]:
        """Return a column as text."""
        return [
            None if cell is None else str(cell)
            for batch in self.batches([name])
            for cell in batch.column(0).to_pylist()
        ]

    def rows_of(self, ids: Sequence[str]) -> list[int]:
        """Return the rows of ids."""
        wanted = {sample_id: -1 for sample_id in ids}
        values, start = pa.array(list(wanted), pa.string()), 0
        for batch in self.batches(["id"]):
            column = batch.column(0).cast(pa.string())
            found = np.flatnonzero(pa.compute.is_in(column, values).to_numpy(zero_copy_only=False))
            for row in found.tolist():
                wanted[column[row].as_py()] = start + row
            start += len(batch)
        for sample_id, row in wanted.items():
            if row < 0:
                raise FusionZooError(f"{self.path} has no row with the id {sample_id!r}")
        return [wanted[sample_id] for sample_id in ids]

    def state(self) -> dict[str, Any]:
        """Return what changes when the file is written anew."""
        about = os.stat(self.path)
        return {"bytes": about.st_size, "modified_ns": about.st_mtime_ns, "rows": self.rows}

    def _parquet(self) -> Any:
        return pq.ParquetFile(self.path)

    def _scale(self, name: str) -> list[str]:
        """Return the column of an int8 vector's scales, if there is one."""
        names = self._parquet().schema_arrow.names
        return [f"{name}_scale"] if f"{name}_scale" in names else []

    def _matrix(self, batch: pa.RecordBatch, name: str) -> tuple[Tensor, Tensor]:
        """Return a column of lists as (B, D) and which rows are not null."""
        column, dim = batch.column(name), self.dims[name]
        valid = np.array(column.is_valid())
        vectors = np.zeros((len(column), dim), np.float32)
        rows = column.drop_null()
        widths = pa.compute.unique(pa.compute.list_value_length(rows)).to_pylist()
        if widths not in ([], [dim]):
            raise FusionZooError(f"{self.path}: {name!r} has vectors of {sorted(widths)} numbers")
        vectors[valid] = rows.flatten().to_numpy(zero_copy_only=False).reshape(-1, dim)
        for scale in self._scale(name):
            factors = batch.column(scale).fill_null(0).to_numpy(zero_copy_only=False)
            vectors *= factors.astype(np.float32)[:, None]
        return torch.from_numpy(vectors), torch.from_numpy(valid)

    def _mean_blocks(self, size: int) -> Iterator[Block]:
        """Yield the mean over modalities of the aligned unit vectors."""
        parts = [name for name in self.dims if name.startswith(f"{ALIGNED}_")]
        for blocks in zip(*(self.blocks(name, size) for name in parts), strict=True):
            total = sum(unit(block.vectors) * block.usable[:, None] for block in blocks)
            assert isinstance(total, Tensor)
            usable = torch.stack([block.usable for block in blocks]).any(0)
            yield Block(blocks[0].start, total, usable & (total != 0).any(1))


def open_vectors(path: str | Path | VectorFile) -> VectorFile:
    """Open a file of embeddings, without reading its vectors."""
    if isinstance(path, VectorFile):
        return path
    path = Path(path)
    if not path.is_file():
        raise FusionZooError(
            f"{path}: there is no such file of embeddings; `fusionzoo embed` writes one"
        )
    try:
        parquet = pq.ParquetFile(path)
        schema = parquet.schema_arrow
        metadata = json.loads((schema.metadata or {}).get(b"fusionzoo", b"{}"))
    except (pa.ArrowException, ValueError, OSError) as error:
        raise FusionZooError(f"{path} cannot be read as embeddings: {one_line(error)}") from None
    lists = [x for x in schema if _holds_vectors(x.type)]
    dims = {x.name: _width(parquet, x) for x in lists if x.name not in OTHER_LISTS}
    if "id" not in schema.names or not dims:
        raise FusionZooError(
            f"{path} is no file of embeddings: it needs a column `id` and columns of vectors; it"
            f" has {', '.join(schema.names)}"
        )
    scales = {f"{name}_scale" for name in dims}
    columns = [x.name for x in schema if x not in lists and x.name not in scales]
    aligned = {dim for name, dim in dims.items() if name.startswith(f"{ALIGNED}_")}
    if len(aligned) == 1 and ALIGNED not in dims:
        dims[ALIGNED] = aligned.pop()
    return VectorFile(path, parquet.metadata.num_rows, dims, columns, metadata)


def unit(vectors: Tensor) -> Tensor:
    """Scale vectors to length 1; zeros stay zeros."""
    return F.normalize(vectors.float(), dim=-1)


def _holds_vectors(kind: pa.DataType) -> bool:
    is_list = pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind)
    is_list = is_list or pa.types.is_large_list(kind)
    return is_list and (pa.types.is_floating(kind.value_type) or pa.types.is_int8(kind.value_type))


def _width(parquet: Any, column: pa.Field) -> int:
    """Return a fixed-size list's width, else that of the first vector."""
    if pa.types.is_fixed_size_list(column.type):
        return int(column.type.list_size)
    for batch in parquet.iter_batches(1024, columns=[column.name]):
        rows = batch.column(0).drop_null()
        if len(rows):
            return len(rows[0])
    return 0
