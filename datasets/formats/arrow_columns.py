"""Columns of Python values, NumPy's and PyTorch's as columns of Arrow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

import numpy as np
import pyarrow as pa
from torch import Tensor


def column_cells(values: Any) -> Any:
    """Return a column's values with None for what is missing; Arrow columns stay as they are."""
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values
    if isinstance(values, Tensor):
        values = values.detach().cpu()
    if isinstance(values, np.ndarray | Tensor) and values.ndim > 1:
        return values
    if isinstance(values, np.ndarray | Tensor):
        values = values.tolist()
    return [None if _is_missing(value) else _plain(value) for value in values]


def _plain(value: Any) -> Any:
    """Return a Python number for one of NumPy or PyTorch."""
    is_number = isinstance(value, np.generic) or (isinstance(value, Tensor) and not value.ndim)
    return value.item() if is_number else value


def _is_missing(value: Any) -> bool:
    """Whether a value is None, NaN, or one of pandas' markers for missing values."""
    if isinstance(value, float | np.floating):
        return bool(np.isnan(value))
    return value is None or type(value).__name__ in ("NAType", "NaTType")


def arrow_column(cells: Any) -> Any:
    """Return the values as an Arrow array if it holds them exactly; None: they stay objects."""
    if isinstance(cells, pa.Array | pa.ChunkedArray):
        return cells
    if not isinstance(cells, list):
        return None
    types = {type(cell) for cell in cells if cell is not None}
    if types and all(issubclass(kind, Mapping) for kind in types):
        is_media = all(set(cell or ()) <= {"bytes", "path"} for cell in cells)
        media = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        return pa.array(cells, media) if is_media else _arrow_rows(cells)
    if any(issubclass(kind, np.ndarray | Tensor | tuple | Mapping) for kind in types):
        return None
    try:
        return pa.array(cells) if types else pa.nulls(len(cells), pa.string())
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        if all(issubclass(kind, str | Number) for kind in types):
            return pa.array([None if cell is None else str(cell) for cell in cells], pa.string())
        return None


def _arrow_rows(rows: Sequence[Mapping[str, Any] | None]) -> Any:
    """Return rows of a tabular modality as structs; None: they hold more than numbers and text."""
    cells = [cell for row in rows for cell in (row or {}).values()]
    if not cells or not all(cell is None or isinstance(cell, str | Number) for cell in cells):
        return None
    names = list(dict.fromkeys(str(name) for row in rows for name in row or {}))
    columns = [
        arrow_column(column_cells([(row or {}).get(name) for row in rows])) for name in names
    ]
    return pa.StructArray.from_arrays(columns, names, mask=pa.array([x is None for x in rows]))
