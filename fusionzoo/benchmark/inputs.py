"""What `fusionzoo.benchmark` takes as data: a name, a path, settings, a table or a data set."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq

from fusionzoo.datasets import DATASETS, PairedDataset
from fusionzoo.datasets.formats.manifest import READERS, TEXT_TYPES
from fusionzoo.errors import FusionZooError
from fusionzoo.structures import KINDS

from .features.encode import fingerprint, key_of

Data = Any  # str | PathLike | Mapping | PairedDataset | a table with the Arrow interface


def data_settings(data: Data) -> dict[str, Any]:
    """Return the settings of a data set that is named by a name, a path, settings or a table.

    A registered name comes first, then a folder of class folders, then a manifest.
    """
    if isinstance(data, Mapping):
        return dict(data)
    if is_table(data):
        return {"name": "manifest", "root": data}
    if not isinstance(data, str | os.PathLike):
        raise FusionZooError(
            f"data is of type {type(data).__name__}; it must be the name of a data set, a path,"
            " settings such as {'name': 'digits'}, a DataFrame or a PairedDataset"
        )
    path = Path(data)
    if isinstance(data, str) and data in DATASETS:
        return {"name": data}
    if path.is_dir():
        return {"name": "folders", "root": str(data)}
    if path.exists() or path.suffix in READERS or isinstance(data, os.PathLike):
        return {"name": "manifest", "root": str(data)}
    return {"name": data}  # opening it raises an error that names the nearest data set


def is_table(data: Any) -> bool:
    """Whether `data` is a table in memory: a DataFrame of pandas or polars, an Arrow table."""
    return hasattr(data, "__arrow_c_stream__")


def store_table(settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Write the table `settings["root"]` as a manifest into a folder; return settings to open it.

    Worker processes, and the same command later, then read the file. Paths in the table start from
    the working directory. The file's name holds the hash of its contents.
    """
    try:
        table = pa.table(settings["root"]).replace_schema_metadata(None)
    except (pa.ArrowException, TypeError) as error:
        raise FusionZooError(f"the table cannot be stored: {error}") from error
    for name in _path_columns(settings, table):
        cells = [cell and os.path.abspath(cell) for cell in table[name].to_pylist()]
        table = table.set_column(table.column_names.index(name), name, pa.array(cells, pa.string()))
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    contents = buffer.getvalue()
    path = folder / f"data-{hashlib.sha256(contents).hexdigest()[:12]}.parquet"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"{path.name}.part-{uuid4().hex[:8]}"
        part.write_bytes(contents)
        part.replace(path)
    return {**settings, "root": str(path), "allow_outside": True}


def dataset_settings(dataset: PairedDataset) -> dict[str, Any]:
    """Return settings that identify a data set in memory; they cannot open it again."""
    columns = [dataset.ids, dataset.split_names, dataset.labels, dataset.groups]
    values = {name: fingerprint(dataset, name) for name in dataset.modalities}
    encoders = json.loads(json.dumps(dataset.default_encoders, default=str))
    key = key_of([columns, dataset.modalities, values, encoders, dataset.on_error])
    return {"name": dataset.source, "in_memory": key}


def _path_columns(settings: Mapping[str, Any], table: pa.Table) -> list[str]:
    """Return the text columns whose cells are paths by the rules of the manifest."""
    columns, kinds = settings.get("columns") or {}, settings.get("kinds") or {}
    paths = settings.get("paths") or ()
    paths = [name.strip() for name in (paths.split(",") if isinstance(paths, str) else paths)]
    path_columns = {
        columns.get(modality, modality).strip().casefold()
        for modality in {*KINDS, *columns, *kinds}
        if modality in paths or kinds.get(modality, modality) in set(KINDS) - {"text"}
    }
    return [
        field.name
        for field in table.schema
        if field.name.strip().casefold() in path_columns
        and any(is_type(field.type) for is_type in TEXT_TYPES)
    ]
