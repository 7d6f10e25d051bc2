"""Convert a data set or a stream to shards, so that a conversion that was killed goes on."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fusionzoo.errors import FusionZooError, explained
from fusionzoo.files import replacing, sha256_of, write_json, write_text
from fusionzoo.ground.progress import progress_bar

from ..tables.arrow import plain_column
from ..tables.hugging_face import LIBRARY, undecoded_stream
from ..tables.table import Samples, check_unedited, table_columns
from .storage import (
    BYTES,
    DIGESTS,
    FORMATS,
    ITEMS,
    LISTED,
    NAME,
    OFFSETS,
    SAMPLES,
    STORED,
    ShardFile,
    ShardIndex,
    Storage,
    read_index,
)
from .stored import has_several
from .writers import (
    FOOTER_END,
    MAX_ROWS,
    ParquetShard,
    TarShard,
    member_size,
    member_sizes,
    stored_value,
    value_size,
)

SAMPLED = 32  # values whose bytes are measured where no file tells them
PARTIAL = ".partial"  # folder of what a conversion under way keeps
CHUNK = 64  # samples whose values are read at once, by several threads
BATCH = 100  # rows that are read from the stream at once
BLOCK_BYTES = 4_000_000


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a conversion."""

    format: str = "parquet"
    prepare: bool = False
    shard_mb: int = 256  # MB of a shard, before `prepare` makes values smaller
    block_mb: float = 4.0  # MB of a block, which is read at once


def light_table(dataset: Samples) -> pa.Table:
    """Return the columns that are no images, clips or arrays, texts read from their files."""
    columns: dict[str, Any] = {name: dataset.chosen(name) for name in table_columns(dataset)}
    for name, kind in dataset.modalities.items():
        if kind == "text" and (name in dataset.paths or name in dataset.memory):
            columns[name] = pa.array(_texts(dataset, name), pa.string())
        elif kind == "tabular" and name in dataset.memory:
            columns[name] = pa.array(dataset.references(name))
        elif kind in ("text", "tabular"):
            columns[name] = dataset.chosen(name)
    return pa.table(columns)


def make_plan(dataset: Samples, settings: Settings) -> dict[str, np.ndarray]:
    """Divide each split into shards of about the size that is asked for: {name: positions}."""
    sizes = _sizes(dataset)
    names = np.array(dataset.split_names, dtype=object)
    parts: dict[str, np.ndarray] = {}
    stems: set[str] = set()
    for split in dataset.splits:
        positions = np.flatnonzero(names == split)
        count = int(np.ceil(sizes[positions].sum() / (settings.shard_mb * 1_000_000)))
        count = min(max(1, count), len(positions))
        stem = re.sub(r"\W", "_", split)
        while stem in stems:
            stem += "_"
        stems.add(stem)
        for number, chosen in enumerate(np.array_split(positions, count)):
            is_tar = settings.format == "webdataset"
            place = f"{number:06d}.tar" if is_tar else f"{number:05d}-of-{count:05d}.parquet"
            parts[f"{stem}-{place}"] = chosen
    return parts


def fingerprint(table: pa.Table, kinds: Mapping[str, str], settings: Settings) -> str:
    """Return a digest of the samples and settings: a conversion is resumed if it is the same."""
    digest = hashlib.sha256(json.dumps([dict(kinds), vars(settings)]).encode())
    digest.update(table.schema.to_string().encode())
    for batch in table.combine_chunks().to_batches():
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as stream:
            stream.write_batch(batch)
        digest.update(sink.getvalue())
    return digest.hexdigest()


def _texts(dataset: Samples, name: str) -> list[str | None]:
    """Read the texts of a modality."""
    from ..media.decode import decode

    texts: list[str | None] = []
    for row in dataset.rows.tolist():
        try:
            value = dataset.reference(name, row)
            texts.append(None if value is None else decode("text", value))
        except FusionZooError as error:
            if getattr(dataset, "on_error", "raise") == "raise":
                raise FusionZooError(f"{dataset.sample_place(row)}, {name}: {error}") from error
            texts.append(None)
    return texts


def _sizes(dataset: Samples) -> np.ndarray:
    """Return an estimate of the bytes of each sample, float64 (N,)."""
    total = np.full(len(dataset), 200.0)
    for name, kind in dataset.modalities.items():
        if kind not in STORED:
            continue
        values = dataset.memory.get(name)
        known = getattr(values, "sizes", None)
        present = dataset.column(name)
        if known is not None:
            total += [0.0 if cell is None else max(0, known[cell]) for cell in present]
        elif values is None and name in dataset.paths and kind in ("image", "audio"):
            total += [_file_bytes(x) for x in dataset.references(name)]
        else:
            total += _typical_size(dataset, name, kind, present)
    return total


