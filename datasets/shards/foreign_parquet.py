"""Open Parquet files without an index: all columns but those of bytes are read at once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fusionzoo.errors import FusionZooError, one_line

from ..formats.embedded import BINARY_TYPES, media_value, row_numbers
from ..formats.loaded import Loaded
from ..formats.parquet import check_parquet
from ..formats.parquet_folder import SHARD
from .blocks import ParquetBlocks, StoredCells
from .index import ShardFile
from .storage import Storage


class OpenedFile(NamedTuple):
    """What is known of a Parquet file once it is open."""

    shard: ShardFile
    table: pa.Table  # without the columns of bytes
    present: dict[str, np.ndarray]  # column of bytes -> which rows have a value
    sizes: dict[str, np.ndarray]  # and an estimate of their bytes
    paths: dict[str, list[tuple[int, str]]]  # and row and path of values that are files
    lists: list[str]  # columns of lists of bytes


def open_parquet_files(
    storage: Storage, names: Sequence[str], splits: Sequence[str] | None = None
) -> Loaded:
    """Open Parquet files; `splits` names the split of each, else their names do."""
    files = [_open(storage, name) for name in names]
    blocks = ParquetBlocks(storage, [file.shard for file in files])
    columns = list(dict.fromkeys(name for file in files for name in file.present))
    counts = [sum(file.shard.blocks) for file in files]
    try:
        table = pa.concat_tables([file.table for file in files], promote_options="default")
    except pa.ArrowException as error:
        raise FusionZooError(
            f"{storage}: its files differ in their columns: {one_line(error)}"
        ) from error
    memory: dict[str, Any] = {}
    starts = np.cumsum([0, *counts])
    for column in columns:
        absent = [np.zeros(count, bool) for count in counts]
        present = [x.present.get(column, y) for x, y in zip(files, absent, strict=True)]
        sizes = [x.sizes.get(column, y) for x, y in zip(files, absent, strict=True)]
        read_struct = partial(media_value, root=storage.folder)
        cells = StoredCells(blocks, column, "", np.concatenate(sizes), read_struct)
        cells.has_lists = any(column in file.lists for file in files)
        cells.files = [
            (int(start) + row, path)
            for start, file in zip(starts, files, strict=False)
            for row, path in file.paths.get(column, [])
        ]
        if cells.files and storage.folder is None:
            raise FusionZooError(
                f"{storage}: {column} names files, such as {cells.files[0][1]!r}, which are not in"
                " the shards: `fusionzoo data convert` puts them there"
            )
        memory[column] = cells
        table = table.append_column(column, row_numbers(np.concatenate(present)))
    if splits is None:
        splits = [_split_of(name) for name in names]
        if "split" in table.column_names:
            return Loaded(table=table, source=str(storage), root=storage.folder, memory=memory)
    if "split" in table.column_names:
        table = table.drop_columns("split")
    split_names = np.repeat(list(splits), counts)
    table = table.append_column("split", pa.array(split_names.tolist(), pa.string()))
    return Loaded(
        table=table,
        source=str(storage),
        root=storage.folder,
        memory=memory,
        split_rule="the names of the files",
    )


def _split_of(name: str) -> str:
    stem = name.removesuffix(".parquet")
    shard = SHARD.fullmatch(stem)
    return shard["split"] if shard else stem


def has_bytes(path: Path) -> bool:
    """Whether a Parquet file has a column of bytes or of `{bytes, path}`, or of lists of them."""
    import pyarrow.parquet as pq

    try:
        return any(_is_stored(field.type) for field in pq.read_schema(path))
    except (pa.ArrowException, OSError) as error:
        raise FusionZooError(f"{path} cannot be read: {one_line(error)}") from error


def _is_stored(kind: pa.DataType) -> bool:
    if pa.types.is_list(kind):
        return not pa.types.is_list(kind.value_type) and _is_stored(kind.value_type)
    if pa.types.is_struct(kind):
        return "bytes" in [field.name for field in kind]
    return any(is_type(kind) for is_type in BINARY_TYPES)


def _open(storage: Storage, name: str) -> OpenedFile:
    import pyarrow.parquet as pq

    where = storage.where(name)
    try:
        size = storage.size(name)
        source = storage.open(name, size)
        with pq.ParquetFile(source, page_checksum_verification=True) as file:
            schema = file.schema_arrow
            stored = [field.name for field in schema if _is_stored(field.type)]
            light = [column for column in schema.names if column not in stored]
            check_parquet(where, size, file, source, light)
            rows = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
            shard = ShardFile(name=name, size=size, blocks=rows)
            present, sizes, paths = {}, {}, {}
            for column in stored:
                present[column], sizes[column], paths[column] = _presence(file, column)
            table = file.read(columns=light, use_threads=storage.folder is not None)
    except FusionZooError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise FusionZooError(f"{where} cannot be read: {one_line(error)}") from error
    lists = [column for column in stored if pa.types.is_list(schema.field(column).type)]
    return OpenedFile(shard, table.select(light), present, sizes, paths, lists)


def _presence(file: Any, column: str) -> tuple[np.ndarray, np.ndarray, list[tuple[int, str]]]:
    """Return which rows of a column have a value, a guess at the bytes, and values that are files.

    A row group is read only where its statistics leave open which rows have one.
    """
    leaf = re.compile(rf"{re.escape(column)}(\.\w+\.\w+)?(?P<field>\.bytes|\.path)?")
    names = [leaf.fullmatch(file.schema.column(i).path) for i in range(len(file.schema))]
    leaves = {name["field"]: i for i, name in enumerate(names) if name}
    present, sizes, paths, start = [], [], [], 0
    for number in range(file.num_row_groups):
        group = file.metadata.row_group(number)
        position = leaves.get(".bytes", leaves.get(None))
        data = None if position is None else group.column(position)
        count = group.num_rows
        num_null = _nulls(data)
        if num_null == 0:
            has_value = np.ones(count, bool)
        else:
            values = file.read_row_group(number, columns=[column], use_threads=False).column(0)
            has_value, files = _values_and_paths(values)
            paths += [(start + row, path) for row, path in files]
        mean = (data.total_uncompressed_size if data is not None else 0) / max(1, has_value.sum())
        present.append(has_value)
        sizes.append(np.where(has_value, mean, 0))
        start += count
    empty = [np.zeros(0, bool)]
    return np.concatenate([*empty, *present]), np.concatenate([*empty, *sizes]), paths


def _nulls(chunk: Any) -> int | None:
    statistics: Any = chunk.statistics if chunk is not None else None
    if statistics is None or not statistics.has_null_count:
        return None
    return int(statistics.null_count)


def _values_and_paths(values: pa.ChunkedArray) -> tuple[np.ndarray, list[tuple[int, str]]]:
    if pa.types.is_list(values.type):
        rows = pc.list_parent_indices(values).to_pylist()
        _, files = _values_and_paths(pc.list_flatten(values))
        lengths = pc.fill_null(pc.list_value_length(values), 0)
        return lengths.to_numpy() > 0, [(rows[item], path) for item, path in files]
    if not pa.types.is_struct(values.type):
        return values.is_valid().to_numpy(zero_copy_only=False), []
    has_bytes = pc.struct_field(values, "bytes").is_valid().to_numpy(zero_copy_only=False)
    paths: list[Any] = [None] * len(values)
    if "path" in [field.name for field in values.type]:
        paths = pc.struct_field(values, "path").to_pylist()
    files = [
        (row, path) for row, path in enumerate(paths) if path is not None and not has_bytes[row]
    ]
    has_bytes = has_bytes.copy()
    has_bytes[[row for row, _ in files]] = True
    return has_bytes, files
