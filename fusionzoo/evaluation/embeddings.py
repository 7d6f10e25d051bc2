"""Read a file of embeddings: ids and a matrix, without a copy where the format allows it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fusionzoo.errors import FusionZooError, did_you_mean, one_line

from .embedding_files import open_embedding_file

if TYPE_CHECKING:
    import pyarrow as pa


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
