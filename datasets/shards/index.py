"""The index of a folder of shards: `shards.json` names the files, `samples.arrow` the samples.

`samples.arrow` has all columns besides pictures, clips and arrays, in the order of the source. In
place of those there are the numbers of their rows in the shards, null where a sample has none.
Structs by modality hold the bytes and, of a tar, the places of the values; of a modality with
several pictures or clips they hold lists, with a number of each.

Everything that is read is verified: `shards.json` has digests of itself and of `samples.arrow`,
and checksums of each block of a tar and of each Parquet file's footer; Parquet's pages have
checksums in the file.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fusionzoo.errors import FusionZooError, one_line
from fusionzoo.structures import KINDS

from .storage import Storage

NAME = "shards.json"
SAMPLES = "samples.arrow"
DIGESTS = "SHA256SUMS"
VERSION = 2
KNOWN_VERSIONS = (1, 2)  # the first has no checksums but digests of whole files
FORMATS = ("parquet", "webdataset")
STORED = ("image", "audio", "vector", "sequence")  # kinds whose values are in the shards alone
BYTES, OFFSETS = "_bytes", "_offsets"  # columns of samples.arrow: structs by modality
ITEMS = pa.list_(pa.int64())  # type of their fields of a modality with lists
_log = logging.getLogger("fusionzoo")


@dataclass(frozen=True, kw_only=True)
class ShardFile:
    """One shard."""

    name: str
    size: int  # bytes
    blocks: Sequence[int]  # rows of each block
    # First byte, and that after the last: of each block of a tar, of the footer of a Parquet file.
    ranges: Sequence[Sequence[int]] = ()
    sha256: str = ""
    checksums: Sequence[int] = ()  # CRC-32 of each range: read often, and SHA-256 costs thrice


@dataclass(frozen=True, kw_only=True)
class ShardIndex:
    """What `shards.json` holds."""

    format: str  # of FORMATS
    kinds: Mapping[str, str]  # of the modalities
    source: str  # a digest of the samples and settings that the shards were made from
    files: Sequence[ShardFile] = field(default_factory=tuple)
    samples_sha256: str = ""  # of samples.arrow

    def to_json(self) -> dict[str, Any]:
        """Return the contents of `shards.json`."""
        contents = {"version": VERSION, **asdict(self)}
        return {**contents, "sha256": _digest(contents)}


def read_index(storage: Storage, name: str = NAME) -> ShardIndex | None:
    """Read `shards.json`; None if there is none."""
    data = storage.read(name)
    if data is None:
        return None
    where = storage.where(name)
    try:
        contents = json.loads(data)
        recorded = contents.pop("sha256", "")
        digest, version = _digest(contents), contents.pop("version")
        if version not in KNOWN_VERSIONS:
            raise ValueError(f"its version is not {VERSION}: update fusionzoo")
        files = tuple(ShardFile(**entry) for entry in contents.pop("files"))
        index = ShardIndex(**contents, files=files)
        _check(index)
        if (recorded or version > 1) and recorded != digest:
            raise ValueError("it was changed since it was written: copy it again")
        return index
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise FusionZooError(f"{where} cannot be read: {one_line(error)}") from None


def warn_of_missing_checksums(storage: Storage, index: ShardIndex) -> None:
    """Warn of shards that were written without checksums of what is read."""
    if not all(file.checksums for file in index.files):
        _log.warning(
            "%s was written by an earlier version, without checksums: whether its bytes were"
            " changed is not checked; `fusionzoo data convert` into another folder adds them",
            storage,
        )


def read_samples(storage: Storage, digest: str = "") -> pa.Table:
    """Read `samples.arrow`, whose SHA-256 must be `digest`, if that is known.

    On this disk it is mapped into memory, and shared by processes.
    """
    where = storage.where(SAMPLES)
    try:
        if storage.folder is not None:
            source = pa.memory_map(str(storage.folder / SAMPLES)).read_buffer()
        else:
            data = storage.read(SAMPLES)
            if data is None:
                raise FusionZooError(f"{where} does not exist: copy the whole folder")
            source = pa.py_buffer(data)
        if digest and hashlib.sha256(source).hexdigest() != digest:
            raise FusionZooError(
                f"{where} was changed since it was written: copy it again, or convert again"
            )
        table = pa.ipc.open_file(source).read_all()
        table.validate()
        return table
    except FusionZooError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise FusionZooError(f"{where} cannot be read: {one_line(error)}") from error


def stored_sizes(table: pa.Table, column: str, name: str, num_rows: int) -> np.ndarray:
    """Return the entries of a struct of `samples.arrow` by row of the shards; -1 without one."""
    rows, numbers = struct_entries(table, column, name, num_rows)
    by_row = np.full(num_rows, -1, np.int64)
    by_row[rows] = pc.fill_null(numbers, -1).to_numpy()
    return by_row


def struct_entries(
    table: pa.Table, column: str, name: str, num_rows: int
) -> tuple[np.ndarray, pa.ChunkedArray]:
    """Return the rows of the shards that have a value, and its entries in a struct."""
    numbers = pc.struct_field(table.column(column), name)
    rows = table.column(name)
    known = rows.is_valid()
    places = rows.filter(known).to_numpy()
    if len(places) and not 0 <= places.min() <= places.max() < num_rows:
        raise FusionZooError(f"{SAMPLES}: {name} names rows outside of the shards")
    return places, numbers.filter(known)


def _check(index: ShardIndex) -> None:
    """Raise an error unless the index is of files in the folder, and says of which kinds."""
    if index.format not in FORMATS:
        raise ValueError(f"format {index.format!r} is none of {', '.join(FORMATS)}")
    if not index.kinds or any(kind not in KINDS for kind in index.kinds.values()):
        raise ValueError(f"kinds {dict(index.kinds)!r}; known are {', '.join(KINDS)}")
    for file in index.files:
        if "/" in file.name or "\\" in file.name or file.name.startswith("."):
            raise ValueError(f"{file.name!r} is no file of the folder")
        if any(not isinstance(x, int) or x < 0 for x in (file.size, *file.blocks)):
            raise ValueError(f"{file.name}: sizes must be numbers")
        if index.format == "webdataset" and len(file.ranges) != len(file.blocks):
            raise ValueError(f"{file.name}: its blocks have no ranges")
        if any(len(x) != 2 or not 0 <= x[0] <= x[1] <= file.size for x in file.ranges):
            raise ValueError(f"{file.name}: a block is outside of the file")
        if file.checksums and len(file.checksums) != len(file.ranges):
            raise ValueError(f"{file.name}: its ranges and checksums differ in number")


def _digest(contents: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the contents of `shards.json`, whatever its white space."""
    return hashlib.sha256(json.dumps(contents).encode()).hexdigest()
