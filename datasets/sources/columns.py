"""Columns of a table: their names, which are used, and how their cells are read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fusionzoo.errors import FusionZooError, check_known, explained, located, one_line
from fusionzoo.ground.cells import Cell, fold, read_cells
from fusionzoo.structures import KINDS
from fusionzoo.targets import (
    join_vector,
    join_words,
    kind_of,
    label_word,
    label_words,
    length_of_vectors,
    read_list,
)

from ..media.arrays import DIMENSIONS
from ..tables.arrow import ArrowColumn, first_true, flat, is_list, is_text, read_each
from ..tables.paths import refuse
from ..tables.provenance import FUSIONZOO, INDEX, MEDIA, TARGET, LoadedTable, RowNumbers
from ..tables.splits import one_spelling
from ..tables.table import ROLES, word_list
from ..tables.tabular import join_cells
from .cell_kinds import NUMBER, convert_cells
from .table_settings import Roles, TableSettings

COMMA_NUMBER = r"^\s*([+-]?[0-9]*),([0-9]+(?:[eE][+-]?[0-9]+)?)\s*$"
NUMBERS = ("regression", "ordinal")  # standard kinds of label columns that hold numbers


LIST = r"^\s*(\[[\s\S]*\]|\{[\s\S]*\}|set\(\))\s*$"  # or a set
NUMBER_LISTS = pa.float64()
HUGGING_FACE = b"huggingface"  # key of a schema's metadata


class Columns:
    """The columns of a manifest by role; records which of them are used.

    `roles` maps roles to the user's names of columns, `{"target": "label"}`. A role without one is
    looked up under its own name. Case and spaces around names do not matter. Columns without a name
    are not used.
    """

    def __init__(
        self, loaded: LoadedTable, roles: Mapping[str, str], settings: TableSettings
    ) -> None:
        table, source = loaded.table, loaded.source
        self.source, self.table, self.roles, self.settings = source, table, roles, settings
        self.row_numbers = loaded.provenance.row_numbers or RowNumbers()
        self.missing_words = settings.missing_words(loaded.has_nulls)
        self.from_text = not loaded.has_nulls  # whether the source tells no number from its text
        self.row_ids = np.arange(len(table))  # positions of the rows before empty ones were dropped
        self.used: set[int] = set()
        self.missing: dict[str, Counter[str]] = {}  # column -> words that were read as missing
        self.notes: list[str] = []  # how cells were read, for the data summary
        self._positions: dict[str, int] = {}
        for position, name in enumerate(table.column_names):
            if not fold(name):
                continue
            first = self._positions.setdefault(fold(name), position)
            if first != position:
                problem = (
                    f"the columns {table.column_names[first]!r} and {name!r} have the same name if"
                    " spaces and case are ignored: rename one of them"
                )
                with located(source):
                    refuse(problem, "column", column=name)

    def __contains__(self, role: str) -> bool:
        return fold(self.roles.get(role, role)) in self._positions

    def name(self, role: str) -> str:
        """Return the name of a column as the table spells it."""
        name: str = self.table.column_names[self.position(role)]
        return name

    def position(self, role: str) -> int:
        """Return the index of a column in the table."""
        return self._positions[fold(self.roles.get(role, role))]

    def require(self, role: str, purpose: str) -> None:
        """Raise an error that names the nearest column, if the column does not exist."""
        if role not in self:
            name = self.roles.get(role, role)
            problem = f"{self.source} has no column {name!r} for {purpose}"
            check_known(name, self.table.column_names, problem)

    def values(self, role: str) -> pa.ChunkedArray:
        """Return a column unchanged."""
        self.used.add(self.position(role))
        return self.table.column(self.position(role))

    def text(self, role: str, *, words_missing: bool = True) -> ArrowColumn:
        """Return a column as text without spaces around it, null where that is empty or, if
        `words_missing`, a word for a missing value.

        A list of labels becomes `sun;beach`, an empty list `;`.
        """
        column = self.values(role)
        if is_list(column.type):
            return self._joined(role, column.to_pylist())
        where = f"{self.source}, column {self.name(role)!r}"
        # A date beyond the calendar, bytes that are no text.
        with explained(f"{where}: {column.type} cannot be read as text", pa.ArrowException):
            stripped = pc.utf8_trim_whitespace(_as_text(column))
        return self._without_missing(role, stripped, stripped, words_missing)

    def numbers(self, role: str) -> ArrowColumn:
        """Return a column as text with decimal points, null where it is empty."""
        return self._decimal_points(self.text(role))

    def labels(self, role: str, kind: str) -> ArrowColumn:
        """Return a column of labels as text, as `fusionzoo.targets` reads its kind."""
        standard = kind and kind_of(kind).standard_kind()  # empty: a class
        if standard == "multilabel":
            return self._label_lists(role)
        column = self.text(role)
        if standard in NUMBERS:
            name = self.name(role)
            if self.settings.cell_kinds.get(fold(name), "").startswith(NUMBER):
                return self.converted(name, column)[0][name]
            return self._decimal_points(column)
        return one_spelling(column) if standard in ("", "classification") else column

    def _label_lists(self, role: str) -> ArrowColumn:
        """Return a column of lists of labels, or of labels divided by the separator, as text."""
        column = self.values(role)
        if is_list(column.type):
            return self._joined(role, column.to_pylist(), vectors=True)
        column = self.text(role)
        separator = self.settings.label_separator
        if pc.any(pc.match_substring_regex(column, LIST)).as_py():
            self.notes.append(f"text in {role} as lists of labels")
            cells = read_each(column.to_pylist(), self._entries, partial(self._place, role))
            return self._joined(role, cells, vectors=True)
        if separator == ";":
            return column
        row = first_true(pc.match_substring(column, ";"))
        if row is not None:
            where = f"{self.where(row)}: the labels {column[row].as_py()!r}"
            raise FusionZooError(f"{where} contain ';' (--data.label_separator {separator!r})")
        return pc.replace_substring(column, separator, ";")

    def _entries(self, cell: str) -> list[Any]:
        """Return the labels of a cell, in brackets or divided by the separator."""
        entries = read_list(cell)
        return cell.split(self.settings.label_separator) if entries is None else entries

    def _place(self, role: str, row: int) -> str:
        return f"{self.where(row)}, column {self.name(role)!r}"

    def _joined(self, role: str, cells: Sequence[Any], *, vectors: bool = False) -> pa.Array:
        """Return lists of labels, or `vectors` of 0 and 1, as text for `targets.words`."""
        with located(f"{self.source}, column {self.name(role)!r}"):
            length = length_of_vectors(cells) if vectors else 0
        if length:
            self.notes.append(f"vectors of 0 and 1 in {role} as labels 0 to {length - 1}")
            return pa.array([x and join_vector(x) for x in cells], pa.string())
        joined = read_each(
            cells, lambda cell: join_words(label_words(cell)) or ";", partial(self._place, role)
        )
        return pa.array(joined, pa.string())

    def tabular(self, role: str) -> ArrowColumn:
        """Return a column of a tabular modality: text with decimal points, null for missing cells;
        numbers and categories stay as they are.
        """
        column = self.values(role)
        if not is_text(column.type):
            return column
        text = column.cast(pa.string())
        stripped = pc.utf8_trim_whitespace(text)
        present = self._without_missing(role, text, stripped, True)
        is_number = self.settings.cell_kinds.get(fold(role.strip()), "").startswith(NUMBER)
        # In `converted`, behind the signs between thousands: `1,234` is none of them.
        return present if is_number else self._decimal_points(present)

    def converted(self, name: str, column: ArrowColumn) -> tuple[dict[str, ArrowColumn], bool]:
        """Return what a column becomes by its cells' kind, and whether they are categories."""
        kind = self.settings.cell_kinds.get(fold(name))
        if kind is None:
            return {name: column}, False
        comma = self.settings.decimal == ","
        parts, are_categories = convert_cells(name, kind, column, comma)
        if kind.startswith(NUMBER) and pa.types.is_string(parts[name].type):
            parts = {name: self._decimal_points(parts[name])}
        return parts, are_categories

    def references(self, role: str) -> ArrowColumn:
        """Return a modality's column with null for missing text; lists stay as they are."""
        column = self.values(role)
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if not is_text(column.type):
            return self._decimal_points_in_lists(column)
        text = column.cast(pa.string())
        return self._without_missing(role, text, pc.utf8_trim_whitespace(text), True)

    def where(self, row: int) -> str:
        """Return the place of a row for messages: `file.csv, row 7`."""
        return f"{self.source}, row {self.row_numbers.number(row)}"

    def keep(self, mask: NDArray[np.bool_]) -> None:
        """Drop the rows where `mask` is false."""
        self.table, self.row_ids = self.table.filter(pa.array(mask)), self.row_ids[mask]
        self.row_numbers = self.row_numbers.keep(mask)

    def _without_missing(
        self, role: str, text: ArrowColumn, stripped: ArrowColumn, words_missing: bool
    ) -> ArrowColumn:
        """Return `text` with null where `stripped` is empty or a word for a missing value."""
        words = pa.array(["", *(self.missing_words if words_missing else ())])
        is_missing = pc.is_in(stripped, value_set=words)
        if not pc.any(is_missing).as_py():
            return text
        counts = pc.value_counts(stripped.filter(is_missing)).to_pylist()
        self.missing[self.name(role)] = Counter(
            {x["values"]: x["counts"] for x in counts if x["values"]}
        )
        return pc.if_else(is_missing, pa.scalar(None, pa.string()), text)

    def _decimal_points(self, column: ArrowColumn) -> ArrowColumn:
        """Return a text column with decimal points."""
        if self.settings.decimal == ".":
            return column
        return pc.replace_substring_regex(column, COMMA_NUMBER, r"\1.\2")

    def _decimal_points_in_lists(self, column: ArrowColumn) -> ArrowColumn:
        """Return a column of lists of text with decimal points; others stay as they are."""
        if self.settings.decimal == "." or not pa.types.is_list(column.type):
            return column
        whole = flat(column)
        inner = whole.values
        is_text = pa.types.is_string(inner.type)
        values = self._decimal_points(inner) if is_text else self._decimal_points_in_lists(inner)
        return pa.ListArray.from_arrays(whole.offsets, values, mask=whole.is_null())

    def unused(self) -> tuple[str, ...]:
        """Return the names of the columns that are not used."""
        names = enumerate(self.table.column_names)
        return tuple(name for position, name in names if position not in self.used)


