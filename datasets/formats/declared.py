"""What a table's metadata declares: Hugging Face's features, and kinds that fusionzoo stored."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from fusionzoo.cells import fold
from fusionzoo.errors import FusionZooError
from fusionzoo.structures import KINDS

from ..stored_kinds import FUSIONZOO
from ..table import word_list
from .cell_columns import Roles
from .loaded import Loaded

HUGGING_FACE = b"huggingface"  # key of a schema's metadata
MEDIA = {"Image": "image", "Audio": "audio"}  # features of Hugging Face -> kinds


@dataclass(frozen=True)
class Declared:
    """Kinds of columns, and the names of classes that columns of numbers refer to."""

    kinds: dict[str, str] = field(default_factory=dict)
    class_names: dict[str, list[str]] = field(default_factory=dict)
    has_target: bool = False  # whether there is a column `target`
    modalities: tuple[str, ...] = ()  # columns in the order in which fusionzoo stored them

    def with_defaults(
        self, kinds: Mapping[str, str], roles: Roles, targets: Iterable[str]
    ) -> tuple[dict[str, str], Roles, tuple[str, ...]]:
        """Add what is declared to the user's kinds and roles; return also what was added.

        A column that the user names stays as it is. The only column of classes (or the one called
        `label`) is the target, unless there is a column or a setting for that.
        """
        columns = [column for role in roles.values() for column in word_list(role)]
        named = {fold(column) for column in (*columns, *kinds, *targets)}
        added = {name: kind for name, kind in self.kinds.items() if fold(name) not in named}
        merged = {**kinds, **added}
        notes = [f"column {name!r} is {kind}" for name, kind in added.items() if name != kind]
        labels = [name for name in self.class_names if fold(name) not in named]
        labels = [name for name in labels if fold(name) == "label"] or labels
        stored = [x for x in self.modalities if fold(x) not in named and x not in roles]
        merged_roles = {**roles, **{name: name for name in stored}}  # roles keep their order
        if "target" not in roles and not self.has_target and len(labels) == 1:
            merged_roles["target"] = labels[0]
            notes.append(f"column {labels[0]!r} is the target")
        return merged, merged_roles, tuple(notes)


def read_declared(table: pa.Table, source: str) -> Declared:
    """Return what the metadata of a table's schema declares of the columns it has."""
    info = _mapping(_read_json(table, HUGGING_FACE, source).get("info"))
    features = _mapping(info.get("features"))
    stored = _mapping(_read_json(table, FUSIONZOO, source).get("kinds"))
    kinds, class_names = {}, {}
    for name in table.column_names:
        feature = _mapping(features.get(name))
        for described in (feature, _mapping(feature.get("feature"))):  # a list has a feature
            if str(described.get("_type")) in MEDIA:
                kinds[name] = MEDIA[str(described["_type"])]
        names = _mapping(feature.get("feature")).get("names") or feature.get("names")
        if isinstance(names, list) and all(isinstance(label, str) for label in names):
            class_names[name] = names
        if stored.get(name) in KINDS:
            kinds[name] = stored[name]
    has_target = any(fold(name) == "target" for name in table.column_names)
    modalities = tuple(name for name in stored if name in kinds)
    return Declared(kinds, class_names, has_target, modalities)


def apply_declared(
    table: pa.Table,
    source: str,
    kinds: Mapping[str, str],
    roles: Roles,
    targets: Iterable[str],
    loaded: Loaded | None,
) -> tuple[pa.Table, dict[str, str], Roles, tuple[str, ...]]:
    """Return the table with named classes, kinds and roles with what is declared, and notes."""
    declared = read_declared(table, source)
    if loaded is not None:
        declared = replace(declared, kinds={**declared.kinds, **loaded.kinds})
    merged = declared.with_defaults(kinds, roles, targets)
    return _name_classes(table, declared.class_names, source), *merged


def _name_classes(table: pa.Table, names: Mapping[str, Sequence[str]], source: str) -> pa.Table:
    """Replace numbers of classes, or lists of them, with the declared names; -1 is no label."""
    for name, labels in names.items():
        position = table.column_names.index(name)
        column = table.column(position)
        cells = pc.list_flatten(column) if pa.types.is_nested(column.type) else column
        if not pa.types.is_integer(cells.type):
            continue
        bounds = pc.min_max(cells).as_py()
        if bounds["min"] is not None and not -1 <= bounds["min"] <= bounds["max"] < len(labels):
            raise FusionZooError(
                f"{source}, column {name!r}: numbers of classes from {bounds['min']} to"
                f" {bounds['max']}, but only {len(labels)} classes have names"
            )
        table = table.set_column(position, name, pa.array(_named(column.to_pylist(), labels)))
    return table


def _named(cells: list[Any], labels: Sequence[str]) -> list[Any]:
    def label(number: int | None) -> str | None:
        return None if number is None or number < 0 else labels[number]

    return [
        [label(number) for number in cell] if isinstance(cell, list) else label(cell)
        for cell in cells
    ]


def _read_json(table: pa.Table, key: bytes, source: str) -> dict[str, Any]:
    text = (table.schema.metadata or {}).get(key)
    if text is None:
        return {}
    try:
        return _mapping(json.loads(text))
    except ValueError as error:
        raise FusionZooError(f"{source}: its metadata {key.decode()!r} is no JSON") from error


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
