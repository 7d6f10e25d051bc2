"""How a conversion divides a data set: the samples of each shard, known before one is written."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fusionzoo.errors import FusionZooError

from ..export import table_columns
from ..stored_files import has_several
from ..table import SampleTable
from .index import STORED
from .values import stored_value, value_size

ENDINGS = {"parquet": ".parquet", "webdataset": ".tar"}
SAMPLED = 32  # values whose bytes are measured where no file tells them


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a conversion."""

    format: str = "parquet"
    prepare: bool = False
    shard_mb: int = 256  # MB of a shard, before `prepare` makes values smaller
    block_mb: float = 4.0  # MB of a block, which is read at once


@dataclass(frozen=True, kw_only=True)
class Part:
    """One shard to write."""

    name: str
    positions: np.ndarray  # of its samples in the data set


def light_table(dataset: SampleTable) -> pa.Table:
    """Return the columns that are no pictures, clips or arrays, texts read from their files."""
    columns: dict[str, Any] = {name: dataset.chosen(name) for name in table_columns(dataset)}
    for name, kind in dataset.modalities.items():
        if kind == "text":
            in_cells = name not in dataset.paths and name not in dataset.memory
            columns[name] = (
                dataset.chosen(name) if in_cells else pa.array(_texts(dataset, name), pa.string())
            )
        elif kind == "tabular":
            if name in dataset.memory:
                columns[name] = pa.array(dataset.references(name))
            else:
                columns[name] = dataset.chosen(name)
    return pa.table(columns)


def make_plan(dataset: SampleTable, settings: Settings) -> list[Part]:
    """Divide each split into shards of about the size that is asked for."""
    sizes = _sizes(dataset)
    names = np.array(dataset.split_names, dtype=object)
    parts: list[Part] = []
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
            ending = ENDINGS[settings.format]
            name = (
                f"{stem}-{number:05d}-of-{count:05d}{ending}"
                if ending == ".parquet"
                else f"{stem}-{number:06d}{ending}"
            )
            parts.append(Part(name=name, positions=chosen))
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


def modalities_with_lists(dataset: SampleTable) -> list[str]:
    """Return the modalities of which a sample may have several pictures or clips."""
    media = [name for name, kind in dataset.modalities.items() if kind in ("image", "audio")]
    return [name for name in media if has_several(dataset, name, decoded=False)]


def _texts(dataset: SampleTable, name: str) -> list[str | None]:
    """Read the texts of a modality."""
    from ..media import decode

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


def _sizes(dataset: SampleTable) -> np.ndarray:
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


def _typical_size(dataset: SampleTable, name: str, kind: str, cells: list[Any]) -> float:
    """Return the mean bytes of a few values."""
    rows = [row for row, cell in zip(dataset.rows.tolist(), cells, strict=True) if cell is not None]
    sizes = []
    for row in rows[:: max(1, len(rows) // SAMPLED)][:SAMPLED]:
        try:
            sizes.append(value_size(stored_value(kind, dataset.reference(name, row), False)))
        except FusionZooError:
            continue  # writing it raises the error, with its place
    return float(np.mean(sizes)) if sizes else 0.0
