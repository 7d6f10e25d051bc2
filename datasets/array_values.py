"""Decode vectors and sequences from lists, arrays and tensors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fusionzoo.errors import FusionZooError, one_line
from fusionzoo.targets import decimal_hint

from .array_files import HDF5, ZIP
from .budgets import check_shape

ARRAY_FILES = (".npy", *ZIP, *HDF5)


def decode_array(source: Any, ndim: int, name: str = "") -> Tensor:
    """Return float32 of `ndim` dimensions, from a list, an array or a tensor.

    `name` stands for it in messages.
    """
    name = name or (str(source) if isinstance(source, str | Path) else f"a {type(source).__name__}")
    if isinstance(source, str | Path):
        raise FusionZooError(
            f"{name} is no file of arrays: {', '.join(ARRAY_FILES)} such as feats.npy[17]"
        )
    if isinstance(source, np.ndarray | Tensor):
        check_shape(source.shape, name)
    try:
        array = np.asarray(source, dtype=np.float32)
    except (OverflowError, ValueError, TypeError) as error:
        number = re.search(r"to float: '(.*)'", str(error))  # text in a list
        hint = decimal_hint(number[1]) if number else ""
        raise FusionZooError(
            f"{name} cannot be read as an array: {one_line(error)}{hint}"
        ) from error
    if array.ndim != ndim:
        raise FusionZooError(f"{name} has shape {array.shape}; expected {ndim} dimensions")
    if not np.isfinite(array).all():
        raise FusionZooError(f"{name} contains values that are not finite")
    return torch.as_tensor(array)
