"""Rows of a table in memory as samples of a model that was trained on such a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fusionzoo.errors import FusionZooError
from fusionzoo.ground.cells import fold

from ..media.decode import decode
from ..media.ranges import range_of
from ..paired import PairedDataset
from ..sources.columns import read_row
from ..sources.in_memory import read_objects
from ..sources.infer import named_columns
from ..sources.open_table import open_table
from ..sources.table_settings import TableSettings
from ..tables.provenance import LoadedTable
from ..tables.table import ROLES
from .as_trained import AS_TRAINED, complete_for_model
from .naming import TABLE


def holds_rows(samples: Any, stored: Mapping[str, Any], modalities: Mapping[str, str]) -> bool:
    """Whether samples are rows of a table as in `stored` (frames are), not values by modality."""
    if hasattr(samples, "__arrow_c_stream__"):
        return True
    if stored.get("name") != TABLE or not isinstance(samples, list | tuple):
        return False
    columns = named_columns(stored) - {fold(name) for name in modalities}
    return any(
        fold(str(name)) in columns and name not in modalities
        for row in samples
        if isinstance(row, Mapping)
        for name in row
    )


def open_rows(rows: Any, stored: Mapping[str, Any], modalities: Mapping[str, str]) -> PairedDataset:
    """Open rows as the training table, which `stored` describes; say which columns are missing."""
    if stored.get("name") != TABLE:
        listed = ", ".join(modalities)
        raise FusionZooError(f"the model was not trained on a table: give samples with {listed}")
    if stored.get("join"):
        raise FusionZooError("the model joins tables: fusionzoo.predict(run, rows, join=...)")
    columns = {x: y for x, y in (stored.get("columns") or {}).items() if x not in ROLES}
    described = {**stored, "columns": columns}
    described.pop("group_column", None)
    described.pop("weight_column", None)
    loaded = _without_roles(read_objects(TableSettings(root=rows)), described)
    settings = {"name": TABLE, "root": loaded}
    spec = complete_for_model(settings, described)
    for note in spec.notes:
        if not note.startswith(AS_TRAINED):
            print(note)
    assert spec.loaded is not None
    of_table = TableSettings.of({**spec.settings, "targets": {}, "allow_outside": True})
    # Not by way of the registry, whose checks take longer than a row.
    dataset = open_table(spec.loaded, of_table)
    names = [name for name in dataset.modalities if name in modalities]
    if not names:
        raise FusionZooError(f"the model reads {', '.join(modalities)}, which the rows do not have")
    return dataset.only(names).read_as(stored)


def cell_settings(stored: Mapping[str, Any], modality: str) -> dict[str, Any]:
    """Return how the cells of a tabular modality are read; of joined tables, in its own."""
    joined = (stored.get("join") or {}).get(modality)
    source = joined if isinstance(joined, Mapping) else stored
    return {name: source[name] for name in ("kinds", "decimal", "na") if source.get(name)}


def read_value(name: str, kind: str, value: Any, stored: Mapping[str, Any]) -> Any:
    """Decode a value of a modality, read as in the training data that `stored` describes."""
    if value is None:
        return None
    if kind == "tabular":
        return read_row(value, TableSettings.of({**cell_settings(stored, name), "targets": {}}))
    return decode(kind, value, range_of(stored.get("image_range"), name))


def _without_roles(loaded: LoadedTable, settings: Mapping[str, Any]) -> LoadedTable:
    """Leave out ids, splits, targets and groups, by which nothing is answered."""
    names = named_columns(settings)
    table = loaded.table
    unread = [x for x in table.column_names if fold(x) in ROLES and fold(x) not in names]
    memory = {name: values for name, values in loaded.memory.items() if name not in unread}
    kinds = {name: kind for name, kind in loaded.kinds.items() if name not in unread}
    return replace(loaded, table=table.drop_columns(unread), memory=memory, kinds=kinds)
