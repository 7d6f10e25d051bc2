"""Read the table that settings of a manifest name, whatever holds it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from ..shards.storage import is_url
from ..sources.array_files import is_view_folder, read_array_file
from ..sources.table_files import read_table, reader_of
from ..sources.table_settings import TableSettings
from ..tables.arrow import with_text_of_uuids
from ..tables.provenance import LoadedTable
from .naming import STORED, UNNAMED


def load_table(settings: TableSettings) -> LoadedTable:
    """Read what `root` is: a table in memory, shards in a folder or at a URL, or a file."""
    loaded = _load(settings)
    return replace(loaded, table=with_text_of_uuids(loaded.table))


def _load(settings: TableSettings) -> LoadedTable:
    root = settings.root
    if isinstance(root, LoadedTable):
        return root
    if not isinstance(root, str | os.PathLike):
        from ..sources.in_memory import read_objects

        return read_objects(settings)
    path = Path(root).expanduser()
    if is_url(root) or path.is_dir():
        from ..shards.read import open_shards

        loaded = open_shards(root)
        if loaded is not None:
            return loaded
        if path.is_dir() and is_view_folder(path):
            table, provenance = read_array_file(path)
            return LoadedTable(table=table, source=str(path), root=path, provenance=provenance)
    table, provenance = read_table(path, settings)
    return LoadedTable(
        table=table,
        source=UNNAMED if STORED.search(str(path)) else str(path),
        root=path.parent,
        provenance=provenance,
        has_nulls=reader_of(path).has_nulls,
    )
