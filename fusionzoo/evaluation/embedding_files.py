"""The formats of files of embeddings, read as Arrow tables: Parquet, folders, Lance, NumPy."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fusionzoo.errors import FusionZooError

from .list_columns import Matrix, matrix_of, scaled

if TYPE_CHECKING:
    import pyarrow as pa

ROWS_SUFFIX = ".rows.parquet"  # beside an .npy file: the columns that are no vectors


class EmbeddingFile:
    """Embeddings in one format; columns of vectors are lists of numbers. Here: Parquet files.

    Errors of the libraries pass through: whoever opens a file says what it was to be.
    """

    def __init__(self, path: Path, parquets: Sequence[Path]) -> None:
        self.path, self.parquets = path, list(parquets)

    @property
    def files(self) -> list[Path]:
        """All files that it is made of."""
        return self.parquets

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns, and the metadata."""
        first = self._opened[0].schema_arrow
        for path, parquet in zip(self.parquets, self._opened, strict=True):
            if not parquet.schema_arrow.equals(first):
                raise FusionZooError(f"{path} has other columns than {self.parquets[0].name}")
        return first

    @property
    def rows(self) -> int:
        """The number of rows."""
        return sum(parquet.metadata.num_rows for parquet in self._opened)

    @cached_property
    def _opened(self) -> list[Any]:
        import pyarrow.parquet as pq

        return [pq.ParquetFile(path, page_checksum_verification=True) for path in self.parquets]

    def batches(self, columns: Sequence[str], size: int) -> Iterator[pa.RecordBatch]:
        """Yield some columns in batches of at most `size` rows.

        Row groups are opened one by one: Arrow keeps what it has read of all that it was asked for.
        """
        for parquet, group in self._row_groups():
            yield from parquet.iter_batches(size, row_groups=[group], columns=list(columns))

    def take(self, rows: Sequence[int], columns: Sequence[str]) -> pa.Table:
        """Return some rows, whose numbers ascend; only their row groups are read."""
        import pyarrow as pa

        wanted, first = np.asarray(rows, np.int64), 0
        tables = []
        for parquet, group in self._row_groups():
            size = parquet.metadata.row_group(group).num_rows
            low, high = np.searchsorted(wanted, [first, first + size])
            if low < high:
                table = parquet.read_row_group(group, columns=list(columns))
                tables.append(table.take(pa.array(wanted[low:high] - first)))
            first += size
        return pa.concat_tables(tables) if tables else self.schema.empty_table().select(columns)

    def read(self, columns: Sequence[str]) -> pa.Table:
        """Return some columns whole, each as one piece of memory where possible."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        mapped = [
            pq.ParquetFile(path, memory_map=True, page_checksum_verification=True)
            for path in self.parquets
        ]
        return pa.concat_tables([parquet.read(columns=list(columns)) for parquet in mapped])

    def matrix(self, column: str) -> Matrix:
        """Return a column of vectors; read-only, without a copy where the format allows it."""
        import pyarrow as pa

        names = [name for name in (column, f"{column}_scale") if name in self.schema.names]
        table = self.read(names)
        chunks = table[column].chunks or [pa.array([], self.schema.field(column).type)]
        matrix = matrix_of(chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks))
        if matrix.dtype == np.int8:
            return scaled(matrix, table[f"{column}_scale"])
        matrix.flags.writeable = False  # it is Arrow's memory
        return matrix

    def _row_groups(self) -> Iterator[tuple[Any, int]]:
        for parquet in self._opened:
            for group in range(parquet.num_row_groups):
                yield parquet, group


class LanceFile(EmbeddingFile):
    """A Lance data set."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, [])
        self._lance = import_lance().dataset(str(path))

    @property
    def files(self) -> list[Path]:
        return [path for path in self.path.rglob("*") if path.is_file()]

    @cached_property
    def schema(self) -> pa.Schema:
        return self._lance.schema

    @property
    def rows(self) -> int:
        return int(self._lance.count_rows())

    def batches(self, columns: Sequence[str], size: int) -> Iterator[pa.RecordBatch]:
        yield from self._lance.to_batches(columns=list(columns), batch_size=size)

    def take(self, rows: Sequence[int], columns: Sequence[str]) -> pa.Table:
        return self._lance.take(list(rows), columns=list(columns))

    def read(self, columns: Sequence[str]) -> pa.Table:
        return self._lance.to_table(columns=list(columns))


