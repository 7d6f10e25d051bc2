"""Find out which columns of a table are modalities, and of which kinds."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence

from fusionzoo.errors import FusionZooError
from fusionzoo.structures import KINDS

from ..refusals import labels_of_join
from ..table import ROLES
from .checked import list_names
from .columns import Columns


def find_modalities(
    table: Columns, kinds: Mapping[str, str], labels: Sequence[str]
) -> dict[str, str]:
    """Return the kind of each modality: those that the user names, then those of known names."""
    for role in table.roles:
        table.require(role, f"--data.{'group_column' if role == 'group' else f'columns.{role}'}")
    for name in kinds:
        table.require(name, f"--data.kinds.{name}")
    taken = {table.position(name) for name in [*(x for x in ROLES if x in table.roles), *labels]}
    names = [name for name in table.roles if name not in ROLES]
    for name in (*kinds, *KINDS):
        if name in table and name not in names:
            if name in KINDS and table.position(name) in {table.position(x) for x in names}:
                continue  # the user gave this column another name
            names.append(name)
    order = [*table.roles, *KINDS, *kinds]
    names = [name for name in sorted(names, key=order.index) if table.position(name) not in taken]
    if not names and not any(label in table for label in labels_of_join() or ()):
        raise FusionZooError(_no_modality(table, taken))
    for name in names:
        if kinds.get(name, name) not in KINDS:
            raise FusionZooError(
                f"{table.source}: the kind of column {name!r} is unknown:"
                f" --data.kinds.{name} image (or {', '.join(KINDS[1:])})"
            )
    return {name: kinds.get(name, name) for name in names}


def _no_modality(table: Columns, taken: Collection[int]) -> str:
    """Return the message for a table of which no column is known to be a modality."""
    known = table.table.column_names
    free = [name for position, name in enumerate(known) if position not in taken]
    if len(known) == 1 and not known[0].isidentifier():
        advice = "it has one column: --data.delimiter ';' names the character between cells"
    elif free:
        advice = f"--data.columns.text {shlex.quote(free[0])} names one"
    else:
        advice = "add one"
    return (
        f"{table.source} has no column of a modality ({', '.join(KINDS)}); {advice}."
        f" Its columns: {list_names(known)}"
    )
