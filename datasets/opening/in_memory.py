"""Tables in memory as settings that open them: stored in the cache, or with the table itself."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fusionzoo.errors import explained
from fusionzoo.files import cache_root, make_cache_folder, replacing
from fusionzoo.ground.cells import fold
from fusionzoo.structures import KINDS

from ..media.formats import SUFFIXES
from ..sources.columns import HUGGING_FACE
from ..sources.in_memory import is_table, read_objects
from ..sources.table_settings import TableSettings
from ..tables.arrow import is_list_of_text, is_text
from ..tables.provenance import FUSIONZOO, LoadedTable
from ..tables.table import NOT_FILES, word_list


def read_root(settings: Mapping[str, Any], *, store: bool) -> dict[str, Any]:
    """Read the table in memory that is `settings["root"]`.

    What Arrow can hold is stored in the cache, and `root` is its file; without `store`, and of
    images, arrays and data sets of other libraries, it is a `LoadedTable`. Paths in the table start
    from the folder `base`, by default the working directory.
    """
    settings, root = dict(settings), settings["root"]
    if not is_table(root):
        return settings
    source = f"the {type(root).__name__}"
    if not isinstance(root, pa.Table):
        loaded = read_objects(TableSettings(root=root, fields=settings.pop("fields", ())))
        parts = root.values() if isinstance(root, Mapping) else [root]
        is_plain = all(
            isinstance(part, list | tuple | np.ndarray) or hasattr(part, "__arrow_c_stream__")
            for part in parts
        )
        if not is_plain or loaded.memory or loaded.kinds:
            base = settings.pop("base", None)
            placed = loaded if base is None else replace(loaded, root=Path(base))
            return {**settings, "root": placed}
        settings["root"] = loaded.table
    if store:
        return store_table(settings, make_cache_folder(cache_root() / "tables"))
    table, settings = _with_absolute_paths(settings)
    return {**settings, "root": LoadedTable(table=table, source=source)}


def store_table(settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Write the table `settings["root"]` as a manifest into a folder; return settings to open it.

    Paths in the table start from the folder `base`, by default the working directory. The file's
    name holds the hash of its contents, so the same table is written once.
    """
    table, settings = _with_absolute_paths(settings)
    buffer = io.BytesIO()
    pq.write_table(table, buffer, write_page_checksum=True)
    contents = buffer.getvalue()
    path = folder / f"data-{hashlib.sha256(contents).hexdigest()[:12]}.parquet"
    if not path.is_file():
        with replacing(path) as partial:
            partial.write_bytes(contents)
    return {**settings, "root": str(path)}


def _with_absolute_paths(settings: Mapping[str, Any]) -> tuple[pa.Table, dict[str, Any]]:
    """Return the table `settings["root"]` with absolute paths, and the settings that allow them."""
    settings = dict(settings)
    base = os.path.abspath(settings.pop("base", ""))
    with explained("the table cannot be stored", pa.ArrowException, TypeError):
        table = pa.table(settings["root"])
    metadata = table.schema.metadata or {}
    declared = {key: metadata[key] for key in (FUSIONZOO, HUGGING_FACE) if key in metadata}
    table = _absolute_structs(table.replace_schema_metadata(declared or None), base)
    for name in _path_columns(settings, table):
        cells = [_absolute(cell, base) for cell in table[name].to_pylist()]
        column = pa.array(cells, table[name].type)
        table = table.set_column(table.column_names.index(name), name, column)
    return table, {**settings, "allow_outside": True}


def _path_columns(settings: Mapping[str, Any], table: pa.Table) -> list[str]:
    """Return the text columns whose cells are paths, by the rules of the manifest or by sight."""
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
        if (is_list_of_text(field.type) or is_text(field.type))
        and (fold(field.name) in path_columns or _are_files(table[field.name]))
    ]


def _are_files(column: Any) -> bool:
    """Whether all cells of a column name images or clips."""
    if is_list_of_text(column.type):
        return False
    cells = [cell for cell in column.to_pylist() if cell]
    suffixes = {Path(cell).suffix.lower() for cell in cells}
    return any(suffixes and suffixes <= {*SUFFIXES[kind]} for kind in ("image", "audio"))


def _absolute(cell: Any, base: str) -> Any:
    """Return a path, or each of a list, as an absolute one."""
    if isinstance(cell, list):
        return [_absolute(path, base) for path in cell]
    return cell and os.path.normpath(os.path.join(base, cell))


def _absolute_structs(table: pa.Table, base: str) -> pa.Table:
    """Make the paths in columns of `{bytes, path}` absolute."""
    for position, field in enumerate(table.schema):
        inner = field.type.value_type if pa.types.is_list(field.type) else field.type
        names = [x.name for x in inner] if pa.types.is_struct(inner) else []
        if "path" in names:
            cells = table.column(position).to_pylist()
            structs = [x for cell in cells for x in (cell if isinstance(cell, list) else [cell])]
            for cell in structs:
                if cell and cell["path"] is not None and cell.get("bytes") is None:
                    cell["path"] = _absolute(cell["path"], base)
            table = table.set_column(position, field, pa.array(cells, field.type))
    return table
