"""Read a file of embeddings: ids and a matrix, without a copy where the format allows it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fusionzoo.errors import FusionZooError, did_you_mean, one_line

if TYPE_CHECKING:
    import pyarrow as pa

ROWS_SUFFIX = ".rows.parquet"  # beside an .npy file: the columns that are no vectors


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
    if not path.exists():
        raise FusionZooError(f"no file of embeddings {path}")
    try:
        if path.suffix == ".npy":
            return _read_arrays(path, column)
        table = _read_table(path, column)
    except (OSError, ValueError) as error:
        if isinstance(error, FusionZooError):
            raise
        raise FusionZooError(f"{path} cannot be read: {one_line(error)}") from error
    return Embeddings(table["id"].to_pylist(), _matrix(table, column))


def read_about(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what a file of embeddings says of itself: model, data, versions, vectors, ..."""
    import pyarrow.dataset as ds

    path = Path(path)
    try:
        if path.suffix == ".lance":
            schema = _lance(path).schema
        elif path.suffix == ".npy":
            schema = ds.dataset(path.with_suffix(ROWS_SUFFIX)).schema
        else:
            schema = ds.dataset(path).schema
    except (OSError, ValueError) as error:
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


def _lance(path: Path) -> Any:
    try:
        import lance
    except ImportError:
        raise FusionZooError(
            "a .lance file needs pylance: pip install 'fusionzoo[lance]'"
        ) from None
    return lance.dataset(str(path))


def _read_table(path: Path, column: str) -> pa.Table:
    """Read the columns that are needed, each as one piece of memory where possible."""
    import pyarrow.parquet as pq

    dataset = _lance(path) if path.suffix == ".lance" else None
    if dataset is None and path.is_file():
        dataset = pq.ParquetFile(path, memory_map=True)
    elif dataset is None:
        dataset = pq.ParquetDataset(path)
    schema = getattr(dataset, "schema_arrow", dataset.schema)
    _check_column(path, vector_columns(schema), column)
    names = [name for name in ("id", column, f"{column}_scale") if name in schema.names]
    table: pa.Table = (
        dataset.read(columns=names) if hasattr(dataset, "read") else dataset.to_table(columns=names)
    )
    return table


def _check_column(path: Path, columns: list[str], column: str) -> None:
    if column not in columns:
        raise FusionZooError(
            f"{path} has no vectors {column!r}.{did_you_mean(column, columns)} It has:"
            f" {', '.join(columns)}"
        )


def _matrix(table: pa.Table, column: str) -> np.ndarray[Any, Any]:
    """View a column of fixed-size lists as a matrix."""
    import pyarrow as pa

    chunks = table[column].chunks
    array = chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks or [_empty(table, column)])
    matrix = matrix_of(array)
    if matrix.dtype == np.int8:
        scale = table[f"{column}_scale"].to_numpy()  # NaN where it is null
        return matrix.astype(np.float32) * scale[:, None]
    return matrix


def matrix_of(array: pa.FixedSizeListArray) -> np.ndarray[Any, Any]:
    """View fixed-size lists as a matrix; null ones are NaN (int8: 0), for which a copy is made."""
    width, dtype = array.type.list_size, array.type.value_type.to_pandas_dtype()
    if not len(array):
        return np.empty((0, width), dtype)
    start = array.offset * width + array.values.offset
    flat = np.frombuffer(array.values.buffers()[1], dtype)
    flat.flags.writeable = False  # it is Arrow's memory
    matrix = flat[start : start + len(array) * width].reshape(len(array), width)
    if array.null_count:
        matrix = matrix.copy()
        matrix[np.asarray(array.is_null())] = 0 if dtype == np.int8 else np.nan
    return matrix


def _empty(table: pa.Table, column: str) -> Any:
    import pyarrow as pa

    return pa.array([], table.schema.field(column).type)


def _read_arrays(path: Path, column: str) -> Embeddings:
    import pyarrow.parquet as pq

    rows = pq.read_table(path.with_suffix(ROWS_SUFFIX))
    others = (p.name[len(path.stem) + 1 : -4] for p in path.parent.glob(f"{path.stem}.*.npy"))
    _check_column(path, ["fused", *sorted(others)], column)
    matrix = np.load(array_path(path, column), mmap_mode="r")
    if matrix.dtype == np.int8:
        matrix = matrix.astype(np.float32) * rows[f"{column}_scale"].to_numpy()[:, None]
    return Embeddings(rows["id"].to_pylist(), matrix)