def _as_text(column: ArrowColumn) -> ArrowColumn:
    """Return the cells of a column as text; numbers that are not a number are null."""
    if pa.types.is_floating(column.type):
        column = pc.if_else(pc.is_nan(column), pa.scalar(None, column.type), column)
    return column.cast(pa.string())


def gather_columns(
    loaded: LoadedTable, roles: Roles, kinds: Mapping[str, str], settings: TableSettings
) -> tuple[pa.Table, dict[str, str], dict[str, Counter[str]]]:
    """Replace the columns of each tabular modality by one of structs; return its name as role.

    `{"tabular": "age,colour"}` becomes `{"tabular": "tabular"}`, unless a column has that name.
    Return also the words that were read as missing, counted by column.
    """
    table = loaded.table
    columns = Columns(loaded, {}, settings)
    plain = {
        role: one_column(role, name) for role, name in roles.items() if not _is_tabular(role, kinds)
    }
    gathered = {
        name: _columns_of(name, roles, columns)
        for name in dict.fromkeys([*roles, *kinds, "tabular"])
        if _is_tabular(name, kinds) and (name in roles or name in columns)
    }
    _refuse_labels(gathered, plain, columns)
    needed = {fold(name) for name in [*plain.values(), "group", *(set(kinds) - set(gathered))]}
    single = (settings.group_column, settings.time_column, settings.weight_column)
    needed |= {fold(name) for name in single if name}
    joined = {name: _join(columns, names) for name, names in gathered.items()}
    for column in {column for names in gathered.values() for column in names}:
        if fold(column) not in needed and column in table.column_names:
            table = table.drop_columns(column)
    for name, values in joined.items():
        unique = name
        while fold(unique) in map(fold, table.column_names):
            unique = f"{unique} (columns)"
        table, plain[name] = table.append_column(unique, values), unique
    return table, plain, columns.missing


