"""What `data` may be in the Python API: a name, a path, settings, a table, a data set."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from .datasets import PairedDataset, create_dataset
from .datasets.arrow import is_list_of_text
from .datasets.naming import IN_MEMORY, settings_of
from .datasets.provenance import FUSIONZOO, Loaded
from .datasets.sources.columns import HUGGING_FACE, TEXT_TYPES
from .datasets.sources.in_memory import STREAM_LIMIT, is_table, read_objects
from .datasets.table import NOT_FILES, word_list
from .errors import FusionZooError
from .files import cache_root, fold, make_cache_folder, replacing
from .structures import KINDS

Data = Any  # str | PathLike | Mapping | PairedDataset | a table or data set in memory


def read_data(data: Data) -> Data:
    """Return `data`, or settings whose `root` is read if data is a table or data set in memory.

    What Arrow can hold becomes an Arrow table, which `data_settings` stores; images, arrays and
    data sets of other libraries stay what they are.
    """
    if isinstance(data, PairedDataset) or data is None:
        return data
    settings = settings_of(data)
    root = settings.get("root")
    if not is_table(root) or isinstance(root, pa.Table):
        return settings
    fields = word_list(settings.pop("fields", ()) or ())
    loaded = read_objects(root, fields, settings.pop("stream_limit", STREAM_LIMIT))
    parts = root.values() if isinstance(root, Mapping) else [root]
    is_plain = all(
        isinstance(part, list | tuple | np.ndarray) or hasattr(part, "__arrow_c_stream__")
        for part in parts
    )
    storable = is_plain and not loaded.memory and not loaded.kinds
    return {**settings, "root": loaded.table if storable else loaded}


def data_settings(data: Data) -> dict[str, Any]:
    """Return the settings of a data set, as `--data` has them; `data` as of `create_dataset`.

    A table in memory is written to the cache as Parquet, so that worker processes and later
    commands can read it. A `PairedDataset`, and what Arrow cannot hold, is recorded as in memory:
    the run's config.yaml cannot open it again.
    """
    data = read_data(data)
    if isinstance(data, PairedDataset) or isinstance(data.get("root"), Loaded):
        return {"name": IN_MEMORY}
    if isinstance(data.get("root"), pa.Table):
        return store_table(data, make_cache_folder(cache_root() / "tables"))
    return dict(data)


def in_memory(data: Data, targets: Mapping[str, str] | None = None) -> PairedDataset | None:
    """Return the data set if `data` is one, or is in memory and cannot be stored.

    `targets` are the labels that the second case reads.
    """
    data = read_data(data)
    if isinstance(data, PairedDataset) or data is None:
        return data
    if isinstance(data.get("root"), Loaded):
        settings = {name: value for name, value in data.items() if name != "augment"}
        return create_dataset(**{"targets": targets, **settings})
    return None


def store_table(settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Write the table `settings["root"]` as a manifest into a folder; return settings to open it.

    Paths in the table start from the working directory. The file's name holds the hash of its
    contents, so the same table is written once.
    """
    try:
        table = pa.table(settings["root"])
    except (pa.ArrowException, TypeError) as error:
        raise FusionZooError(f"the table cannot be stored: {error}") from error
    metadata = table.schema.metadata or {}
    declared = {key: metadata[key] for key in (FUSIONZOO, HUGGING_FACE) if key in metadata}
    table = _absolute_structs(table.replace_schema_metadata(declared or None))
    for name in _path_columns(settings, table):
        cells = [_absolute(cell) for cell in table[name].to_pylist()]
        column = pa.array(cells, table[name].type)
        table = table.set_column(table.column_names.index(name), name, column)
    buffer = io.BytesIO()
    pq.write_table(table, buffer, write_page_checksum=True)
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
        fold(columns.get(modality, modality))
        for modality in {*KINDS, *columns, *kinds}
        if modality in paths or kinds.get(modality, modality) in set(KINDS) - {*NOT_FILES}
    }
    return [
        field.name
        for field in table.schema
        if fold(field.name) in path_columns
        and (is_list_of_text(field.type) or any(is_type(field.type) for is_type in TEXT_TYPES))
    ]


def _absolute(cell: Any) -> Any:
    """Return a path, or each of a list, as an absolute one."""
    if isinstance(cell, list):
        return [_absolute(path) for path in cell]
    return cell and os.path.abspath(cell)


def _absolute_structs(table: pa.Table) -> pa.Table:
    """Make the paths in columns of `{bytes, path}` absolute."""
    for position, field in enumerate(table.schema):
        inner = field.type.value_type if pa.types.is_list(field.type) else field.type
        names = [x.name for x in inner] if pa.types.is_struct(inner) else []
        if "path" in names:
            cells = table.column(position).to_pylist()
            structs = [x for cell in cells for x in (cell if isinstance(cell, list) else [cell])]
            for cell in structs:
                if cell and cell["path"] is not None and cell.get("bytes") is None:
                    cell["path"] = os.path.abspath(cell["path"])
            table = table.set_column(position, field, pa.array(cells, field.type))
    return table
