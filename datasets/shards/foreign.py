"""Open other people's shards without an index: Parquet files, WebDataset's tar files."""

from __future__ import annotations

import io
import json
import logging
import re
import tarfile
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from fusionzoo.errors import FusionZooError, explained

from ..media.arrays import check_npy
from ..media.budgets import check_budget
from ..media.decode import media_value
from ..media.formats import SUFFIXES
from ..tables.arrow import BINARY_TYPES, row_numbers, values_and_paths
from ..tables.parquet import SHARD, check_parquet
from ..tables.provenance import LoadedTable
from ..tables.splits import USUAL_NAMES
from .blocks import ParquetBlocks, StoredCells, TarBlocks
from .order import stored_cells
from .storage import ITEMS, ShardFile, Storage

BLOCK_BYTES = 4 << 20
END_MARK = bytes(1024)
MAX_PADDING = 1 << 20  # bytes of zeros behind the end mark; tar fills records of 10 kB
KIND_OF = {suffix: kind for kind in ("image", "audio", "text") for suffix in SUFFIXES[kind]}
TEXT = (".txt", ".caption", ".text")
LABEL = (".cls", ".label")
NUMBERED = re.compile(r"(?:(?P<name>.+)\.)?(?P<number>\d{1,6})")
NAMES = (
    "A sample's name ends at the first dot, and what stands between that and the ending is the name"
    " of a modality, as in 000017.left.png: rename the files"
)
NUMBER = re.compile(r"[-_.]?\d+$")
DAMAGES = (tarfile.TarError, OSError, EOFError, ValueError)
_log = logging.getLogger("fusionzoo")
Key = tuple[str, str]  # of a sample: folder, and name up to the first dot


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
) -> LoadedTable:
    """Open Parquet files; `splits` names the split of each, else their names do."""
    files = [_open(storage, name) for name in names]
    blocks = ParquetBlocks(storage, [file.shard for file in files])
    columns = list(dict.fromkeys(name for file in files for name in file.present))
    counts = [sum(file.shard.blocks) for file in files]
    with explained(f"{storage}: its files differ in their columns", pa.ArrowException):
        table = pa.concat_tables([file.table for file in files], promote_options="default")
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
    has_splits = splits is None and "split" in table.column_names
    if not has_splits:
        stems = [name.removesuffix(".parquet") for name in names]
        of_names = [shard["split"] if (shard := SHARD.fullmatch(x)) else x for x in stems]
        split_names = np.repeat(list(splits or of_names), counts)
        if "split" in table.column_names:
            table = table.drop_columns("split")
        table = table.append_column("split", pa.array(split_names.tolist(), pa.string()))
    return LoadedTable(
        table=table,
        source=str(storage),
        root=storage.folder,
        memory=memory,
        split_rule="" if has_splits else "the names of the files",
    )


def _is_stored(kind: pa.DataType) -> bool:
    if pa.types.is_list(kind):
        return not pa.types.is_list(kind.value_type) and _is_stored(kind.value_type)
    if pa.types.is_struct(kind):
        return "bytes" in [field.name for field in kind]
    return any(is_type(kind) for is_type in BINARY_TYPES)


def _open(storage: Storage, name: str) -> OpenedFile:
    import pyarrow.parquet as pq

    where = storage.where(name)
    with explained(f"{where} cannot be read", pa.ArrowException, OSError, ValueError, KeyError):
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
            table = file.read(columns=light, use_threads=storage.folder is not None).select(light)
    lists = [column for column in stored if pa.types.is_list(schema.field(column).type)]
    return OpenedFile(shard, table, present, sizes, paths, lists)


def _presence(file: Any, column: str) -> tuple[np.ndarray, np.ndarray, list[tuple[int, str]]]:
    """Return which rows have a value (statistics may tell), about their bytes, and paths."""
    leaf = re.compile(rf"{re.escape(column)}(\.\w+\.\w+)?(?P<field>\.bytes|\.path)?")
    names = [leaf.fullmatch(file.schema.column(i).path) for i in range(len(file.schema))]
    leaves = {name["field"]: i for i, name in enumerate(names) if name}
    present, sizes, paths, start = [], [], [], 0
    for number in range(file.num_row_groups):
        group = file.metadata.row_group(number)
        position = leaves.get(".bytes", leaves.get(None))
        data = None if position is None else group.column(position)
        count = group.num_rows
        statistics = data.statistics if data is not None else None
        if statistics is not None and statistics.has_null_count and not statistics.null_count:
            has_value = np.ones(count, bool)
        else:
            values = file.read_row_group(number, columns=[column], use_threads=False).column(0)
            has_value, files = values_and_paths(values)
            paths += [(start + row, path) for row, path in files]
        mean = (data.total_uncompressed_size if data is not None else 0) / max(1, has_value.sum())
        present.append(has_value)
        sizes.append(np.where(has_value, mean, 0))
        start += count
    empty = [np.zeros(0, bool)]
    return np.concatenate([*empty, *present]), np.concatenate([*empty, *sizes]), paths


