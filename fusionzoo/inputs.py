"""What `data` may be in the Python API: a name, a path, settings, a table, a data set."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from .datasets import DATASETS, PairedDataset
from .datasets.formats.columns import READERS, TEXT_TYPES
from .datasets.table import NOT_FILES, word_list
from .errors import FusionZooError, did_you_mean
from .files import cache_root, make_cache_folder, replacing
from .structures import KINDS

Data = Any  # str | PathLike | Mapping | PairedDataset | a table with the Arrow interface
IN_MEMORY = "in_memory"  # what config.yaml records of a PairedDataset, which cannot be opened again


def data_settings(data: Data) -> dict[str, Any]:
    """Return the settings of a data set, as `--data` has them.

    - `"digits"`: a data set's name; `{"name": "digits", "missing": 0.3}`: with settings;
    - the path of a CSV, TSV, JSON lines or Parquet file, or of a folder of class folders;
    - a table with the columns of a manifest (a DataFrame of pandas or polars, a PyArrow table): it
      is written to the cache as Parquet, so that worker processes and later commands can read it;
    - a `PairedDataset`: recorded as in memory, so the run's config.yaml cannot open it again.
    """
    if isinstance(data, PairedDataset):
        return {"name": IN_MEMORY}
    if hasattr(data, "__arrow_c_stream__"):
        data = {"name": "manifest", "root": data}
    if isinstance(data, Mapping):
        if hasattr(data.get("root"), "__arrow_c_stream__"):
            return store_table(data, make_cache_folder(cache_root() / "tables"))
        return dict(data)
    if not isinstance(data, str | os.PathLike):
        raise FusionZooError(
            f"data is of type {type(data).__name__}; it must be the name of a data set, a path,"
            " settings such as {'name': 'digits'}, a DataFrame or a PairedDataset"
        )
    path = Path(data)
    if isinstance(data, str) and data in DATASETS:
        return {"name": data}
    if path.is_dir():
        return {"name": "folders", "root": str(path)}
    if path.exists() or path.suffix in READERS or isinstance(data, os.PathLike):
        return {"name": "manifest", "root": str(path)}
    raise FusionZooError(
        f"data={data!r} is neither a file, nor a folder, nor the name of a data set."
        f"{did_you_mean(data, DATASETS)} Data sets: {', '.join(sorted(DATASETS))}"
    )


def in_memory(data: Data) -> PairedDataset | None:
    """Return the data set itself if `data` is one."""
    return data if isinstance(data, PairedDataset) else None


def store_table(settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Write the table `settings["root"]` as a manifest into a folder; return settings to open it.

    Paths in the table start from the working directory. The file's name holds the hash of its
    contents, so the same table is written once.
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
        with replacing(path, many_writers=True) as partial:
            partial.write_bytes(contents)
    return {**settings, "root": str(path), "allow_outside": True}


def _path_columns(settings: Mapping[str, Any], table: pa.Table) -> list[str]:
    """Return the text columns whose cells are paths by the rules of the manifest."""
    columns, kinds = settings.get("columns") or {}, settings.get("kinds") or {}
    paths = word_list(settings.get("paths") or ())
    path_columns = {
        columns.get(modality, modality).strip().casefold()
        for modality in {*KINDS, *columns, *kinds}
        if modality in paths or kinds.get(modality, modality) in set(KINDS) - {*NOT_FILES}
    }
    return [
        field.name
        for field in table.schema
        if field.name.strip().casefold() in path_columns
        and any(is_type(field.type) for is_type in TEXT_TYPES)
    ]
