"""Values in arrays: `feats.npy[17]`, `feats.npz::audio`, `feats.h5::video/frames[100:250]`."""

from __future__ import annotations

import math
import os
import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy_format

from fusionzoo.errors import FusionZooError, check_known, explained

from .budgets import check_shape

ZIP, HDF5 = (".npz",), (".h5", ".hdf5")
MAX_LOADED = 2**30  # bytes of a compressed array, which is decompressed whole, or of an HDF5 chunk
NUMBERS, WORDS = "biuf", "US"  # kinds of dtypes
LOCAL_HEADER = 30  # bytes of the header of a zip member, before its name
DIMENSIONS = {"vector": 1, "sequence": 2}
PATTERN = (  # file, name of the array, row or rows
    r"^(?P<file>.+?\.(?i:npy|npz|h5|hdf5))(?:::(?P<key>[^\[\]]+))?"
    r"(?:\[(?P<start>[0-9]{1,15})(?:(?P<colon>:)(?P<stop>[0-9]{1,15}))?\])?$"
)
_pattern = re.compile(PATTERN)


def check_npy(
    file: BinaryIO | Any, size: int, name: str
) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return shape, Fortran order and type of an array of `size` bytes by its header, checked."""
    if file.read(4) != npy_format.MAGIC_PREFIX[:4]:
        raise FusionZooError(f"{name} is no .npy file, which numpy.save writes")
    file.seek(0)
    version = npy_format.read_magic(file)
    # Versions 2 and 3 differ in how names of fields are spelt, and fields are refused below.
    read_header = (
        npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
    )
    shape, fortran_order, dtype = read_header(file)
    if dtype.hasobject:
        raise FusionZooError(f"{name} holds values of type {dtype}, which are never loaded")
    missing = file.tell() + math.prod(shape) * dtype.itemsize - size
    if missing > 0:
        raise FusionZooError(f"{name} is cut off: {missing:,} bytes are missing for shape {shape}")
    return shape, fortran_order, dtype


def open_array(path: Path, key: str = "", dtypes: str = NUMBERS) -> Any:
    """Return an array of a file, the only one without `key`, with `shape`, `dtype` and indexing."""
    name = f"{path}::{key}" if key else str(path)
    try:
        stat = path.stat()
    except OSError as error:
        raise FusionZooError(f"{path} cannot be opened: {error.strerror}") from error
    if not path.is_file():
        raise FusionZooError(f"{path} is no file")
    with explained(f"{name} cannot be read as an array"):
        array = _open(path, key, stat.st_mtime_ns, stat.st_size, os.getpid())
    if array.dtype.kind not in dtypes:
        wanted = "numbers" if dtypes == NUMBERS else "text or numbers"
        raise FusionZooError(f"{name} holds values of type {array.dtype}; expected {wanted}")
    return array


def array_names(path: Path) -> list[str]:
    """Return the names of the arrays in an .npz or HDF5 file; none for .npy."""
    with explained(f"{path} cannot be opened", OSError, ValueError, zipfile.BadZipFile):
        if path.suffix.lower() in ZIP:
            with zipfile.ZipFile(path) as archive:
                return [name.removesuffix(".npy") for name in archive.namelist()]
        if path.suffix.lower() in HDF5:
            with hdf5().File(path, "r") as file:
                return _dataset_names(file)
    return []


def group_names(path: Path, key: str) -> list[str] | None:
    """Return the names of the datasets in an HDF5 group; None if `key` is no group."""
    if path.suffix.lower() not in HDF5:
        return None
    with hdf5().File(path, "r") as file:
        target = _follow(file, key, path)
        return _dataset_names(target) if isinstance(target, hdf5().Group) else None


@lru_cache(maxsize=64)
def _open(path: Path, key: str, modified: int, size: int, process: int) -> Any:
    """Open an array; a file that changed, or another process, opens it anew."""
    suffix = path.suffix.lower()
    if suffix in ZIP:
        return _open_member(path, key)
    if suffix in HDF5:
        return _open_dataset(path, key)
    if key:
        raise FusionZooError(f"{path} holds a single array, without a name: remove ::{key}")
    with path.open("rb") as file:
        check_npy(file, size, str(path))
    return np.load(path, mmap_mode="r", allow_pickle=False)


# ---- .npz


def _open_member(path: Path, key: str) -> np.ndarray:
    """Map a member into memory, or decompress it."""
    with zipfile.ZipFile(path) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        member = members[_choose(key, list(members), path)]
        with archive.open(member) as file:
            name = f"{path}::{member.filename.removesuffix('.npy')}"
            shape, fortran_order, dtype = check_npy(file, member.file_size, name)
            start = file.tell()
            size = math.prod(shape) * dtype.itemsize
            if member.compress_type != zipfile.ZIP_STORED:
                if size > MAX_LOADED:
                    raise ValueError(
                        f"it is compressed, and {size / 2**30:.1f} GiB are too much to load whole:"
                        " store it by numpy.savez or as .npy"
                    )
                array = np.frombuffer(file.read(size), dtype, count=math.prod(shape))
                return array.reshape(shape, order="F" if fortran_order else "C")
    with path.open("rb") as raw:
        raw.seek(member.header_offset)
        header = raw.read(LOCAL_HEADER)
    name_and_extra = int.from_bytes(header[26:28], "little") + int.from_bytes(
        header[28:30], "little"
    )
    offset = member.header_offset + LOCAL_HEADER + name_and_extra + start
    order: Any = "F" if fortran_order else "C"
    if not size:
        return np.zeros(shape, dtype)
    return np.memmap(path, dtype, mode="r", offset=offset, shape=shape, order=order)


def _choose(key: str, names: list[str], path: Path) -> str:
    """Return the name of an array in a file: `key`, or the only one."""
    if not key and len(names) == 1:
        return names[0]
    wanted = f"array {key!r}" if key else f"single array: name one, {path.name}::<name>"
    check_known(key, names, f"{path} holds no {wanted}", "It holds")
    return key


# ---- HDF5


def hdf5() -> Any:
    """Return the package h5py, or say how to install it."""
    with explained("HDF5 needs h5py, pip install 'fusionzoo[hdf5]'", ImportError):
        import h5py
    return h5py


def _open_dataset(path: Path, key: str) -> Any:
    """Open a dataset; one that reads other files is an error."""
    h5py = hdf5()
    file = h5py.File(path, "r")
    if not key:
        key = _choose(key, _dataset_names(file), path)
    dataset = _follow(file, key, path)
    if not isinstance(dataset, h5py.Dataset):
        raise FusionZooError(f"{path}::{key} is a group of {', '.join(_dataset_names(dataset))}")
    if is_stored_elsewhere(dataset):
        raise FusionZooError(f"{path}::{key} is stored in other files, which are not read")
    if math.prod(dataset.chunks or (1,)) * dataset.dtype.itemsize > MAX_LOADED:
        raise FusionZooError(f"{path}::{key} has chunks of {dataset.chunks}, too large to load")
    return dataset


def is_stored_elsewhere(dataset: Any) -> bool:
    """Whether an HDF5 dataset reads other files."""
    return bool(dataset.external or dataset.is_virtual)


def _follow(file: Any, key: str, path: Path) -> Any:
    """Return what a key names; links, which may lead to other files, are an error."""
    h5py = hdf5()
    target = file
    for part in key.split("/"):
        names = list(target) if isinstance(target, h5py.Group) else []
        if part not in names:
            _choose(part, names, path)
        if not isinstance(target.get(part, getlink=True), h5py.HardLink):
            raise FusionZooError(f"{path}::{key} is a link, which is not followed")
        target = target[part]
    return target


def _dataset_names(group: Any) -> list[str]:
    """Return the names of the datasets directly in a group, links left out."""
    h5py = hdf5()
    return [
        name
        for name in group
        if isinstance(group.get(name, getlink=True), h5py.HardLink)
        and group.get(name, getclass=True) is h5py.Dataset
    ]


@dataclass(frozen=True)
class ArrayItem:
    """A part of an array in a file: all of it, a row, or rows from a start to a stop."""

    path: Path
    key: str = ""
    rows: int | tuple[int, int] | None = None
    length: int | None = None  # steps of a padded sequence that are real
    rate: int | None = None  # Hz, of samples of audio

    def __str__(self) -> str:
        key = f"::{self.key}" if self.key else ""
        rows = f"{self.rows[0]}:{self.rows[1]}" if isinstance(self.rows, tuple) else self.rows
        return f"{self.path}{key}" + ("" if rows is None else f"[{rows}]")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        shape = tuple(open_array(self.path, self.key).shape)
        if isinstance(self.rows, tuple):
            shape = (self.rows[1] - self.rows[0], *shape[1:])
        elif self.rows is not None:
            shape = shape[1:]
        return shape if self.length is None else (min(self.length, shape[0]), *shape[1:])

    @property
    def cost(self) -> float:
        """The number of steps, as far as it is known without opening the file."""
        if isinstance(self.rows, tuple):
            return float(self.rows[1] - self.rows[0])
        return float(self.length or 1)

    def read(self) -> np.ndarray:
        """Return a copy of the value, at its own type."""
        array = open_array(self.path, self.key)
        if self.rows is not None:
            start, stop = self.rows if isinstance(self.rows, tuple) else (self.rows, self.rows + 1)
            if not array.shape or stop > array.shape[0] or start >= stop:
                raise FusionZooError(f"{self} is out of range: the shape is {tuple(array.shape)}")
        check_shape(self.shape, str(self))
        part = slice(*self.rows) if isinstance(self.rows, tuple) else self.rows
        value = array[()] if part is None else array[part]
        return np.array(value if self.length is None else value[: self.length])


def find_item(cell: str, root: Path | None = None, rate: int | None = None) -> ArrayItem | None:
    """Return the part of an array that a cell names; None if it names no file of arrays.

    >>> str(find_item("a/feats.npz::audio[17]"))
    'a/feats.npz::audio[17]'
    """
    match = _pattern.match(cell)
    if match is None:
        return None
    path = (root or Path()) / match["file"]
    rows: int | tuple[int, int] | None = None
    if match["start"]:
        rows = int(match["start"])
        rows = (rows, int(match["stop"])) if match["colon"] else rows
    return ArrayItem(path, match["key"] or "", rows, rate=rate)


def refer(cell: Any, kind: str, root: Path | None, rate: int | None) -> Any:
    """Return the file or part of an array in a cell; of a list each; what is no text stays."""
    if isinstance(cell, list) and kind in ("image", "audio"):
        return [refer(item, kind, root, rate) for item in cell]
    if not isinstance(cell, str):
        return cell
    item = find_item(cell, root, rate)
    is_file = item is not None and not item.key and item.rows is None and kind in DIMENSIONS
    return (root or Path()) / cell if item is None or is_file else item


def file_of(cell: str) -> str:
    """Return the path in a cell, without the name of an array and its rows.

    >>> file_of("feats.npy[17]"), file_of("cat.png")
    ('feats.npy', 'cat.png')
    """
    match = _pattern.match(cell)
    return cell if match is None else match["file"]


class ArrayRows:
    """A modality's values by row of an array: `ArrayItem` of one row or, packed, of several.

    `offsets` (N + 1,) say where the values start in packed sequences, `lengths` (N,) how many steps
    of padded ones are real; without them, row i is value i.
    """

    def __init__(self, array: ArrayItem, *, offsets: Any = None, lengths: Any = None) -> None:
        self.array, self.offsets, self.lengths = array, offsets, lengths

    def __getitem__(self, row: int) -> ArrayItem:
        array = self.array
        if self.offsets is not None:
            packed = int(self.offsets[row]), int(self.offsets[row + 1])
            return ArrayItem(array.path, array.key, packed, rate=array.rate)
        length = None if self.lengths is None else int(self.lengths[row])
        return ArrayItem(array.path, array.key, row, length, array.rate)


class NamedArrays:
    """A modality's values in arrays of their own, by number."""

    def __init__(self, path: Path, keys: Sequence[str], rate: int | None = None) -> None:
        self.path, self.keys, self.rate = path, list(keys), rate

    def __getitem__(self, number: int) -> ArrayItem:
        return ArrayItem(self.path, self.keys[number], rate=self.rate)