def cell_columns(
    table: pa.Table, roles: Roles, kinds: Mapping[str, str], settings: TableSettings
) -> set[str]:
    """Return the columns read as cells, not media: of roles and of tabular modalities."""
    tabular = [name for name in (*roles, *kinds, "tabular") if _is_tabular(name, kinds)]
    return role_columns(table, roles, kinds, settings) | _named_by(table, tabular, roles)


def role_columns(
    table: pa.Table, roles: Roles, kinds: Mapping[str, str], settings: TableSettings
) -> set[str]:
    """Return the columns of ids, splits, groups, weights and labels."""
    labels = settings.targets or ()
    weight = () if settings.weight_column is None else (settings.weight_column,)
    names = (*ROLES, settings.group_column or "group", *weight, *labels)
    return _named_by(table, [x for x in names if x not in kinds], roles)


def _named_by(table: pa.Table, names: Collection[str], roles: Roles) -> set[str]:
    words = {fold(word) for name in names for word in word_list(roles.get(name, name))}
    return {column for column in table.column_names if fold(column) in words}


def read_label_objects(source: str, name: str, values: Any) -> pa.Array:
    """Return a column of labels of which some are arrays, tuples or sets, as lists or text."""
    where = f"{source}, column {name!r}"
    try:
        cells = [_label_object(values[row]) for row in range(len(values))]
        if not any(isinstance(cell, str) for cell in cells):
            try:
                return pa.array(cells)
            except (pa.ArrowException, TypeError):  # text and numbers in a tuple
                return pa.array([None if x is None else label_words(x) for x in cells])
        return pa.array([json.dumps(x) if isinstance(x, list) else x for x in cells], pa.string())
    except (FusionZooError, pa.ArrowException, TypeError) as error:
        raise FusionZooError(f"{where}: no labels: {one_line(error)}") from None


