"""Parquet files, and folders of Parquet or Arrow files as Hugging Face stores them."""

from __future__ import annotations

import re
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc as ipc

from fusionzoo.errors import FusionZooError, explained
from fusionzoo.files import read_json_object

from ..media.budgets import BUDGETS, check_expansion
from .arrow import check_unicode, plain_column
from .paths import PathChecker
from .provenance import SPLIT_RULE, LoadedTable

WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 12}  # bytes
OFFSET = 8  # bytes per value of text and lists, besides their contents
SHARD = re.compile(r"(?P<split>.+?)-(?P<number>\d{5})-of-(?P<count>\d{5})(-[0-9a-f]+)?")
NUMBER = re.compile(r"\d+")
STATE, SPLITS = "state.json", "dataset_dict.json"
RECORD_BATCH, DICTIONARY_BATCH = 3, 2  # types of Arrow's messages
HEADER_TYPE, HEADER, DATA, COMPRESSION = 1, 2, 1, 3  # numbers of fields in their tables


def read_parquet(path: Path) -> pa.Table:
    """Read a Parquet file; one that would take far more memory than its size is an error."""
    import pyarrow.parquet as pq

    # `read_table` would import pandas, and make columns of folder names like `a=b`.
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        check_parquet(str(path), path.stat().st_size, file, path)
        return file.read()


def check_parquet(
    name: str, size: int, file: Any, source: Any, columns: Collection[str] | None = None
) -> None:
    """Raise an error if the (chosen) columns of a file would take too much memory."""
    chosen = [
        column
        for column in range(file.metadata.num_columns)
        if columns is None or file.schema.column(column).path.partition(".")[0] in columns
    ]
    check_expansion(name, size, sum(_column_bytes(source, file, column) for column in chosen))


def _column_bytes(path: Any, file: Any, column: int) -> int:
    """Return an upper bound of a column's bytes in memory; an exact sum where that is large."""
    groups = [file.metadata.row_group(i).column(column) for i in range(file.num_row_groups)]
    num_values = sum(group.num_values for group in groups)
    description = file.schema.column(column)
    if description.physical_type != "BYTE_ARRAY":
        width = WIDTHS.get(description.physical_type) or description.length
        return int(num_values * (width + OFFSET * (description.max_repetition_level > 0)))
    plain = sum(group.total_uncompressed_size for group in groups) + num_values * OFFSET
    if not any("DICTIONARY" in word for group in groups for word in group.encodings):
        return int(plain)
    longest = max((_longest_entry(path, column, i) for i in range(len(groups))), default=0)
    bound = plain + num_values * longest
    if bound <= BUDGETS["table"].limit:
        return int(bound)
    return int(plain + _text_bytes(path, column))


def _longest_entry(path: Any, column: int, group: int) -> int:
    """Return the bytes of the longest entry in a column's dictionary, from its first value."""
    for values in _dictionaries(path, column, 1, [group]):
        return int(pc.max(pc.binary_length(values.dictionary)).as_py() or 0)
    return 0


def _text_bytes(path: Any, column: int) -> int:
    """Return the bytes of all texts of a column; each distinct one is in memory once."""
    total = 0
    for values in _dictionaries(path, column, 1 << 16, None):
        lengths = pc.binary_length(values.dictionary).cast(pa.int64())
        total += pc.sum(lengths.take(values.indices)).as_py() or 0
    return total


def _dictionaries(
    path: Path, column: int, batch: int, groups: list[int] | None
) -> Iterator[pa.DictionaryArray]:
    """Yield a column's values as dictionary arrays, those in lists one after another."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        name = file.schema.column(column).path
    options: Any = {"read_dictionary": [name], "page_checksum_verification": True}
    with pq.ParquetFile(path, **options) as file:
        for rows in file.iter_batches(batch, row_groups=groups, columns=[name]):
            values = rows.column(0)
            while not pa.types.is_dictionary(values.type):
                if not hasattr(values, "flatten") or pa.types.is_struct(values.type):
                    return  # neither text nor a list of texts: never read as a modality
                values = values.flatten()
            yield values


def is_parquet_folder(path: Path) -> bool:
    """Whether a path is a folder with Parquet files, in it or in its only folder with some."""
    return path.is_dir() and (bool(_parquet(path)) or bool(_folders_with_parquet(path)))


def join_splits(tables: Mapping[str, pa.Table], what: str) -> pa.Table:
    """Return the rows of the tables of several splits, with a column `split` of their names."""
    parts = [x.drop_columns("split") if "split" in x.column_names else x for x in tables.values()]
    with explained(f"{what} differ", pa.ArrowException):
        table = pa.concat_tables(parts, promote_options="permissive")
    names = np.repeat([*tables], [len(part) for part in parts])
    return table.append_column("split", pa.array(names.tolist(), pa.string()))


def _top(path: Path) -> Path:
    """Return the folder whose files, or whose folders' files, are the shards."""
    if _parquet(path):
        return path
    folders = _folders_with_parquet(path)
    numbered = [
        folder for folder in folders if all(NUMBER.fullmatch(f.stem) for f in _parquet(folder))
    ]
    if folders and len(numbered) == len(folders):  # train/0000.parquet
        return path
    if len(folders) != 1:
        names = ", ".join(folder.name for folder in folders)
        raise FusionZooError(f"{path}: --data.root names one of its folders: {names}")
    return folders[0]


