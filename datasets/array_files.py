"""Open arrays in .npy, .npz and HDF5 files without reading them whole, where the file permits.

Nothing is unpickled, and sizes are compared with the file before memory is allocated.
"""

from __future__ import annotations

import math
import os
import zipfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from fusionzoo.errors import FusionZooError, did_you_mean, one_line

from .npy import check_npy

ZIP, HDF5 = (".npz",), (".h5", ".hdf5")
MAX_LOADED = 2**30  # bytes of a compressed array, which is decompressed whole, or of an HDF5 chunk
NUMBERS, WORDS = "biuf", "US"  # kinds of dtypes
LOCAL_HEADER = 30  # bytes of the header of a zip member, before its name


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
            with _hdf5().File(path, "r") as file:
                return _dataset_names(file)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise FusionZooError(f"{path} cannot be opened: {one_line(error)}") from error
    return []


def group_names(path: Path, key: str) -> list[str] | None:
    """Return the names of the datasets in an HDF5 group; None if `key` is no group."""
    if path.suffix.lower() not in HDF5:
        return None
    with _hdf5().File(path, "r") as file:
        found = _follow(file, key, path)
        return _dataset_names(found) if isinstance(found, _hdf5().Group) else None


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


def _hdf5() -> Any:
    try:
        import h5py
    except ImportError as error:
        raise FusionZooError(
            "HDF5 files are read by h5py: pip install 'fusionzoo[hdf5]'"
        ) from error
    return h5py


def _open_dataset(path: Path, key: str) -> Any:
    """Open a dataset; one that reads other files is an error."""
    h5py = _hdf5()
    file = h5py.File(path, "r")
    if not key:
        key = _choose(key, _dataset_names(file), path)
    dataset = _follow(file, key, path)
    if not isinstance(dataset, h5py.Dataset):
        raise FusionZooError(f"{path}::{key} is a group of {', '.join(_dataset_names(dataset))}")
    if dataset.external or dataset.is_virtual:
        raise FusionZooError(f"{path}::{key} is stored in other files, which are not read")
    if math.prod(dataset.chunks or (1,)) * dataset.dtype.itemsize > MAX_LOADED:
        raise FusionZooError(f"{path}::{key} has chunks of {dataset.chunks}, too large to load")
    return dataset


def _follow(file: Any, key: str, path: Path) -> Any:
    """Return what a key names; links, which may lead to other files, are an error."""
    h5py = _hdf5()
    found = file
    for part in key.split("/"):
        names = list(found) if isinstance(found, h5py.Group) else []
        if part not in names:
            _choose(part, names, path)
        if not isinstance(found.get(part, getlink=True), h5py.HardLink):
            raise FusionZooError(f"{path}::{key} is a link, which is not followed")
        found = found[part]
    return found


def _dataset_names(group: Any) -> list[str]:
    """Return the names of the datasets directly in a group, links left out."""
    h5py = _hdf5()
    return [
        name
        for name in group
        if isinstance(group.get(name, getlink=True), h5py.HardLink)
        and group.get(name, getclass=True) is h5py.Dataset
    ]