def _label_object(value: Any) -> Any:
    """Return an array or tuple of labels as a list, one label as text."""
    from torch import Tensor

    if isinstance(value, np.ndarray | Tensor):
        value = value.tolist()
    if isinstance(value, tuple | set | frozenset):
        value = sorted(value, key=str) if isinstance(value, set | frozenset) else [*value]
    if isinstance(value, list):
        return [x.item() if isinstance(x, np.generic) else x for x in value]
    return label_word(value) if isinstance(value, str | int | float) else value


def _is_tabular(name: str, kinds: Mapping[str, str]) -> bool:
    return kinds.get(name, name) == "tabular"


def one_column(role: str, name: str | Sequence[str]) -> str:
    """Return the only column of a role; several are an error."""
    if isinstance(name, str):
        return name
    raise FusionZooError(f"--data.columns.{role} takes one column, found {list(name)}")


def _columns_of(name: str, roles: Roles, columns: Columns) -> list[str]:
    """Return the names of a modality's columns as the table spells them."""
    words = [word for word in word_list(roles.get(name, name)) if word]
    exact = roles.get(name)
    if isinstance(exact, str) and exact in columns:
        words = [exact]  # a column with a comma in its name
    for word in words:
        columns.require(word, f"--data.columns.{name}")
    names = [columns.name(word) for word in words]
    if not names or len(set(names)) < len(names):
        raise FusionZooError(f"--data.columns.{name} names {'a column twice' if names else 'none'}")
    return names


