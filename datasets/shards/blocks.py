"""Read shards a block of samples at a time: row groups of Parquet, runs of members of a tar.

A process keeps the blocks that it read last, as many as a window of the shuffle has.
"""

from __future__ import annotations

import os
import zlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from fusionzoo.errors import FusionZooError, explained, one_line

from .storage import ShardFile, Storage

WINDOW_BYTES = 64 << 20  # of the blocks whose samples are shuffled together
MAX_WINDOW = 256  # blocks
MAX_OPEN = 64  # files
ARRAYS = ("vector", "sequence")  # kinds whose members are .npy


class Blocks(ABC):
    """The rows of shards in blocks that begin at `starts`; `reads` counts those read here."""

    def __init__(self, storage: Storage, files: Sequence[ShardFile]) -> None:
        self.storage, self.files = storage, list(files)
        rows = [count for file in files for count in file.blocks]
        self.starts = np.concatenate([[0], np.cumsum(rows, dtype=np.int64)])
        self.places = [(number, i) for number, x in enumerate(files) for i in range(len(x.blocks))]
        mean = sum(file.size for file in files) // max(1, len(rows))
        self.window = int(np.clip(WINDOW_BYTES // max(1, mean), 2, MAX_WINDOW))
        self.reads = 0
        self._cache: OrderedDict[tuple[int, str], Any] = OrderedDict()
        self._columns: set[str] = set()
        self._process = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": OrderedDict()}

    def blocks_of(self, rows: Any) -> Any:
        """Return the blocks that rows, or a row, are in."""
        return np.searchsorted(self.starts, rows, side="right") - 1

    def identity(self) -> list[Any]:
        """Return name, size and digest of each file, without reading it; on this disk its time."""
        folder = self.storage.folder
        times = [folder and (folder / file.name).stat().st_mtime_ns for file in self.files]
        known = [(file.name, file.size, file.sha256) for file in self.files]
        return [*zip(known, times, strict=True)]

    def read(self, row: int, column: str) -> tuple[Any, int]:
        """Return the block of a row's column, and the row's number in the block."""
        if self._process != os.getpid():
            self._process = os.getpid()
            self._forget_files()
        block = int(self.blocks_of(row))
        key = (block, self._part(column))
        if key in self._cache:
            self._cache.move_to_end(key)
        else:
            self._columns.add(key[1])
            file, number = self.places[block]
            while len(self._cache) >= (self.window + 1) * len(self._columns):
                self._cache.popitem(last=False)
            shard = self.files[file]
            self.storage.pin(shard.name)
            value = self._load(file, number, key[1])
            self.storage.check_unchanged(shard.name)
            self._cache[key] = value
            self.reads += 1
        return self._cache[key], row - int(self.starts[block])

    def _part(self, column: str) -> str:
        """Return the name under which a block of a column is kept."""
        return column

    def _forget_files(self) -> None:  # noqa: B027
        """Forget open files: they belong to the process from which this one was forked."""

    def _range(self, file: int, number: int) -> bytes:
        """Read a range of a file; its checksum must be that of the index, if it has one."""
        shard = self.files[file]
        start, stop = shard.ranges[number]
        where = self.storage.where(shard.name)
        with explained(f"{where} cannot be read", OSError):
            data = self.storage.read_range(shard.name, start, stop)
        if shard.checksums and zlib.crc32(data) != shard.checksums[number]:
            raise FusionZooError(f"{where}: bytes {start:,} to {stop:,} changed: copy it again")
        return data

    @abstractmethod
    def _load(self, file: int, block: int, part: str) -> Any:
        """Read a block of a file."""


class ParquetBlocks(Blocks):
    """Row groups of Parquet files; only the columns that are asked for are read."""

    def __init__(self, storage: Storage, files: Sequence[ShardFile]) -> None:
        super().__init__(storage, files)
        self._opened: OrderedDict[int, Any] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_opened": OrderedDict()}

    def _forget_files(self) -> None:
        self._opened = OrderedDict()

    def _load(self, file: int, block: int, part: str) -> Any:
        name = self.files[file].name
        try:
            table = self._file(file).read_row_group(block, columns=[part], use_threads=False)
        except FusionZooError:
            raise
        except (pa.ArrowException, OSError) as error:
            where = self.storage.where(name)
            cause = error.__cause__ or error.__context__
            if isinstance(cause, FusionZooError):
                raise cause from error
            raise FusionZooError(f"{where}, group {block}: {part}: {one_line(error)}") from error
        column = table.column(0)
        return column.chunk(0) if column.num_chunks == 1 else column

    def check_footer(self, number: int) -> None:
        """Raise an error if the footer of a file is not what was written."""
        self._range(number, 0)

    def _file(self, number: int) -> Any:
        import pyarrow.parquet as pq

        if number in self._opened:
            self._opened.move_to_end(number)
        else:
            if len(self._opened) >= MAX_OPEN:
                self._opened.popitem(last=False)[1].close()
            file = self.files[number]
            footer = pa.BufferReader(self._range(number, 0)) if file.ranges else None
            # A block is one column of a row group, read at once: a buffer would only copy it.
            self._opened[number] = pq.ParquetFile(
                self.storage.open(file.name, file.size),
                metadata=footer and pq.read_metadata(footer),
                pre_buffer=False,
                page_checksum_verification=True,
            )
        return self._opened[number]


class TarBlocks(Blocks):
    """Runs of members of tar files; a run is read at once, whatever is asked for.

    `offsets` and `sizes` have, by column, the bytes of each row's member in its file; -1 if it has
    none. Of a column of lists they are Arrow arrays, with those of each item.
    """

    def __init__(
        self,
        storage: Storage,
        files: Sequence[ShardFile],
        offsets: Mapping[str, Any],
        sizes: Mapping[str, Any],
    ) -> None:
        super().__init__(storage, files)
        self.offsets, self.sizes = dict(offsets), dict(sizes)

    def member(self, row: int, column: str) -> bytes | list[bytes]:
        """Return the bytes of a row's member, or of each item of a list."""
        data, _ = self.read(row, column)
        file, block = self.places[int(self.blocks_of(row))]
        starts, sizes = self.offsets[column][row], self.sizes[column][row]
        has_items = isinstance(starts, pa.Scalar)
        places = (x.as_py() if has_items else [int(x)] for x in (starts, sizes))
        where, members = self.storage.where(self.files[file].name), []
        with explained(f"{where}: the place of a member is outside of its block", ValueError):
            for offset, size in zip(*places, strict=True):
                start = offset - self.files[file].ranges[block][0]
                if not (size >= 0 and 0 <= start <= start + size <= len(data)):
                    raise ValueError(f"{size:,} bytes from byte {offset:,}")
                members.append(bytes(memoryview(data)[start : start + size]))
        return members if has_items else members[0]

    def _part(self, column: str) -> str:
        return ""

    def _load(self, file: int, block: int, part: str) -> bytes:
        return self._range(file, block)


class StoredCells:
    """Undecoded values of a modality in shards, their bytes and numbers of items, where known."""

    has_lists = False
    counts: np.ndarray | None = None

    def __init__(
        self,
        blocks: Blocks,
        column: str,
        kind: str,
        sizes: np.ndarray,
        read_struct: Callable[[Any], Any] | None = None,
    ) -> None:
        self.blocks, self.column, self.kind = blocks, column, kind
        self.sizes, self.read_struct = sizes, read_struct
        self.files: list[tuple[int, str]] = []  # row and path of values that are not in the shards

    def __len__(self) -> int:
        return int(self.blocks.starts[-1])

    def paths(self) -> list[tuple[int, str]]:
        """Return row and path of the values that are files."""
        return self.files

    def __getitem__(self, row: int) -> Any:
        if isinstance(self.blocks, TarBlocks):
            data = self.blocks.member(row, self.column)
            return _array(data) if isinstance(data, bytes) and self.kind in ARRAYS else data
        column, position = self.blocks.read(row, self.column)
        value = _plain(column[position])
        return value if self.read_struct is None else self.read_struct(value)


def _array(data: bytes) -> np.ndarray:
    """Return the array of a .npy file."""
    import io

    with explained("a member is no .npy array", ValueError, EOFError, OSError):
        array: np.ndarray = np.load(io.BytesIO(data), allow_pickle=False)
    return array


def _plain(cell: Any) -> Any:
    """Return a cell as bytes, an array, a mapping, or a list of bytes or mappings."""
    if not cell.is_valid or not pa.types.is_list(cell.type):
        return cell.as_py()
    values = cell.values
    if not (pa.types.is_list(values.type) or pa.types.is_primitive(values.type)):
        return cell.as_py()
    steps = len(values)
    if pa.types.is_list(values.type) and steps and not values.null_count:
        widths = np.diff(values.offsets.to_numpy())
        values = values.flatten()
        if (widths != widths[0]).any():
            return cell.as_py()
        shape: tuple[int, ...] = (steps, int(widths[0]))
    else:
        shape = (steps,)
    if pa.types.is_list(values.type) or values.null_count:
        return cell.as_py()
    return values.to_numpy(zero_copy_only=False).reshape(shape).copy()
