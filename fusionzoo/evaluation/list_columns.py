"""Columns of lists of numbers, as matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fusionzoo.errors import FusionZooError

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
