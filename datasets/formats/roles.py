"""Read the columns of a table that are no modalities: ids, labels and groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from fusionzoo.errors import FusionZooError

from ..refusals import is_collecting
from .columns import Columns


def read_ids(table: Columns) -> Any:
    """Return the ids, which must be complete; without a column of them the rows' numbers from 0."""
    if "id" not in table:
        return pa.array(table.row_ids).cast(pa.string())
    ids = table.text("id", words_missing=False)
    if ids.null_count and not is_collecting():
        row = pc.index(ids.is_null(), True).as_py()
        raise FusionZooError(f"{table.where(row)}: the id is empty")
    return ids


def read_labels(table: Columns, name: str, kinds: Mapping[str, str]) -> Any:
    """Return a column of labels as text."""
    column = table.text(name)
    if pa.types.is_list(table.values(name).type):
        return column  # joined by semicolons
    return table.cells.labels(column, kinds.get(name, ""), table.where)


def read_groups(table: Columns, taken: set[int]) -> tuple[Any, str]:
    """Return the groups and the rule behind them, or None.

    A column `group` that the user did not name is used unless it is `taken` for something else; an
    empty cell is a group of its own.
    """
    if "target" in table:
        taken = taken | {table.position("target")}
    if "group" not in table or ("group" not in table.roles and table.position("group") in taken):
        return None, ""
    groups = table.text("group")
    alone = f", {groups.null_count:,} empty cells stand alone" if groups.null_count else ""
    return groups, f"column {table.name('group')!r}{alone}"


def missing_words(table: Columns) -> str:
    """Say which words were read as missing values: `'NA' 3 in text`."""
    used = {name: words for name, words in table.missing.items() if words}
    parts = [
        ", ".join(f"{word!r} {count:,}" for word, count in words.most_common()) + f" in {name}"
        for name, words in used.items()
    ]
    return "; ".join(parts)
