"""Read a table's splits, or make them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..refusals import refuse
from ..splits import class_columns, make_splits
from .columns import Columns
from .split_names import usual_splits


class SplitColumn(NamedTuple):
    """The splits of a table's rows and where they come from."""

    column: Any
    rule: str
    shares: tuple[float, ...] | None  # of splits made by hash


def read_splits(
    table: Columns, columns: Mapping[str, Any], kinds: Mapping[str, str], shares: Sequence[float]
) -> SplitColumn:
    """Return the splits of the column `split`; without one, made by a hash of the group or id.

    `columns` has the ids, groups and labels, `kinds` says what the labels are. Made splits have
    every class in each split where that is possible, see `make_splits`.
    """
    if "split" in table:
        return SplitColumn(*_read_column(table, columns["id"]), None)
    key = "group" if "group" in columns else "id"
    labels = class_columns(columns, kinds)
    made = make_splits(columns[key], labels, shares, unique=key == "id")
    name = repr(table.name(key)) if key in table else "the row"
    return SplitColumn(made.splits, f"by a hash of {name}{made.exceptions}", tuple(shares))


def _read_column(table: Columns, ids: Any) -> tuple[Any, str]:
    """Return the column of splits, which must be complete, and the rule behind it."""
    splits, name = table.text("split"), table.name("split")
    for row in splits.is_null().to_numpy(zero_copy_only=False).nonzero()[0].tolist():
        refuse(
            f"{name} is empty; write train, val or test, or remove the whole column for a split by"
            " hash",
            "split",
            where=f"{table.where(row)}, sample {ids[row].as_py()!r}: ",
            row=row,
            column=name,
        )
    splits, renamed = usual_splits(splits)
    mapped = "".join(f", {word!r} read as {usual}" for word, usual in renamed.items())
    return splits, f"column {name!r}{mapped}"
