"""Write a stream of Hugging Face as Parquet shards, whatever its length, without decoding it."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from fusionzoo.errors import FusionZooError
from fusionzoo.files import replacing, write_text

from ..formats.hugging_face import LIBRARY, undecoded_stream
from .index import DIGESTS
from .pieces import PARTIAL, Written, file_digest
from .writers import MAX_ROWS

BATCH = 100  # rows that are read from the stream at once
BLOCK_BYTES = 4_000_000


def write_stream(data: Any, out: Path, *, shard_mb: int = 256, progress: bool = False) -> Written:
    """Write the splits of a stream into the folder `out`; rows and columns stay as they are.

    Shards of a conversion that was stopped are kept, and their rows are skipped in the stream.
    """
    if out.exists() and (not out.is_dir() or any(x.name != PARTIAL for x in out.iterdir())):
        raise FusionZooError(f"{out} exists and is not an empty folder: name another one")
    partial = out / PARTIAL
    partial.mkdir(parents=True, exist_ok=True)
    splits: dict[str, Any] = dict(data) if isinstance(data, Mapping) else {"": data}
    resumed = sum(1 for _ in partial.glob("*.parquet"))
    bar = tqdm(desc="convert", unit="sample", disable=not progress, dynamic_ncols=True)
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
    write_text(out / DIGESTS, "".join(f"{file_digest(file)}  {file.name}\n" for file in files))
    shutil.rmtree(partial)
    return Written(
        folder=out,
        samples=samples,
        files=len(files),
        bytes=sum(file.stat().st_size for file in files),
        resumed=resumed,
        failed=0,
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
            part = _plain(embed(table.slice(start, 10)))
            if parts and (size + part.nbytes > BLOCK_BYTES or rows + len(part) > MAX_ROWS):
                yield pa.concat_tables(parts, promote_options="permissive").combine_chunks()
                parts, size, rows = [], 0, 0
            parts.append(part)
            size, rows = size + part.nbytes, rows + len(part)
    if parts:
        yield pa.concat_tables(parts, promote_options="permissive").combine_chunks()


def _plain(table: pa.Table) -> pa.Table:
    """Return a table whose extension types are the plain types that they are stored in."""
    for position, field in enumerate(table.schema):
        if isinstance(field.type, pa.BaseExtensionType):
            column = table.column(position)
            chunks = [chunk.storage for chunk in column.chunks]
            stored = pa.chunked_array(chunks, field.type.storage_type)
            table = table.set_column(position, field.name, stored)
    return table.replace_schema_metadata(None)
