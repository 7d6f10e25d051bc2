"""Values in arrays: `feats.npy[17]`, `feats.npz::audio`, `feats.h5::video/frames[100:250]`."""

from __future__ import annotations

import math
import os
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.lib import format as npy_format

from fusionzoo.errors import FusionZooError, did_you_mean, one_line

from .budgets import check_shape

ZIP, HDF5 = (".npz",), (".h5", ".hdf5")
MAX_LOADED = 2**30  # bytes of a compressed array, which is decompressed whole, or of an HDF5 chunk
NUMBERS, WORDS = "biuf", "US"  # kinds of dtypes
LOCAL_HEADER = 30  # bytes of the header of a zip member, before its name
DIMENSIONS = {"vector": 1, "sequence": 2}
MAX_OPENED = 200  # arrays whose length is compared with a table's cells when it is opened
PATTERN = (  # file, name of the array, row or rows
    r"^(?P<file>.+?\.(?i:npy|npz|h5|hdf5))(?:::(?P<key>[^\[\]]+))?"
    r"(?:\[(?P<start>[0-9]{1,15})(?:(?P<colon>:)(?P<stop>[0-9]{1,15}))?\])?$"
)
_pattern = re.compile(PATTERN)


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


def open_array(path: Path, key: str = "", dtypes: str = NUMBERS) -> Any:
    """Return an array of a file, with `shape`, `dtype` and indexing; `key` is its name in there.

    Without `key` the file must hold a single array.
    """
    name = f"{path}::{key}" if key else str(path)
    try:
        stat = path.stat()
    except OSError as error:
        raise FusionZooError(f"{path} cannot be opened: {error.strerror}") from error
    if not path.is_file():
        raise FusionZooError(f"{path} is no file")
    try:
        array = _open(path, key, stat.st_mtime_ns, stat.st_size, os.getpid())
    except FusionZooError:
        raise
    except Exception as error:
        raise FusionZooError(f"{name} cannot be read as an array: {one_line(error)}") from error
    if array.dtype.kind not in dtypes:
        wanted = "numbers" if dtypes == NUMBERS else "text or numbers"
        raise FusionZooError(f"{name} holds values of type {array.dtype}; expected {wanted}")
    return array


def array_names(path: Path) -> list[str]:
    """Return the names of the arrays in an .npz or HDF5 file; none for .npy."""
    try:
        if path.suffix.lower() in ZIP:
            with zipfile.ZipFile(path) as archive:
                return [name.removesuffix(".npy") for name in archive.namelist()]
        if path.suffix.lower() in HDF5:
            with hdf5().File(path, "r") as file:
                return _dataset_names(file)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise FusionZooError(f"{path} cannot be opened: {one_line(error)}") from error
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
        member = _member(archive, path, key)
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


def _member(archive: zipfile.ZipFile, path: Path, key: str) -> zipfile.ZipInfo:
    members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
    return members[_choose(key, list(members), path)]


def _choose(key: str, names: list[str], path: Path) -> str:
    """Return the name of an array in a file: `key`, or the only one."""
    if key in names:
        return key
    if not key and len(names) == 1:
        return names[0]
    shown = ", ".join(names[:10]) + (f" and {len(names) - 10:,} more" if len(names) > 10 else "")
    if key:
        near = did_you_mean(key, names)
        raise FusionZooError(f"{path} holds no array {key!r}.{near} It holds: {shown or 'none'}")
    raise FusionZooError(f"{path} holds {shown or 'no array'}: name one, {path.name}::<name>")


# ---- HDF5


def hdf5() -> Any:
    """Return the package h5py, or say how to install it."""
    try:
        import h5py
    except ImportError as error:
        raise FusionZooError(
            "HDF5 files are read by h5py: pip install 'fusionzoo[hdf5]'"
        ) from error
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
                raise FusionZooError(
                    f"{self} is out of range: the array has shape {tuple(array.shape)}"
                )
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
    """Return the file or the part of an array that a cell names; of a list each of them.

    Cells that are no text, and lists of numbers, stay as they are.
    """
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

    def __init__(
        self,
        array: ArrayItem,
        *,
        offsets: Any = None,
        lengths: Any = None,
    ) -> None:
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


def check_rows(
    table: pa.Table, kinds: Mapping[str, str], root: Path, place: Callable[[int], str]
) -> None:
    """Raise an error for a cell whose array lacks its rows, or has another shape than the others.

    `kinds` maps the columns to their kinds. At most `MAX_OPENED` arrays are opened; what is wrong
    with others is found when their cells are read.
    """
    for name, kind in kinds.items():
        if not pa.types.is_string(table[name].type):
            continue
        cells = _array_cells(table[name])
        arrays = cells.group_by(["file", "key", "is_row"]).aggregate([("end", "max")]).to_pylist()
        first: tuple[str, int] | None = None  # the first array, and the width of its values
        for array in arrays if len(arrays) <= MAX_OPENED else ():
            checked = _problem(array, cells, kind, root, first)
            if isinstance(checked, int):
                first = first or (array["file"], checked)
                continue
            problem, row = checked
            raise FusionZooError(f"{place(row)}: {name} {table[name][row].as_py()!r} {problem}")


def _array_cells(column: pa.ChunkedArray) -> pa.Table:
    """Return file, key, row of the table and the end of the rows of each cell that names some."""
    parts = pc.extract_regex(column, PATTERN).combine_chunks()
    fields = {field.name: parts.field(number) for number, field in enumerate(parts.type)}
    is_row = pc.equal(fields["colon"], "")
    last = pc.if_else(is_row, fields["start"], fields["stop"])
    last = pc.if_else(pc.equal(last, ""), pa.scalar(None, pa.string()), last)
    end = pc.add(last.cast(pa.int64()), is_row.cast(pa.int64()))
    rows = pa.array(range(len(column)))
    columns = {"file": fields["file"], "key": fields["key"], "is_row": is_row}
    cells = pa.table({**columns, "row": rows, "end": end})
    return cells.filter(pc.and_(parts.is_valid(), last.is_valid()))


def _problem(
    array: Mapping[str, Any], cells: pa.Table, kind: str, root: Path, first: tuple[str, int] | None
) -> int | tuple[str, int]:
    """Return the width of an array's values, or what is wrong with it and a row that says so."""
    of_array = pc.and_(pc.equal(cells["file"], array["file"]), pc.equal(cells["key"], array["key"]))
    rows = cells.filter(pc.and_(of_array, pc.equal(cells["is_row"], array["is_row"])))
    row = rows["row"][0].as_py()
    try:
        shape = tuple(open_array(root / array["file"], array["key"]).shape)
    except FusionZooError as error:
        return f"cannot be read: {error}", row
    if array["end_max"] > (shape[0] if shape else 0):
        outside = rows.filter(pc.greater(rows["end"], shape[0] if shape else 0))
        return f"is out of range: the array has shape {shape}", outside["row"][0].as_py()
    if kind not in DIMENSIONS:
        return 0
    value_shape = shape[1:] if array["is_row"] else shape
    if len(value_shape) != DIMENSIONS[kind]:
        return f"has shape {value_shape}; a {kind} has {DIMENSIONS[kind]} dimension(s)", row
    if first is not None and first[1] != value_shape[-1]:
        return f"is {value_shape[-1]} wide, and {first[0]} has values of width {first[1]}", row
    return int(value_shape[-1])