def _file_bytes(value: Any) -> int:
    """Return the bytes of a file, or of the files of a list."""
    if isinstance(value, list):
        return sum(map(_file_bytes, value))
    return value.stat().st_size if isinstance(value, Path) and value.is_file() else 0


def _typical_size(dataset: Samples, name: str, kind: str, cells: list[Any]) -> float:
    """Return the mean bytes of a few values."""
    rows = [row for row, cell in zip(dataset.rows.tolist(), cells, strict=True) if cell is not None]
    sizes = []
    for row in rows[:: max(1, len(rows) // SAMPLED)][:SAMPLED]:
        try:
            sizes.append(value_size(stored_value(kind, dataset.reference(name, row), False)))
        except FusionZooError:
            continue  # writing it raises the error, with its place
    return float(np.mean(sizes)) if sizes else 0.0


@dataclass(frozen=True, kw_only=True)
class WrittenShards:
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
        raise FusionZooError(f"{out} holds shards of other samples or settings: name another")


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
    """Return the light columns with rows, bytes and, of a tar, places of the pieces' values."""
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


def write_shards(
    dataset: Samples, out: Path, settings: Settings, *, progress: bool = False
) -> WrittenShards:
    """Write a data set as shards into the folder `out`, or go on with a conversion there."""
    check_unedited(dataset, "written as shards")
    if settings.format not in FORMATS:
        raise FusionZooError(f"format {settings.format!r} is none of {', '.join(FORMATS)}")
    if settings.shard_mb < 1 or settings.block_mb <= 0:
        raise FusionZooError("shard_mb must be at least 1, and block_mb above 0")
    light = light_table(dataset)
    stored = {name: kind for name, kind in dataset.modalities.items() if kind in STORED}
    clash = {BYTES, OFFSETS} & {*light.column_names, *stored}
    if clash:
        raise FusionZooError(f"{dataset.source} has a column {min(clash)!r}: rename it")
    conversion = _Conversion(dataset, out, settings, light)
    check_folder(out, conversion.source)
    with explained(f"{out} cannot be written", OSError):
        (out / PARTIAL).mkdir(parents=True, exist_ok=True)
        return conversion.run(progress)


class _Conversion:
    """A conversion that is under way."""

    def __init__(self, data: Samples, out: Path, settings: Settings, light: pa.Table) -> None:
        self.dataset, self.out, self.settings, self.light = data, out, settings, light
        self.stored = [name for name, kind in data.modalities.items() if kind in STORED]
        media = [name for name, kind in data.modalities.items() if kind in ("image", "audio")]
        # Modalities of which a sample may have several images or clips.
        self.lists = [name for name in media if has_several(data, name, decoded=False)]
        kinds = data.modalities | dict.fromkeys(self.lists, "list")
        self.source, self.failed = fingerprint(light, kinds, settings), 0
        self.on_error = getattr(data, "on_error", "raise")
        self.pool = ThreadPoolExecutor(min(8, 2 * (os.cpu_count() or 1)))

    def run(self, progress: bool) -> WrittenShards:
        """Write the shards that are not there yet, then the index."""
        if read_index(Storage(self.out)) is not None:
            done = [entry for entry in self._done(NAME) if self._verified(entry)]
            shutil.rmtree(self.out / PARTIAL, ignore_errors=True)
            return self._written(done, len(done))
        parts = make_plan(self.dataset, self.settings)
        known = {file.name: file for file in self._done(f"{PARTIAL}/{NAME}")}
        files: list[ShardFile] = []
        resumed = first = 0
        if not known:  # says whose conversion this is, before there is a shard
            write_json(self.out / PARTIAL / NAME, self._index([]).to_json())
        with (
            self.pool,
            progress_bar(
                total=len(self.dataset), desc="convert", unit="sample", disable=not progress
            ) as bar,
        ):
            for number, (name, positions) in enumerate(parts.items()):
                file = self._verified(known.get(name), number)
                if file is None:
                    file = self._write_part(name, positions, number, first, bar)
                else:
                    resumed += 1
                    bar.update(len(positions))
                    bar.unpause()  # the rate is that of samples written now
                files.append(file)
                first += len(positions)
                write_json(self.out / PARTIAL / NAME, self._index(files).to_json())
        self._finish(files)
        return self._written(files, resumed)

    def _index(self, files: Sequence[ShardFile]) -> ShardIndex:
        return ShardIndex(
            format=self.settings.format,
            kinds=self.dataset.modalities,
            source=self.source,
            files=tuple(files),
        )

    def _done(self, name: str) -> Sequence[ShardFile]:
        index = read_index(Storage(self.out), name)
        return index.files if index else ()

    def _verified(self, file: ShardFile | None, number: int | None = None) -> ShardFile | None:
        """Return a shard that is whole; None: it has to be written."""
        if file is None:
            return None
        path = self.out / file.name
        has_index = number is None or self._piece(number).is_file()
        is_whole = path.is_file() and path.stat().st_size == file.size
        if is_whole and has_index and sha256_of(path) == file.sha256:
            return file
        if number is None:
            raise FusionZooError(f"{path} was changed: remove {self.out} and convert again")
        return None

    def _piece(self, number: int) -> Path:
        return self.out / PARTIAL / f"{number:05d}.arrow"

    def _write_part(
        self, name: str, positions: np.ndarray, number: int, first: int, bar: Any
    ) -> ShardFile:
        """Write one shard, and its part of the index."""
        path = self.out / name
        index: dict[str, list[Any]] = {"position": positions.tolist()}
        for modality in self.stored:
            index[f"{BYTES}{modality}"], index[f"{OFFSETS}{modality}"] = [], []
        with replacing(path) as partial:
            shard: Any
            kinds = self.dataset.modalities
            if self.settings.format == "parquet":
                shard = ParquetShard(partial, self.light.schema, kinds, self.lists)
            else:
                shard = TarShard(partial, kinds, first)
            with closing(shard):
                for block, values in self._blocks(positions):
                    offsets = shard.write(self.light.take(pa.array(block)), values)
                    for modality in self.stored:
                        sizes = member_sizes(values[modality], self.settings.format)
                        index[f"{OFFSETS}{modality}"] += offsets[modality]
                        index[f"{BYTES}{modality}"] += sizes
                    bar.update(len(block))
        write_arrow(self._piece(number), index_piece(index, self.lists))
        return ShardFile(
            name=name,
            size=path.stat().st_size,
            blocks=shard.blocks,
            ranges=shard.ranges,
            sha256=sha256_of(path),
            checksums=range_checksums(path, shard.ranges),
        )

    def _blocks(self, positions: np.ndarray) -> Iterator[tuple[list[int], dict[str, list[Any]]]]:
        """Yield the samples of a shard with their values, a block at a time."""
        most = self.settings.block_mb * 1_000_000
        block: list[int] = []
        values: dict[str, list[Any]] = {name: [] for name in self.stored}
        size = 0
        for start in range(0, len(positions), CHUNK):
            chunk = positions[start : start + CHUNK].tolist()
            for position, row in zip(chunk, self.pool.map(self._values, chunk), strict=True):
                row_size = sum(
                    member_size(x, self.settings.format) for x in row.values() if x is not None
                )
                if block and (size + row_size > most or len(block) == MAX_ROWS):
                    yield block, values
                    block, values, size = [], {name: [] for name in self.stored}, 0
                block.append(position)
                size += row_size
                for name in self.stored:
                    values[name].append(row[name])
        if block:
            yield block, values

    def _values(self, position: int) -> dict[str, Any]:
        """Return what is stored of one sample."""
        row = int(self.dataset.rows[position])
        values: dict[str, Any] = {}
        for name in self.stored:
            values[name] = None
            try:
                value = self.dataset.reference(name, row)
                if value is not None:
                    kind = self.dataset.modalities[name]
                    data = stored_value(kind, value, self.settings.prepare)
                    is_single = name in self.lists and not isinstance(data, list)
                    values[name] = [data] if is_single else data
            except FusionZooError as error:
                if self.on_error == "raise":
                    where = self.dataset.sample_place(row)
                    raise FusionZooError(f"{where}, {name}: {error}") from error
                self.failed += 1
        return values

    def _finish(self, files: Sequence[ShardFile]) -> None:
        """Write the index of the samples, the digests and last `shards.json`."""
        paths = [self._piece(number) for number in range(len(files))]
        pieces = [pa.ipc.open_file(path.read_bytes()).read_all() for path in paths]
        table = join_pieces(pieces, self.light, self.stored, self.settings.format)
        if self.failed:
            valid = [table[name].is_valid().to_numpy() for name in self.dataset.modalities]
            table = table.filter(pa.array(np.logical_or.reduce(valid)))
        write_arrow(self.out / SAMPLES, table.combine_chunks())
        digests = [f"{file.sha256}  {file.name}\n" for file in files]
        samples_sha256 = sha256_of(self.out / SAMPLES)
        digests.append(f"{samples_sha256}  {SAMPLES}\n")
        write_text(self.out / DIGESTS, "".join(digests))
        index = replace(self._index(files), samples_sha256=samples_sha256)
        write_json(self.out / NAME, index.to_json())
        shutil.rmtree(self.out / PARTIAL, ignore_errors=True)

    def _written(self, files: Sequence[ShardFile], resumed: int) -> WrittenShards:
        return WrittenShards(
            folder=self.out,
            samples=len(self.dataset),
            files=len(files),
            bytes=sum(file.size for file in files),
            resumed=resumed,
            failed=self.failed,
        )


def write_stream(
    data: Any, out: Path, *, shard_mb: int = 256, progress: bool = False
) -> WrittenShards:
    """Write the splits of a stream into the folder `out`; a stopped conversion goes on."""
    check_folder(out, "stream")
    partial = out / PARTIAL
    partial.mkdir(parents=True, exist_ok=True)
    splits: dict[str, Any] = dict(data) if isinstance(data, Mapping) else {"": data}
    resumed = sum(1 for _ in partial.glob("*.parquet"))
    bar = progress_bar(desc="convert", unit="sample", disable=not progress)
    with bar:
        for split, stream in splits.items():
            _write_split(undecoded_stream(stream), partial, _stem(split), shard_mb, bar)
    files, samples = [], 0
    for split in splits:
        shards = sorted(partial.glob(f"{_stem(split)}-*.parquet"))
        for number, shard in enumerate(shards):
            samples += pq.read_metadata(shard).num_rows
            name = f"{_stem(split)}-{number:05d}-of-{len(shards):05d}.parquet"
            files.append(shard.rename(out / name))
    listed = [_listed(file) for file in files]
    write_text(out / DIGESTS, "".join(f"{file.sha256}  {file.name}\n" for file in listed))
    index = ShardIndex(format="parquet", kinds={}, source="stream", files=listed)
    write_json(out / LISTED, index.to_json())
    shutil.rmtree(partial)
    return WrittenShards(
        folder=out,
        samples=samples,
        files=len(files),
        bytes=sum(file.stat().st_size for file in files),
        resumed=resumed,
        failed=0,
    )


def _listed(path: Path) -> ShardFile:
    """Describe a Parquet file, with a checksum of its footer: the format has none."""
    metadata, size = pq.read_metadata(path), path.stat().st_size
    ranges = [[size - FOOTER_END - metadata.serialized_size, size]]
    return ShardFile(
        name=path.name,
        size=size,
        blocks=[metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)],
        ranges=ranges,
        sha256=sha256_of(path),
        checksums=range_checksums(path, ranges),
    )


def _stem(split: str) -> str:
    """Return the start of a split's file names; a stream without splits has those of `train`."""
    return re.sub(r"\W", "_", str(split)) or "data"


def _write_split(stream: Any, folder: Path, stem: str, shard_mb: int, bar: Any) -> None:
    done = sorted(folder.glob(f"{stem}-*.parquet"))
    written = sum(pq.read_metadata(path).num_rows for path in done)
    bar.update(written)
    blocks = _blocks(stream.skip(written) if written else stream)
    metadata = stream.features.arrow_schema.metadata if stream.features else None
    number, block = len(done), next(blocks, None)
    while block is not None:
        path = folder / f"{stem}-{number:05d}.parquet"
        schema = block.schema.with_metadata(metadata)
        size = 0
        with (
            replacing(path) as partial,
            pq.ParquetWriter(partial, schema, write_page_checksum=True) as file,
        ):
            while block is not None and (not size or size + block.nbytes <= shard_mb * 1_000_000):
                file.write_table(block.cast(schema), row_group_size=len(block))
                size += block.nbytes
                bar.update(len(block))
                block = next(blocks, None)
        number += 1


def _blocks(stream: Any) -> Iterator[pa.Table]:
    """Yield a stream as tables of about `BLOCK_BYTES`, with the contents of files of media."""
    embed = sys.modules[f"{LIBRARY}.table"].embed_table_storage
    parts: list[pa.Table] = []
    size = rows = 0
    for table in stream.with_format("arrow").iter(batch_size=BATCH):
        for start in range(0, len(table), 10):
            part = embed(table.slice(start, 10))
            part = pa.table([*map(plain_column, part.columns)], names=part.column_names)
            if parts and (size + part.nbytes > BLOCK_BYTES or rows + len(part) > MAX_ROWS):
                yield pa.concat_tables(parts, promote_options="permissive").combine_chunks()
                parts, size, rows = [], 0, 0
            parts.append(part)
            size, rows = size + part.nbytes, rows + len(part)
    if parts:
        yield pa.concat_tables(parts, promote_options="permissive").combine_chunks()