def _refuse_labels(
    gathered: Mapping[str, list[str]], plain: Mapping[str, str], table: Columns
) -> None:
    """Raise an error if a column of a tabular modality is an id, a split, a label or a weight."""
    roles = {fold(plain.get(role, role)): role for role in ("id", "split", "target")}
    if "split" in table.settings.cell_kinds:
        roles.pop(fold(plain.get("split", "split")), None)
    roles |= {fold(plain.get(name, name)): "target" for name in table.settings.targets or ()}
    if table.settings.weight_column is not None:
        roles[fold(table.settings.weight_column)] = "weight (--data.weight_column)"
    for name, columns in gathered.items():
        for column in columns:
            if fold(column) in roles:
                problem = f"{table.source}: column {column!r} is the {roles[fold(column)]}"
                raise FusionZooError(f"{problem}, and in --data.columns.{name}: choose one")


def read_row(value: Any, settings: TableSettings) -> dict[str, Cell] | None:
    """Return a row's cells, by column, as those of a table with these settings become an encoder's;
    None if all of them are empty."""
    cells = read_cells(value)
    if cells is None or not (settings.cell_kinds or settings.na or settings.decimal != "."):
        return cells
    table = pa.table({name: [cell] for name, cell in cells.items()})
    columns = Columns(LoadedTable(table=table, source="the row", has_nulls=True), {}, settings)
    row: dict[str, Cell] | None = _join(columns, table.column_names)[0].as_py()
    return row


def _join(table: Columns, names: list[str]) -> pa.StructArray:
    columns = {name: table.tabular(name) for name in names}
    categories: set[str] = set()
    if len(names) == 1 and pa.types.is_struct(columns[names[0]].type):
        values = columns[names[0]].combine_chunks()
        columns = dict(zip([x.name for x in values.type], values.flatten(), strict=True))
    converted: dict[str, ArrowColumn] = {}
    with located(table.source):
        for name, column in columns.items():
            parts, are_categories = table.converted(name.strip(), column)
            converted |= parts
            categories |= {*parts} if are_categories else set()
        return join_cells({x.strip(): column for x, column in converted.items()}, categories)


def read_list_cells(
    table: Columns, values: Mapping[str, ArrowColumn], kinds: Mapping[str, str]
) -> tuple[dict[str, ArrowColumn], list[str]]:
    """Return the modalities with lists of numbers for text in brackets, and notes of this."""
    columns, notes = dict(values), []
    for name, column in values.items():
        if kinds[name] not in DIMENSIONS or not pa.types.is_string(column.type):
            continue
        is_list = pc.match_substring_regex(column, LIST)
        if not pc.any(is_list).as_py():
            continue
        columns[name] = _read(table, name, column, DIMENSIONS[kinds[name]])
        notes.append(f"text in {name} as lists of numbers")
    return columns, notes


def _read(table: Columns, name: str, column: ArrowColumn, ndim: int) -> pa.Array:
    cells: list[Any] = []
    for row, text in enumerate(column.to_pylist()):
        cell = None if text is None else _parse(text)
        if text is not None and not _is_array(cell, ndim):
            shape = "[0.5, 1, 2]" if ndim == 1 else "[[0.5, 1], [2, 3]]"
            shown = text if len(text) <= 60 else f"{text[:57]}..."
            raise FusionZooError(
                f"{table.where(row)}, column {table.name(name)!r}: {shown!r} is no list of numbers"
                f" such as {shape}: write it so, with commas, or store arrays in a file (.npy)"
            )
        cells.append(cell)
    kind = pa.list_(NUMBER_LISTS) if ndim == 1 else pa.list_(pa.list_(NUMBER_LISTS))
    return pa.array(cells, kind)


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _is_array(cell: Any, ndim: int) -> bool:
    """Return whether a cell is a list of numbers, or of such lists."""
    if not isinstance(cell, list):
        return False
    if ndim > 1:
        return all(_is_array(item, ndim - 1) for item in cell)
    return all(isinstance(x, float) or _is_integer(x) for x in cell)