class TarSample(NamedTuple):
    """What the headers and the small members of a sample tell."""

    file: str
    key: str  # its folder and name up to the first dot
    row: dict[str, Any]  # light columns
    fields: dict[str, Any]  # what its JSON members hold
    members: dict[str, dict[int, tuple[int, int]]]  # modality -> number, or -1 -> first byte, bytes


class Scan:
    """The samples of tar files, as their headers tell."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.given: dict[str, str] = {}  # column -> the member of the current sample that has it
        self.unread: dict[str, list[str]] = {}  # ending -> members that are no modality
        self.samples: list[TarSample] = []
        self.lists: set[str] = set()  # modalities with numbered members
        self.kinds: dict[str, str] = {}
        self.files: list[ShardFile] = []

    def read(self, name: str) -> None:
        """Read the headers of a file."""
        size = self.storage.size(name)
        file: Any = self.storage.open(name, size)
        opened = open(file, "rb") if isinstance(file, str) else io.BufferedReader(file)  # noqa: SIM115
        first, where = len(self.samples), self.storage.where(name)
        key: Key | None = None
        keys: set[Key] = set()
        starts: list[int] = []
        names: set[str] = set()
        with (
            explained(f"{where} cannot be read as a tar file", *DAMAGES),
            opened,
            tarfile.open(fileobj=opened, mode="r:") as tar,
        ):
            for member in tar:
                if member.isdir():
                    continue
                _check_member(member, names, where)
                folder, _, base = member.name.removeprefix("./").rpartition("/")
                stem, _, ending = base.partition(".")
                if not stem or not ending:
                    self.unread.setdefault("", []).append(member.name)
                    continue
                if (folder, stem) != key:
                    key = (folder, stem)
                    if key in keys:
                        raise FusionZooError(
                            f"{where}, {member.name}: other samples stand between the members"
                            f" of sample {stem!r}: write the tar again with `tar --sort=name`"
                        )
                    keys.add(key)
                    self.given = {}
                    word = f"{folder}/{stem}".lstrip("./")
                    self.samples.append(TarSample(name, word, {}, {}, {}))
                    starts.append(member.offset)
                self._add(tar, member, ending.lower(), name)
            _check_end(opened, tar.offset, size, where)
        split = NUMBER.sub("", name.removesuffix(".tar"))
        if split.lower() in USUAL_NAMES:
            for sample in self.samples[first:]:
                sample.row.setdefault("split", split)
        self.files.append(_shard(name, size, starts))

    def _add(self, tar: tarfile.TarFile, member: tarfile.TarInfo, ending: str, file: str) -> None:
        column, _, last = ending.rpartition(".")
        suffix = f".{last}"
        if suffix in (*TEXT, *LABEL, ".json"):
            check_budget("text file", member.size, f"{file}, {member.name}")
            contents: Any = tar.extractfile(member)
            where = f"{self.storage.where(file)}, {member.name}"
            with explained(f"{where} cannot be read", ValueError, RecursionError):
                text = contents.read().decode("utf-8-sig").strip()
                values = json.loads(text) if suffix == ".json" else text
            self._add_text(values, column, suffix, file, member.name)
            return
        kind = KIND_OF.get(suffix)
        if suffix == ".npy":
            where = f"{self.storage.where(file)}, {member.name}"
            shape, _, _ = check_npy(tar.extractfile(member), member.size, where)
            kind = "vector" if len(shape) == 1 else "sequence"
        if kind is None:
            self.unread.setdefault(suffix, []).append(member.name)
            return
        numbered = NUMBERED.fullmatch(column) if suffix != ".npy" else None
        name = (numbered["name"] if numbered else column) or kind
        if numbered:
            self.lists.add(name)
        self.kinds[name] = kind
        number = int(numbered["number"]) if numbered else -1
        self._give(name if number < 0 else f"{name}.{number}", member.name, file)
        items = self.samples[-1].members.setdefault(name, {})
        items[number] = (member.offset_data, member.size)

    def _give(self, column: str, member: str, file: str) -> None:
        """Note that a member has a column of the sample; raise an error if another one has."""
        other = self.given.setdefault(column, member)
        if other != member:
            raise FusionZooError(
                f"{self.storage.where(file)}, {member}: {other} has {column!r} too. {NAMES}"
            )

    def places(self, name: str) -> tuple[Any, Any]:
        """Return first byte and bytes of a modality's members, as `TarBlocks` has them."""
        items = [sample.members.get(name, {}) for sample in self.samples]
        if name not in self.lists:
            offsets, sizes = np.array([x.get(-1, (-1, -1)) for x in items], np.int64).T
            return offsets, sizes
        places = [[x[number] for number in sorted(x)] if x else None for x in items]
        offsets, sizes = (
            pa.array([None if x is None else [place[i] for place in x] for x in places], ITEMS)
            for i in (0, 1)
        )
        return offsets, sizes

    def _add_text(self, values: Any, column: str, suffix: str, file: str, member: str) -> None:
        if suffix != ".json":
            if column.isdecimal():  # only images and clips are numbered
                raise FusionZooError(
                    f"{self.storage.where(file)}, {member}: {column} is no modality. {NAMES}"
                )
            name = column or ("target" if suffix in LABEL else "text")
            self._give(name, member, file)
            self.samples[-1].row[name] = values
            if suffix in TEXT:
                self.kinds[name] = "text"
            return
        if not isinstance(values, dict):
            raise FusionZooError(f"{self.storage.where(file)}, {member} holds no JSON object")
        for name, value in values.items():
            self._give(f"{name} of .json", member, file)
            if value is not None:
                self.samples[-1].fields[name] = value

    def close(self) -> None:
        """Add the fields of the JSON members to the rows; say what is not read."""
        overruled: Counter[str] = Counter()
        # Keys are different in one file, as in WebDataset, not in all.
        keys_recur = len({x.key for x in self.samples}) < len(self.samples)
        for file, key, row, fields, members in self.samples:
            fields.setdefault("id", f"{file.removesuffix('.tar')}/{key}" if keys_recur else key)
            taken = [name for name in fields if name in row or name in members]
            overruled.update(taken)
            row.update({name: value for name, value in fields.items() if name not in taken})
        for name, count in overruled.items():
            _log.warning(
                "%s: %r of %s .json members is not read: their samples have it from another member",
                *(self.storage, name, f"{count:,}"),
            )
        for ending, names in self.unread.items():
            _log.warning(
                "%s: %s members %s are not read, such as %s",
                *(self.storage, f"{len(names):,}"),
                *(f"ending in {ending}" if ending else "without a name or an ending", names[0]),
            )


