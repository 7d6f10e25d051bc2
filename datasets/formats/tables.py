"""Turn a table with one row per sample into a data set: roles, modalities, splits and groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from fusionzoo.errors import FusionZooError, one_line
from fusionzoo.structures import KINDS

from ..arrow import row_numbers
from ..failures import MAX_ERRORS, OnError
from ..paired import PairedDataset
from ..provenance import Provenance
from ..splits import SHARES, split_by_hash, split_groups
from ..table import word_list
from .columns import TEXT_TYPES, Columns

ROLES = ("id", "split", "target", "group")


def open_table(
    table: pa.Table,
    *,
    source: str,
    root: Path | None,
    columns: Mapping[str, str] | None = None,
    kinds: Mapping[str, str] | None = None,
    shares: Sequence[float] = SHARES,
    on_error: OnError = "raise",
    max_errors: float = MAX_ERRORS,
    targets: Mapping[str, str] | None = None,
    paths: str | Sequence[str] = (),
    allow_outside: bool = False,
    group_column: str | None = None,
) -> PairedDataset:
    """Return the data set of a table; for the settings see `manifest`.

    `source` names the table in messages; paths are relative to `root`.
    """
    roles = dict(columns or {})
    if "group" in {*roles, *(kinds or {})}:
        raise FusionZooError(
            f"{source}: a group is no modality: --data.group_column names its column"
        )
    if group_column is not None:
        roles["group"] = group_column
    try:
        rows, names, provenance = _read_columns(
            Columns(source, table, roles), kinds or {}, shares, targets
        )
    except (pa.ArrowException, UnicodeDecodeError) as error:  # a date for an id, bytes for a label
        raise FusionZooError(
            f"{source}: a column is of a type that cannot be used: {one_line(error)}"
        ) from error
    return PairedDataset(
        rows,
        names,
        root=root,
        source=source,
        on_error=on_error,
        max_errors=max_errors,
        targets=targets,
        paths=word_list(paths),
        allow_outside=allow_outside,
        provenance=provenance,
    )


def _modalities(table: Columns, kinds: Mapping[str, str], labels: Sequence[str]) -> dict[str, str]:
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
    if not names:
        table.require("image", "a modality (image, text, audio, vector, sequence)")
    for name in names:
        if kinds.get(name, name) not in KINDS:
            raise FusionZooError(
                f"{table.source}: the kind of column {name!r} is unknown:"
                f" --data.kinds.{name} image (or {', '.join(KINDS[1:])})"
            )
    return {name: kinds.get(name, name) for name in names}


def _label_columns(table: Columns, targets: Mapping[str, str]) -> list[str]:
    """Return the columns of labels besides `target`."""
    for name in targets:
        if name in table.roles and name not in ROLES:
            raise FusionZooError(
                f"{table.source}: {name!r} is a modality (--data.columns) and a target: choose one"
            )
        table.require(name, f"--targets.{name}")
        if name in ("id", "split"):
            raise FusionZooError(f"{table.source}: {name!r} cannot be a target")
    return [name for name in targets if name != "target"]


def _read_columns(
    table: Columns,
    kinds: Mapping[str, str],
    shares: Sequence[float],
    targets: Mapping[str, str] | None,
) -> tuple[pa.Table, dict[str, str], Provenance]:
    """Return the table of the data set, its modalities with their kinds, and its provenance."""
    labels = _label_columns(table, targets or {})
    names = _modalities(table, kinds, labels)
    columns, provenance = _read_roles(table, shares, {table.position(x) for x in [*names, *labels]})
    columns |= {name: table.text(name) for name in labels}
    columns |= {name: _references(table.values(name)) for name in names}
    if targets is not None and "target" not in targets and "target" in table:
        table.used.discard(table.position("target"))
    return pa.table(columns), names, replace(provenance, unused=table.unused())


def _read_roles(
    table: Columns, shares: Sequence[float], taken: set[int]
) -> tuple[dict[str, Any], Provenance]:
    """Return the columns id, split, target and group, and the rules behind splits and groups.

    A column `group` that the user did not name is used unless it is `taken` for something else; an
    empty cell is a group of its own.
    """
    num_rows = len(table.table)
    columns = {"id": table.text("id") if "id" in table else row_numbers(num_rows)}
    if "target" in table:
        taken = taken | {table.position("target")}
        columns["target"] = table.text("target")
    else:
        columns["target"] = pa.nulls(num_rows, pa.string())
    split_rule = "by a hash of " + (repr(table.name("id")) if "id" in table else "the row")
    group_rule = ""
    keys = columns["id"]
    if "group" in table and ("group" in table.roles or table.position("group") not in taken):
        groups = table.text("group")
        alone = f", {groups.null_count:,} empty cells stand alone" if groups.null_count else ""
        group_rule = f"column {table.name('group')!r}{alone}"
        columns["group"] = keys = pc.coalesce(groups, columns["id"], pa.scalar(""))
    if "split" in table:
        columns["split"], split_rule = _read_splits(table, columns["id"])
    elif "group" in columns:
        splits, moved = split_groups(keys.to_pylist(), shares)
        columns["split"] = pa.array([splits[key] for key in keys.to_pylist()])
        moves = "".join(f"; {key!r} moved to {splits[key]}, else empty" for key in moved)
        split_rule = f"by a hash of {table.name('group')!r}{moves}"
    else:
        columns["split"] = pa.array([split_by_hash(key, shares) for key in keys.to_pylist()])
    return columns, Provenance(split_rule=split_rule, group_rule=group_rule)


def _read_splits(table: Columns, ids: Any) -> tuple[Any, str]:
    """Return the column of splits, which must be complete, and the rule behind it."""
    splits, name = table.text("split"), table.name("split")
    if splits.null_count:
        row = splits.is_null().to_pylist().index(True)
        raise FusionZooError(
            f"{table.source}, row {row + 1}, sample {ids[row].as_py()!r}: {name} is empty; write"
            " train, val or test, or remove the whole column for a split by hash"
        )
    return splits, f"column {name!r}"


def _references(column: Any) -> Any:
    """Return a modality's column with null for empty text; lists stay as they are."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if not any(is_type(column.type) for is_type in TEXT_TYPES):
        return column
    text = column.cast(pa.string())
    return pc.if_else(pc.equal(text, ""), pa.scalar(None, pa.string()), text)
