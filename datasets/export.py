"""Write a data set as a manifest: files by reference, values in memory embedded in Parquet."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pv
import pyarrow.parquet as pq

from fusionzoo.errors import FusionZooError, located
from fusionzoo.files import replacing
from fusionzoo.structures import KINDS

from .media.audio import Segment
from .media.encode import media_bytes
from .shards.stored import files_of, has_several, in_files, segment_columns
from .tables.paths import holds_paths
from .tables.provenance import with_kinds
from .tables.table import Samples, check_unedited, table_columns

SUFFIXES = (".parquet", ".jsonl", ".ndjson", ".csv", ".tsv")
BATCH = 500  # samples written together
MEDIA = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def write_manifest(dataset: Samples, path: Path, embed: bool) -> dict[str, Any]:
    """Write the samples to a table; return the settings that open it, see `to_manifest`."""
    check_unedited(dataset, "written as a manifest")
    path = path.expanduser()
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise FusionZooError(f"{path}: the suffix of a manifest is one of {', '.join(SUFFIXES)}")
    if embed and suffix != ".parquet":
        raise FusionZooError(f"{path}: only .parquet embeds values")
    types = {name: _column_type(dataset, name, embed, suffix) for name in dataset.modalities}
    writer = _ManifestRows(dataset, types, path.parent.resolve())
    names = table_columns(dataset)
    edges = segment_columns(dataset, types)
    schema = pa.schema([*((name, pa.string()) for name in names), *types.items(), *edges.items()])
    schema = with_kinds(schema, dataset.modalities)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        _write(partial, suffix, schema, writer.batches(schema, names))
    is_cut = dataset.frames is not None and any(
        holds_paths(dataset.modalities[name], column_type) for name, column_type in types.items()
    )
    scheme = dataset.scheme
    return {
        "name": "manifest",
        "root": str(path),
        **({} if suffix == ".parquet" else {"na": ()}),  # a cell `NA` is the text NA
        **_modality_settings(dataset.modalities),
        **({} if scheme is None else {"targets": {target.name: target.kind for target in scheme}}),
        **({} if dataset.positive is None else {"positive": dataset.positive}),
        **({} if dataset.weight_column is None else {"weight_column": dataset.weight_column}),
        **({"frames": dataset.frames} if is_cut else {}),
        **({"allow_outside": True} if writer.outside else {}),
    }


def _modality_settings(modalities: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings for modalities whose names are not kinds, or in another order."""
    settings: dict[str, Any] = {}
    kinds = {name: kind for name, kind in modalities.items() if name != kind}
    if kinds:
        settings["kinds"] = kinds
    usual = [*(kind for kind in KINDS if modalities.get(kind) == kind), *kinds]
    if list(modalities) != usual:
        settings["columns"] = {name: name for name in modalities}
    return settings


class _ManifestRows:
    """The rows of a manifest, in batches; `outside`: whether a file is not below its folder."""

    def __init__(self, dataset: Samples, types: Mapping[str, pa.DataType], folder: Path) -> None:
        self.dataset, self.types, self.folder = dataset, types, folder
        self.outside = False

    def batches(self, schema: pa.Schema, names: list[str]) -> Iterator[pa.Table]:
        """Return the samples as tables of at most `BATCH` rows."""
        columns = {name: self.dataset.column(name) for name in names}
        for start in range(0, len(self.dataset), BATCH):
            positions = range(start, min(start + BATCH, len(self.dataset)))
            cells = {name: [column[x] for x in positions] for name, column in columns.items()}
            for name in self.types:
                cells[name] = [self._cell(name, position) for position in positions]
            for name in set(schema.names) - set(cells):
                cells[name] = [self._edge(name, position) for position in positions]
            yield pa.Table.from_pydict(cells, schema)

    def _cell(self, name: str, position: int) -> Any:
        row, kind = int(self.dataset.rows[position]), self.dataset.modalities[name]
        sample = self.dataset.ids[position]
        with located(f"{self.dataset.source}, sample {sample!r}, {name}"):
            value = self.dataset.reference(name, row)
            if value is None:
                return None
            if kind == "text":
                return self.dataset.decode(name, value)
            if holds_paths(kind, self.types[name]):
                items = [self._relative(x) for x in files_of(value)]
                return items if pa.types.is_list(self.types[name]) else items[0]
            if pa.types.is_list(self.types[name]) and kind in ("image", "audio"):
                items = self.dataset.decode(name, value)
                items = items if isinstance(items, list) else [items]
                return [{"bytes": media_bytes(kind, x), "path": None} for x in items]
            if kind in ("image", "audio"):
                return {"bytes": media_bytes(kind, value), "path": None}
            return self.dataset.decode(name, value).tolist()

    def _edge(self, column: str, position: int) -> float | None:
        """Return a cell of a column `<modality>_start` or `<modality>_end`."""
        name, _, edge = column.rpartition("_")
        value = self.dataset.reference(name, int(self.dataset.rows[position]))
        value = value[0] if isinstance(value, list) and value else value
        return getattr(value, edge) if isinstance(value, Segment) else None

    def _relative(self, file: Path) -> str:
        relative = os.path.relpath(file.absolute(), self.folder)
        self.outside |= relative.split(os.sep, 1)[0] == os.pardir
        return Path(relative).as_posix()


def _column_type(dataset: Samples, name: str, embed: bool, suffix: str) -> pa.DataType:
    """Return how the values of a modality are stored."""
    kind = dataset.modalities[name]
    is_in_files = not embed and in_files(dataset, name)
    several = kind in ("image", "audio") and has_several(dataset, name, decoded=not is_in_files)
    if several and suffix in (".csv", ".tsv"):
        raise FusionZooError(f"{name} has lists, which {suffix} cannot store: write .parquet")
    if kind == "text" or is_in_files:
        return pa.list_(pa.string()) if several else pa.string()
    if suffix in (".csv", ".tsv") or (kind in ("image", "audio") and suffix != ".parquet"):
        raise FusionZooError(f"{name} is in memory, which {suffix} cannot store: write .parquet")
    if kind in ("image", "audio"):
        return pa.list_(MEDIA) if several else MEDIA
    return pa.list_(pa.float32()) if kind == "vector" else pa.list_(pa.list_(pa.float32()))


def _write(path: Path, suffix: str, schema: pa.Schema, batches: Iterator[pa.Table]) -> None:
    if suffix == ".parquet":
        with pq.ParquetWriter(path, schema, write_page_checksum=True) as parquet:
            for batch in batches:
                parquet.write_table(batch)
    elif suffix in (".csv", ".tsv"):
        options = pv.WriteOptions(delimiter="\t" if suffix == ".tsv" else ",")
        with pv.CSVWriter(path, schema, write_options=options) as rows:
            for batch in batches:
                rows.write_table(batch)
    else:
        with path.open("w", encoding="utf-8") as file:
            for batch in batches:
                lines = (json.dumps(row, ensure_ascii=False) for row in batch.to_pylist())
                file.writelines(f"{line}\n" for line in lines)