def files_by_split(path: Path) -> Mapping[str, Sequence[Path]]:
    """Return the Parquet files of each split, in order."""
    top = _top(path)
    by_split: dict[str, list[Path]] = {}
    for file in _parquet(top):
        shard = SHARD.fullmatch(file.stem)
        by_split.setdefault(shard["split"] if shard else file.stem, []).append(file)
    if not by_split:
        return {folder.name: _parquet(folder) for folder in _folders_with_parquet(top)}
    for split, files in by_split.items():
        shards = [shard for shard in (SHARD.fullmatch(file.stem) for file in files) if shard]
        expected = int(shards[0]["count"]) if shards else len(files)
        if len(files) != expected:
            raise FusionZooError(f"{top}: {len(files)} of {expected} Parquet files of {split!r}")
    return by_split


def _folders_with_parquet(path: Path) -> list[Path]:
    if not path.is_dir():
        return []
    folders = (entry for entry in path.iterdir() if not entry.name.startswith("."))
    return sorted(folder for folder in folders if folder.is_dir() and _parquet(folder))


def _parquet(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.parquet"))


def is_saved_folder(path: Path) -> bool:
    """Whether `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote a folder."""
    return path.is_dir() and ((path / STATE).is_file() or (path / SPLITS).is_file())


def read_saved_folder(path: Path) -> LoadedTable:
    """Open the files of all splits; the names of the splits are those of the `DatasetDict`."""
    if not (path / SPLITS).is_file():
        return LoadedTable(table=_read_split(path, path), source=str(path), root=path)
    splits = read_json_object(path / SPLITS).get("splits")
    if not isinstance(splits, list) or not splits or not all(map(_is_name, splits)):
        raise FusionZooError(f"{path / SPLITS} does not list the splits")
    parts = [_read_split(path, path / split) for split in splits]
    table = join_splits(dict(zip(splits, parts, strict=True)), f"the splits of {path}")
    return LoadedTable(table=table, source=str(path), root=path, split_rule=SPLIT_RULE)


def _read_split(root: Path, folder: Path) -> pa.Table:
    """Return the rows of one data set."""
    state = read_json_object(folder / STATE)
    files = state.get("_data_files")
    entries = files if isinstance(files, list) else []
    names = [entry.get("filename") if isinstance(entry, dict) else "" for entry in entries]
    if not names or not all(map(_is_name, names)):
        raise FusionZooError(f"{folder / STATE} names no file of data")
    if state.get("_indices_data_files"):
        raise FusionZooError(f"{folder} is of an old version of datasets: save it anew")
    checker = PathChecker(root, allow_outside=False, must_exist=True)
    tables = []
    for file in (folder / str(name) for name in names):
        problem = checker.problem(str(file.relative_to(root)))
        if problem:
            raise FusionZooError(f"{folder / STATE}: {problem.partition(' (--data.')[0]}")
        tables.append(_read_file(file))
    with explained(f"the files of {folder} differ", pa.ArrowException):
        return pa.concat_tables(tables)


def _read_file(file: Path) -> pa.Table:
    damages = (pa.ArrowException, OSError, ValueError, struct.error)
    with explained(f"{file} cannot be read as a stream of Arrow", *damages):
        source = pa.memory_map(str(file))
        for message in ipc.MessageReader.open_stream(source):
            if _is_compressed(bytes(message.metadata)):
                raise FusionZooError(f"{file} is compressed, which save_to_disk never does")
        source.seek(0)
        table = ipc.open_stream(source).read_all()
    columns = {name: plain_column(table.column(name)) for name in table.column_names}
    plain = pa.table(columns).replace_schema_metadata(table.schema.metadata)
    return check_unicode(plain, str(file))


def _is_compressed(metadata: bytes) -> bool:
    """Return whether a message holds compressed columns, which may expand without bounds."""
    message = struct.unpack_from("<I", metadata)[0]
    kind_at, header_at = (_field(metadata, message, x) for x in (HEADER_TYPE, HEADER))
    kind = metadata[kind_at] if kind_at else 0
    if kind not in (RECORD_BATCH, DICTIONARY_BATCH) or not header_at:
        return False
    header = _follow(metadata, header_at)
    if kind == DICTIONARY_BATCH:
        data_at = _field(metadata, header, DATA)
        header = _follow(metadata, data_at) if data_at else header
    return _field(metadata, header, COMPRESSION) > 0


def _field(data: bytes, table: int, number: int) -> int:
    """Return where a field of a table of FlatBuffers is; 0 if it is not there."""
    fields = table - struct.unpack_from("<i", data, table)[0]
    entry = 4 + 2 * number
    if entry >= struct.unpack_from("<H", data, fields)[0]:
        return 0
    offset = int(struct.unpack_from("<H", data, fields + entry)[0])
    return table + offset if offset else 0


def _follow(data: bytes, position: int) -> int:
    return position + int(struct.unpack_from("<I", data, position)[0])


def _is_name(name: Any) -> bool:
    """Return whether a name is that of a file or folder, without folders before it."""
    return isinstance(name, str) and name not in ("", ".", "..") and Path(name).name == name
