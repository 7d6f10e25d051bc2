"""Read arrays of numbers in NumPy's format; what the header announces is checked first."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy_format

from fusionzoo.errors import FusionZooError, one_line

from .budgets import check_shape, file_size

NUMBERS = "biuf"  # kinds of dtypes: bool, integers, floats


def read_npy(path: str | Path) -> np.ndarray:
    """Read a .npy file of numbers; nothing is unpickled.

    Refused by the header: too many numbers, objects and text, and an array larger than the file.
    """
    size = file_size(path, "array file")
    try:
        with Path(path).open("rb") as file:
            check_npy(file, size, str(path))
            file.seek(0)
            return npy_format.read_array(file, allow_pickle=False)
    except FusionZooError:
        raise
    except Exception as error:  # the parser of headers raises errors of many types
        raise FusionZooError(f"{path} cannot be read as an array: {one_line(error)}") from error


def check_npy(file: BinaryIO | Any, size: int, name: str) -> None:
    """Check the header of an array of `size` bytes, at the start of an open file."""
    start = file.read(4)
    if start[:2] == b"PK":
        raise FusionZooError(f"{name} holds several arrays (.npz); a .npy file is expected")
    if start != npy_format.MAGIC_PREFIX[:4]:
        raise FusionZooError(f"{name} is no .npy file: numpy.save writes one")
    file.seek(0)
    version = npy_format.read_magic(file)
    # Versions 2 and 3 differ in how names of fields are spelt, and fields are refused below.
    read_header = (
        npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
    )
    shape, _, dtype = read_header(file)
    if dtype.kind not in NUMBERS:
        raise FusionZooError(
            f"{name} holds values of type {dtype}, which are never loaded: store numbers, such as"
            " float32"
        )
    if any(length < 0 for length in shape):
        raise FusionZooError(f"{name} has shape {shape}, which no array can have")
    check_shape(shape, name)
    missing = file.tell() + math.prod(shape) * dtype.itemsize - size
    if missing > 0:
        raise FusionZooError(
            f"{name} is cut off: its header announces shape {shape} of {dtype}, for which"
            f" {missing:,} bytes are missing"
        )