class NumpyFiles(EmbeddingFile):
    """An .npy file per column of vectors, mapped, beside a Parquet file of the other columns."""

    def __init__(self, path: Path) -> None:
        rows = path.with_suffix(ROWS_SUFFIX)
        if not rows.is_file():
            raise FusionZooError(
                f"{path} needs {rows.name} beside it, with the ids of its rows: `fusionzoo embed"
                " --out x.npy` writes both"
            )
        super().__init__(rows, [rows])
        self._paths = {"fused": path} | {
            file.name[len(path.stem) + 1 : -4]: file
            for file in sorted(path.parent.iterdir())
            if file.name.startswith(f"{path.stem}.") and file.suffix == ".npy" and file != path
        }
        self._matrices: dict[str, Matrix] = {}

    @property
    def files(self) -> list[Path]:
        return [*self.parquets, *self._paths.values()]

    @cached_property
    def schema(self) -> pa.Schema:
        import pyarrow as pa

        schema = self._opened[0].schema_arrow
        recorded = json.loads((schema.metadata or {}).get(b"fusionzoo", b"{}")).get("vectors", {})
        place = {name: number for number, name in enumerate(recorded)}
        for name in sorted(self._paths, key=lambda name: place.get(name, len(place))):
            stored = self._stored(name)
            kind = pa.list_(pa.from_numpy_dtype(stored.dtype), stored.shape[1])
            schema = schema.append(pa.field(name, kind))
        return schema

    def batches(self, columns: Sequence[str], size: int) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        names, start = [name for name in columns if name not in self._paths], 0
        for batch in super().batches(names or ["id"], size):
            rows = slice(start, start + len(batch))
            yield self._with_vectors(pa.table(batch), columns, rows)
            start += len(batch)

    def take(self, rows: Sequence[int], columns: Sequence[str]) -> pa.Table:
        import pyarrow as pa

        names = [name for name in columns if name not in self._paths]
        table = super().take(rows, names or ["id"])
        return pa.table(self._with_vectors(table, columns, np.asarray(rows, np.int64)))

    def matrix(self, column: str) -> Matrix:
        matrix = self._stored(column)
        if matrix.dtype == np.int8:
            return scaled(matrix, self.read([f"{column}_scale"])[0])
        return np.load(self._paths[column], mmap_mode="r")

    def _stored(self, column: str) -> Matrix:
        """Return a column's file, mapped so that torch takes it as it is."""
        if column not in self._matrices:
            matrix = np.load(self._paths[column], mmap_mode="c")
            if matrix.ndim != 2 or len(matrix) != self.rows:
                raise FusionZooError(
                    f"{self._paths[column]} has the shape {matrix.shape}, and {self.path.name}"
                    f" {self.rows} rows: they are not of one extraction"
                )
            self._matrices[column] = matrix
        return self._matrices[column]

    def _with_vectors(self, table: pa.Table, columns: Sequence[str], rows: Any) -> Any:
        """Return a batch of some columns, those of vectors as lists over the mapped files."""
        import pyarrow as pa

        arrays = []
        for name in columns:
            if name not in self._paths:
                arrays.append(table[name].combine_chunks())
                continue
            part = self._stored(name)[rows]
            flat = pa.array(part.reshape(-1))
            arrays.append(pa.FixedSizeListArray.from_arrays(flat, part.shape[1]))
        return pa.record_batch(arrays, names=list(columns))


def open_embedding_file(path: Path) -> EmbeddingFile:
    """Open what `fusionzoo embed` wrote, by its suffix; a folder by the Parquet files in it."""
    if not path.exists():
        raise FusionZooError(
            f"{path}: there is no such file of embeddings; `fusionzoo embed` writes one"
        )
    if path.suffix == ".npy":
        return NumpyFiles(path)
    if path.suffix == ".lance":
        return LanceFile(path)
    files = [path]
    if path.is_dir():
        files = sorted(x for x in path.rglob("*.parquet") if not x.name.startswith(("_", ".")))
        if not files:
            raise FusionZooError(f"{path} has no Parquet file: it is no folder of embeddings")
    return EmbeddingFile(path, files)


def import_lance() -> Any:
    """Import Lance, which the extra `lance` installs."""
    try:
        import lance
    except ImportError:
        raise FusionZooError(
            "a .lance file needs pylance: pip install 'fusionzoo[lance]'"
        ) from None
    return lance
