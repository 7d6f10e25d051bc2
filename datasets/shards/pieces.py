"""The folder of a conversion: whose it is, and the index in pieces, one per shard."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fusionzoo.errors import FusionZooError
from fusionzoo.files import replacing

from .index import BYTES, ITEMS, NAME, OFFSETS, read_index
from .storage import Storage

PARTIAL = ".partial"  # folder of what a conversion under way keeps


@dataclass(frozen=True, kw_only=True)
class Written:
    """What a conversion wrote."""

    folder: Path
    samples: int
    files: int
    bytes: int
    resumed: int  # shards that were there already
    failed: int  # values that could not be used, and are missing in the shards


def check_folder(out: Path, source: str) -> None:
    """Raise an error if the folder holds anything but this conversion, finished or not."""
    if not out.exists():
        return
    if not out.is_dir():
        raise FusionZooError(f"{out} is a file: name a folder")
    storage = Storage(out)
    done = read_index(storage) or read_index(storage, f"{PARTIAL}/{NAME}")
    if done is None and any(x.name != PARTIAL for x in out.iterdir()):
        raise FusionZooError(f"{out} exists and is not an empty folder: name another one")
    if done is not None and done.source != source:
        raise FusionZooError(
            f"{out} holds shards of other samples, or with other settings: name another folder, or"
            " remove it"
        )


def index_piece(index: Mapping[str, list[Any]], lists: Sequence[str]) -> pa.Table:
    """Return a shard's part of the index; modalities in `lists` have a number of each item."""
    listed = {f"{key}{name}" for key in (BYTES, OFFSETS) for name in lists}
    return pa.table(
        {
            name: pa.array([x if isinstance(x, list) else None for x in cells], ITEMS)
            if name in listed
            else pa.array(cells, pa.int64())
            for name, cells in index.items()
        }
    )


def join_pieces(
    pieces: Sequence[pa.Table], light: pa.Table, stored: Sequence[str], format: str
) -> pa.Table:
    """Return the light columns with the rows, bytes and, of a tar, places of the stored values.

    A piece has the position in the data set of each of its shard's rows.
    """
    rows = pa.concat_tables(pieces)
    order = np.argsort(rows.column("position").to_numpy(), kind="stable")
    rows = rows.append_column("row", pa.array(np.arange(len(rows)))).take(pa.array(order))
    columns: dict[str, Any] = {name: light[name] for name in light.column_names}
    numbers = rows.column("row").to_numpy()
    structs: Mapping[str, list[Any]] = {BYTES: [], OFFSETS: []}
    for name in stored:
        sizes = rows.column(f"{BYTES}{name}")
        columns[name] = pa.array(numbers, mask=sizes.is_null().to_numpy())
        for key, cells in structs.items():
            cells.append(rows.column(f"{key}{name}").combine_chunks())
    for key in (BYTES, OFFSETS) if format == "webdataset" else (BYTES,):
        if stored:
            columns[key] = pa.StructArray.from_arrays(structs[key], names=list(stored))
    return pa.table(columns)


def has_any(table: pa.Table, names: Sequence[str]) -> pa.Array:
    """Return which rows have a value in any of the columns."""
    valid = np.zeros(len(table), bool)
    for name in names:
        valid |= table.column(name).is_valid().to_numpy()
    return pa.array(valid)


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def range_checksums(path: Path, ranges: Sequence[Sequence[int]]) -> list[int]:
    """Return the CRC-32 of each range of a file."""
    checksums = []
    with path.open("rb") as file:
        for start, stop in ranges:
            file.seek(start)
            checksums.append(zlib.crc32(file.read(stop - start)))
    return checksums


def write_arrow(path: Path, table: pa.Table) -> None:
    """Write a table as an Arrow file, atomically."""
    with replacing(path) as partial, pa.ipc.new_file(str(partial), table.schema) as file:
        file.write_table(table)


def read_arrow(path: Path) -> pa.Table:
    """Read an Arrow file."""
    with pa.ipc.open_file(str(path)) as file:
        return file.read_all()
