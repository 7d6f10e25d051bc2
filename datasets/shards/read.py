"""Open a folder of shards, on this disk or behind a URL, without reading images and clips."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from fusionzoo.errors import FusionZooError, check_known, explained

from ..tables.parquet import files_by_split, is_parquet_folder, is_saved_folder, read_saved_folder
from ..tables.provenance import LoadedTable, with_kinds
from .blocks import Blocks, ParquetBlocks, TarBlocks
from .foreign import open_parquet_files, open_tar_files
from .order import stored_cells
from .storage import (
    BYTES,
    LISTED,
    NAME,
    OFFSETS,
    SAMPLES,
    STORED,
    ShardIndex,
    Storage,
    is_url,
    read_index,
    read_samples,
    stored_entries,
    warn_of_missing_checksums,
)


def is_shard_folder(path: Path) -> bool:
    """Whether a folder holds shards that `fusionzoo data convert` wrote, or WebDataset's."""
    return path.is_dir() and ((path / NAME).is_file() or any(path.glob("*.tar")))


def open_url(url: str) -> LoadedTable:
    """Open shards behind a URL: those of `fusionzoo data convert`, or Parquet or tar files."""
    storage = Storage(url)
    index = read_index(storage)
    if index is not None:
        return open_index(storage, index)
    names = storage.names(".parquet")
    _check_listed(storage, names)
    if names:
        return open_parquet_files(storage, names)
    tars = storage.names(".tar")
    if tars:
        return open_tar_files(storage, tars)
    raise FusionZooError(f"{storage} has no shards: `fusionzoo data convert` writes them")


def open_index(storage: Storage, index: ShardIndex) -> LoadedTable:
    """Open shards by their index; only that is read."""
    if storage.folder is not None:
        _check_sizes(storage, index, NAME)
    warn_of_missing_checksums(storage, index)
    table = read_samples(storage, index.samples_sha256)
    num_rows = sum(sum(file.blocks) for file in index.files)
    stored = [name for name, kind in index.kinds.items() if kind in STORED]
    for name in index.kinds:
        check_known(name, table.column_names, f"{storage} has no column {name!r} in its index")
    with explained(
        f"{storage.where(SAMPLES)} does not fit the shards", KeyError, pa.ArrowException
    ):
        sizes = {name: stored_entries(table, BYTES, name, num_rows) for name in stored}
        blocks: Blocks = ParquetBlocks(storage, index.files)
        if index.format == "webdataset":
            offsets = {name: stored_entries(table, OFFSETS, name, num_rows) for name in stored}
            blocks = TarBlocks(storage, index.files, offsets, sizes)
    memory = {name: stored_cells(blocks, name, index.kinds[name], sizes[name]) for name in stored}
    table = table.drop_columns([x for x in (BYTES, OFFSETS) if x in table.column_names])
    table = table.replace_schema_metadata(with_kinds(pa.schema([]), index.kinds).metadata)
    return LoadedTable(
        table=table,
        source=str(storage),
        root=storage.folder,
        memory=memory,
        order=tuple(index.kinds),
    )


def open_shards(root: Any) -> LoadedTable | None:
    """Open a URL, or a folder of shards, Parquet or saved Arrow files; None: it is none of them."""
    if is_url(root):
        return open_url(root)
    path = Path(root).expanduser()
    if is_shard_folder(path):
        storage = Storage(path)
        index = read_index(storage)
        tars = storage.names(".tar")
        return open_tar_files(storage, tars) if index is None else open_index(storage, index)
    if is_saved_folder(path):
        return read_saved_folder(path)
    if not is_parquet_folder(path):
        return None
    by_split = files_by_split(path)
    files = [file for split in by_split.values() for file in split]
    names = [file.relative_to(path).as_posix() for file in files]
    _check_listed(Storage(path), names)
    splits = [split for split, chosen in by_split.items() for _ in chosen]
    return open_parquet_files(Storage(path), names, splits)


def is_sharded(path: Path) -> bool:
    """Whether a folder holds shards, Parquet files or what `save_to_disk` wrote."""
    return is_shard_folder(path) or is_saved_folder(path) or is_parquet_folder(path)


def _check_listed(storage: Storage, names: Sequence[str]) -> None:
    """Raise an error unless names, sizes and footers of a converted stream are as written."""
    index = read_index(storage, LISTED)
    if index is None:
        return
    _check_sizes(storage, index, LISTED)
    others = sorted({*names} - {file.name for file in index.files})
    if others:
        raise FusionZooError(f"{storage.where(others[0])} is not listed in {LISTED}: move it")
    footers = ParquetBlocks(storage, index.files)
    for number in range(len(index.files)):
        footers.check_footer(number)


def _check_sizes(storage: Storage, index: ShardIndex, name: str) -> None:
    """Raise an error for a shard that is not there, or not of the size that it had."""
    for file in index.files:
        with explained(f"{storage.where(file.name)}, listed in {name}, cannot be opened", OSError):
            size = storage.size(file.name)
        if size != file.size:
            where = f"{storage.where(file.name)} has {size:,} bytes"
            raise FusionZooError(f"{where}, and {name} says {file.size:,}: copy it again")