def _is_integer(value: Any) -> bool:
    """Return whether a value is an integer that float64 can hold."""
    return isinstance(value, int) and not isinstance(value, bool) and value.bit_length() < 1024


@dataclass(frozen=True)
class ColumnFacts:
    """Kinds of columns, and the names of classes that columns of numbers refer to."""

    kinds: dict[str, str] = field(default_factory=dict)
    class_names: dict[str, list[str]] = field(default_factory=dict)
    has_target: bool = False  # whether there is a column `target`
    modalities: tuple[str, ...] = ()  # columns in the order in which fusionzoo stored them
    index: str = ""  # column of a DataFrame's index whose labels are ids
    target: str = ""  # column of labels

    def with_defaults(
        self, kinds: Mapping[str, str], roles: Roles, targets: Iterable[str]
    ) -> tuple[dict[str, str], Roles, tuple[str, ...]]:
        """Add what is declared, unless the user names the column; return also what was added."""
        columns = [column for role in roles.values() for column in word_list(role)]
        named = {fold(column) for column in (*columns, *kinds, *targets)}
        added = {name: kind for name, kind in self.kinds.items() if fold(name) not in named}
        merged = {**kinds, **added}
        notes = [f"column {name!r} is {kind}" for name, kind in added.items() if name != kind]
        labels = [name for name in self.class_names if fold(name) not in named]
        labels = [name for name in labels if fold(name) == "label"] or labels
        labels = [self.target] if self.target and fold(self.target) not in named else labels
        stored = [x for x in self.modalities if fold(x) not in named and x not in roles]
        merged_roles = {**roles, **{name: name for name in stored}}  # roles keep their order
        if "target" not in roles and not self.has_target and len(labels) == 1:
            merged_roles["target"] = labels[0]
            notes.append(f"column {labels[0]!r} is the target")
        if self.index and "id" not in roles and fold(self.index) not in named:
            merged_roles["id"] = self.index
            notes.append(f"ids are the labels of the DataFrame's index, {self.index}")
        return merged, merged_roles, tuple(notes)


def read_declared(table: pa.Table, source: str) -> ColumnFacts:
    """Return what the metadata of a table's schema declares of the columns it has."""
    info = _mapping(_read_json(table, HUGGING_FACE, source).get("info"))
    features = _mapping(info.get("features"))
    declared = _read_json(table, FUSIONZOO, source)
    stored = _mapping(declared.get("kinds"))
    index = str(declared[INDEX]) if declared.get(INDEX) in table.column_names else ""
    target = str(declared[TARGET]) if declared.get(TARGET) in table.column_names else ""
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
    return ColumnFacts(kinds, class_names, has_target, modalities, index, target)


def apply_declared(
    loaded: LoadedTable, roles: Roles, settings: TableSettings
) -> tuple[pa.Table, dict[str, str], Roles, tuple[str, ...]]:
    """Return the table with named classes, kinds and roles with what is declared, and notes."""
    declared = read_declared(loaded.table, loaded.source)
    declared = replace(declared, kinds={**declared.kinds, **loaded.kinds})
    merged = declared.with_defaults(settings.modality_kinds, roles, settings.targets or ())
    return _name_classes(loaded.table, declared.class_names, loaded.source), *merged


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
            raise FusionZooError(f"{source}: {name!r} names only {len(labels)} of its classes")
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
    text = (table.schema.metadata or {}).get(key, b"{}")
    with explained(f"{source}: its metadata {key.decode()!r} is no JSON", ValueError):
        return _mapping(json.loads(text))


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
