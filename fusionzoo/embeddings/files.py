"""Files of embeddings: Parquet, folders, Lance, NumPy; read without a copy where possible."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fusionzoo.errors import FusionZooError, did_you_mean, one_line

if TYPE_CHECKING:
    import pyarrow as pa


Matrix = np.ndarray[Any, Any]


def matrix_of(array: pa.Array, width: int | None = None) -> Matrix:
    """View lists of one width as a matrix; null ones are NaN (int8: 0), for which a copy is made.

    `width` is that of lists whose type does not tell.
    """
    import pyarrow as pa

    kind = array.type
    dtype = kind.value_type.to_pandas_dtype()
    width = kind.list_size if pa.types.is_fixed_size_list(kind) else width or 0
    if not len(array):
        return np.empty((0, width), dtype)
    if pa.types.is_fixed_size_list(kind) and not array.values.null_count:
        start = array.offset * width + array.values.offset
        flat = np.frombuffer(array.values.buffers()[1], dtype)
        matrix = flat[start : start + len(array) * width].reshape(len(array), width)
        if array.null_count:
            matrix = matrix.copy()
    else:
        rows = array.drop_null()
        widths = pa.compute.unique(pa.compute.list_value_length(rows)).to_pylist()
        if widths not in ([], [width]):
            raise FusionZooError(f"there are vectors of {sorted(widths)} numbers")
        matrix = np.zeros((len(array), width), dtype)
        numbers = rows.flatten().to_numpy(zero_copy_only=False)
        matrix[np.asarray(array.is_valid())] = numbers.reshape(-1, width)
    if array.null_count:
        matrix[np.asarray(array.is_null())] = 0 if dtype == np.int8 else np.nan
    return matrix


def scaled(matrix: Matrix, scale: pa.Array | pa.ChunkedArray) -> Matrix:
    """Return the vectors that int8 ones stand for; NaN where the scale is null."""
    factors = scale.to_numpy(zero_copy_only=False).astype(np.float32)
    return matrix.astype(np.float32) * factors[:, None]


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


class Embeddings(NamedTuple):
    """Rows in the order of the data set: ids (N,) and vectors (N, D)."""

    ids: list[str]
    vectors: np.ndarray[Any, Any]


def read_embeddings(path: str | os.PathLike[str], column: str = "fused") -> Embeddings:
    """Read the ids and one column of vectors: `ids, vectors = read_embeddings("emb.parquet")`.

    `column` is `fused`, a modality, `aligned_<modality>`, `fused_64`, ... An .npy file is mapped
    into memory; of a Parquet or Lance file the matrix is a read-only view of what Arrow decoded.
    Rows of which nothing could be read are NaN, for which a copy is made; int8 becomes float32.
    """
    path = Path(path)
    try:
        file = open_embedding_file(path)
        columns = vector_columns(file.schema)
        if column not in columns:
            raise FusionZooError(
                f"{path} has no vectors {column!r}.{did_you_mean(column, columns)} It has:"
                f" {', '.join(columns)}"
            )
        return Embeddings(file.read(["id"])["id"].to_pylist(), file.matrix(column))
    except (OSError, ValueError) as error:
        if isinstance(error, FusionZooError):
            raise
        raise FusionZooError(f"{path} cannot be read: {one_line(error)}") from error


def read_about(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what a file of embeddings says of itself: model, data, versions, vectors, ..."""
    path = Path(path)
    try:
        schema = open_embedding_file(path).schema
    except (OSError, ValueError) as error:
        if isinstance(error, FusionZooError):
            raise
        raise FusionZooError(f"{path} cannot be read: {one_line(error)}") from error
    about = (schema.metadata or {}).get(b"fusionzoo")
    if about is None:
        raise FusionZooError(f"{path} was not written by `fusionzoo embed`")
    return dict(json.loads(about))


def vector_columns(schema: pa.Schema) -> list[str]:
    """Return the columns that hold vectors of one width."""
    import pyarrow as pa

    return [field.name for field in schema if pa.types.is_fixed_size_list(field.type)]


def array_path(path: Path, column: str) -> Path:
    """Return the .npy file of a column: `emb.npy` for `fused`, else `emb.<column>.npy`."""
    return path if column == "fused" else path.with_suffix(f".{column}.npy")
