"""Check what the header of a .npy file announces, before the file is mapped into memory."""

from __future__ import annotations

import math
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy_format

from fusionzoo.errors import FusionZooError


def check_npy(
    file: BinaryIO | Any, size: int, name: str
) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Check the header of an array of `size` bytes, at the start of an open file.

    Return the array's shape, whether its order is Fortran's, and its type.
    """
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
    shape, fortran_order, dtype = read_header(file)
    if dtype.hasobject:
        raise FusionZooError(
            f"{name} holds values of type {dtype}, which are never loaded: store numbers, such as"
            " float32"
        )
    if any(length < 0 for length in shape):
        raise FusionZooError(f"{name} has shape {shape}, which no array can have")
    missing = file.tell() + math.prod(shape) * dtype.itemsize - size
    if missing > 0:
        raise FusionZooError(
            f"{name} is cut off: its header announces shape {shape} of {dtype}, for which"
            f" {missing:,} bytes are missing"
        )
    return shape, fortran_order, dtype