def open_tar_files(storage: Storage, names: Sequence[str]) -> LoadedTable:
    """Open the tar files of a folder."""
    scan = Scan(storage)
    for name in names:
        scan.read(name)
    scan.close()
    if not scan.samples:
        raise FusionZooError(f"{storage} has no samples: members such as 000017.jpg, 000017.json")
    columns = dict.fromkeys(name for sample in scan.samples for name in sample.row)
    media = {name: kind for name, kind in scan.kinds.items() if kind != "text"}
    table = _table({name: [sample.row.get(name) for sample in scan.samples] for name in columns})
    offsets, sizes = {}, {}
    for name in media:
        offsets[name], sizes[name] = scan.places(name)
    blocks = TarBlocks(storage, scan.files, offsets, sizes)
    memory: dict[str, Any] = {}
    for name, kind in media.items():
        memory[name] = stored_cells(blocks, name, kind, sizes[name])
        if name in table.column_names:
            table = table.drop_columns(name)
        table = table.append_column(name, row_numbers(memory[name].sizes >= 0))
    return LoadedTable(
        table=table,
        source=str(storage),
        root=storage.folder,
        memory=memory,
        kinds={name: kind for name, kind in scan.kinds.items() if name != kind},
    )


def _check_member(member: tarfile.TarInfo, names: set[str], where: str) -> None:
    """Raise an error for a member whose bytes in the tar are not those of a file, such as a link or
    a sparse file, and for one whose name was there before; add its name.
    """
    marks = [x for x in member.pax_headers if x.startswith(("GNU.sparse.", "SCHILY.realsize"))]
    if not member.isreg() or member.issparse() or marks:
        raise FusionZooError(
            f"{where}, {member.name} is a link, a sparse file or no plain file: write the tar again"
            " with `tar --dereference --hard-dereference`, without --sparse"
        )
    name = member.name.removeprefix("./")
    if name in names:
        raise FusionZooError(f"{where} has two members {name}: write it again with one of them")
    names.add(name)


def _check_end(file: Any, end: int, size: int, where: str) -> None:
    """Raise an error unless the end mark follows the last member; warn of what is behind it."""
    file.seek(end)
    if file.read(len(END_MARK)) != END_MARK:
        raise FusionZooError(f"{where} is cut off or damaged at byte {end:,} of {size:,}")
    behind = size - end - len(END_MARK)
    if behind > MAX_PADDING or any(file.read(behind)):
        _log.warning(
            "%s has %s bytes behind its end mark, which are not read: if it was joined from"
            " several, keep them as files of their own",
            *(where, f"{behind:,}"),
        )


def _table(columns: dict[str, list[Any]]) -> pa.Table:
    """Return columns as Arrow holds them, else as text."""
    arrays = {}
    for name, values in columns.items():
        try:
            arrays[name] = pa.array(values)
        except (pa.ArrowException, OverflowError):
            words = [
                value if value is None or isinstance(value, str) else json.dumps(value)
                for value in values
            ]
            arrays[name] = pa.array(words, pa.string())
    return pa.table(arrays)


def _shard(name: str, size: int, starts: Sequence[int]) -> ShardFile:
    """Divide a file's samples, which start at these bytes, into blocks."""
    blocks: list[int] = []
    ranges: list[list[int]] = []
    for start, stop in zip(starts, [*starts[1:], size], strict=True):
        if blocks and stop - ranges[-1][0] <= BLOCK_BYTES:
            blocks[-1] += 1
            ranges[-1][1] = stop
        else:
            blocks.append(1)
            ranges.append([start, stop])
    return ShardFile(name=name, size=size, blocks=blocks, ranges=ranges)
