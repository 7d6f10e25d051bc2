"""Convert a data set to shards, so that a conversion that was killed goes on where it was.

A shard is written beside its place and renamed when it is whole; `.partial/` has the index of each
finished shard until the last one is written.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from fusionzoo.errors import FusionZooError
from fusionzoo.files import replacing, write_json, write_text

from ..table import SampleTable
from .index import (
    BYTES,
    DIGESTS,
    FORMATS,
    NAME,
    OFFSETS,
    SAMPLES,
    STORED,
    ShardFile,
    ShardIndex,
    read_index,
)
from .pieces import (
    PARTIAL,
    Written,
    check_folder,
    file_digest,
    has_any,
    index_piece,
    join_pieces,
    range_checksums,
    read_arrow,
    write_arrow,
)
from .plan import Part, Settings, fingerprint, light_table, make_plan, modalities_with_lists
from .storage import Storage
from .values import stored_value
from .writers import MAX_ROWS, ParquetShard, TarShard, member_size, member_sizes

CHUNK = 64  # samples whose values are read at once, by several threads


def write_shards(
    dataset: SampleTable, out: Path, settings: Settings, *, progress: bool = False
) -> Written:
    """Write a data set as shards into the folder `out`, or go on with a conversion there."""
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
    try:
        (out / PARTIAL).mkdir(parents=True, exist_ok=True)
        return conversion.run(progress)
    except OSError as error:
        raise FusionZooError(f"{out} cannot be written: {error.strerror or error}") from error


class _Conversion:
    """A conversion that is under way."""

    def __init__(self, data: SampleTable, out: Path, settings: Settings, light: pa.Table) -> None:
        self.dataset, self.out, self.settings, self.light = data, out, settings, light
        self.stored = [name for name, kind in data.modalities.items() if kind in STORED]
        self.lists = modalities_with_lists(data)
        kinds = data.modalities | dict.fromkeys(self.lists, "list")
        self.source, self.failed = fingerprint(light, kinds, settings), 0
        self.on_error = getattr(data, "on_error", "raise")
        self.pool = ThreadPoolExecutor(min(8, 2 * (os.cpu_count() or 1)))

    def run(self, progress: bool) -> Written:
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
            tqdm(
                total=len(self.dataset),
                desc="convert",
                unit="sample",
                disable=not progress,
                dynamic_ncols=True,
            ) as bar,
        ):
            for number, part in enumerate(parts):
                file = self._verified(known.get(part.name), number)
                if file is None:
                    file = self._write_part(part, number, first, bar)
                else:
                    resumed += 1
                    bar.update(len(part.positions))
                    bar.unpause()  # the rate is that of samples written now
                files.append(file)
                first += len(part.positions)
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
        if is_whole and has_index and file_digest(path) == file.sha256:
            return file
        if number is None:
            raise FusionZooError(
                f"{path} is missing or was changed since it was written: remove {self.out} and"
                " convert again"
            )
        return None

    def _piece(self, number: int) -> Path:
        return self.out / PARTIAL / f"{number:05d}.arrow"

    def _write_part(self, part: Part, number: int, first: int, bar: Any) -> ShardFile:
        """Write one shard, and its part of the index."""
        path = self.out / part.name
        index: dict[str, list[Any]] = {"position": part.positions.tolist()}
        for name in self.stored:
            index[f"{BYTES}{name}"], index[f"{OFFSETS}{name}"] = [], []
        with replacing(path) as partial:
            shard: Any
            kinds = self.dataset.modalities
            if self.settings.format == "parquet":
                shard = ParquetShard(partial, self.light.schema, kinds, self.lists)
            else:
                shard = TarShard(partial, kinds, first)
            with closing(shard):
                for positions, values in self._blocks(part.positions):
                    offsets = shard.write(self.light.take(pa.array(positions)), values)
                    for name in self.stored:
                        index[f"{OFFSETS}{name}"] += offsets[name]
                        index[f"{BYTES}{name}"] += member_sizes(values[name], self.settings.format)
                    bar.update(len(positions))
        write_arrow(self._piece(number), index_piece(index, self.lists))
        return ShardFile(
            name=part.name,
            size=path.stat().st_size,
            blocks=shard.blocks,
            ranges=shard.ranges,
            sha256=file_digest(path),
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
        pieces = [read_arrow(self._piece(number)) for number in range(len(files))]
        table = join_pieces(pieces, self.light, self.stored, self.settings.format)
        if self.failed:
            table = table.filter(has_any(table, list(self.dataset.modalities)))
        write_arrow(self.out / SAMPLES, table.combine_chunks())
        digests = [f"{file.sha256}  {file.name}\n" for file in files]
        samples_sha256 = file_digest(self.out / SAMPLES)
        digests.append(f"{samples_sha256}  {SAMPLES}\n")
        write_text(self.out / DIGESTS, "".join(digests))
        index = replace(self._index(files), samples_sha256=samples_sha256)
        write_json(self.out / NAME, index.to_json())
        shutil.rmtree(self.out / PARTIAL, ignore_errors=True)

    def _written(self, files: Sequence[ShardFile], resumed: int) -> Written:
        return Written(
            folder=self.out,
            samples=len(self.dataset),
            files=len(files),
            bytes=sum(file.size for file in files),
            resumed=resumed,
            failed=self.failed,
        )
