"""Modalities that are made of several columns of a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pyarrow as pa

from fusionzoo.cells import fold
from fusionzoo.errors import FusionZooError

from ..table import ROLES, word_list
from ..tabular import join_cells
from .cells import CellRules
from .columns import Columns

Roles = Mapping[str, str | Sequence[str]]  # role or modality -> the user's name of its column


def gather_columns(
    table: pa.Table,
    source: str,
    roles: Roles,
    kinds: Mapping[str, str],
    *,
    targets: Collection[str] = (),
    categorical: str | Sequence[str] = (),
    cells: CellRules | None = None,
) -> tuple[pa.Table, dict[str, str], dict[str, Counter[str]]]:
    """Replace the columns of each tabular modality by one of structs; return its name as role.

    `{"tabular": "age,colour"}` becomes `{"tabular": "tabular"}`, unless a column has that name.
    Return also the words that were read as missing, counted by column.
    """
    columns = Columns(source, table, {}, cells)
    words = word_list(categorical)
    for name in words:
        columns.require(name, "--data.categorical")
    forced = {columns.name(name) for name in words}
    plain = {
        role: _one_column(role, name)
        for role, name in roles.items()
        if not _is_tabular(role, kinds)
    }
    gathered = {
        name: _columns_of(name, roles, columns)
        for name in dict.fromkeys([*roles, *kinds, "tabular"])
        if _is_tabular(name, kinds) and (name in roles or name in columns)
    }
    lost = sorted(forced - {column for names in gathered.values() for column in names})
    if lost:
        raise FusionZooError(
            f"{source}: --data.categorical names {lost[0]!r}, which is in no tabular modality:"
            f" --data.columns.tabular {lost[0]},..."
        )
    _refuse_labels(gathered, plain, targets, source)
    needed = {fold(name) for name in [*plain.values(), "group", *(set(kinds) - set(gathered))]}
    joined = {name: _join(columns, names, forced) for name, names in gathered.items()}
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
    table: pa.Table,
    roles: Roles,
    kinds: Mapping[str, str],
    group_column: str | None,
    targets: Collection[str],
) -> set[str]:
    """Return the columns that are read as cells, not as media, even if they hold bytes.

    These are ids, splits, groups, labels and the parts of tabular modalities.
    """
    names = [
        *(x for x in (*ROLES, group_column or "group", *targets) if x not in kinds),
        *(name for name in (*roles, *kinds, "tabular") if _is_tabular(name, kinds)),
    ]
    words = {fold(word) for name in names for word in word_list(roles.get(name, name))}
    return {column for column in table.column_names if fold(column) in words}


def _is_tabular(name: str, kinds: Mapping[str, str]) -> bool:
    return kinds.get(name, name) == "tabular"


def _one_column(role: str, name: str | Sequence[str]) -> str:
    if isinstance(name, str):
        return name
    raise FusionZooError(
        f"--data.columns.{role} takes one column, found {list(name)}; several of them make a"
        f" tabular modality: --data.kinds.{role} tabular"
    )


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
        raise FusionZooError(
            f"{columns.source}: --data.columns.{name} names {'a column twice' if names else 'none'}"
        )
    return names


def _refuse_labels(
    gathered: Mapping[str, list[str]],
    plain: Mapping[str, str],
    targets: Collection[str],
    source: str,
) -> None:
    """Raise an error if a column of a tabular modality is an id, a split or a label."""
    roles = {fold(plain.get(role, role)): role for role in ("id", "split", "target")}
    roles |= {fold(plain.get(name, name)): "target" for name in targets}
    for name, columns in gathered.items():
        for column in columns:
            if fold(column) in roles:
                raise FusionZooError(
                    f"{source}: column {column!r} is the {roles[fold(column)]}, and"
                    f" --data.columns.{name} names it as an input: choose one"
                )


def _join(table: Columns, names: list[str], forced: Collection[str]) -> Any:
    columns = {name: table.tabular(name) for name in names}
    if len(names) == 1 and pa.types.is_struct(columns[names[0]].type):
        values = columns[names[0]].combine_chunks()
        columns = dict(zip([x.name for x in values.type], values.flatten(), strict=True))
    try:
        return join_cells({name.strip(): column for name, column in columns.items()}, forced)
    except FusionZooError as error:
        raise FusionZooError(f"{table.source}: {error}") from None
