"""A table with a row per sample: CSV, TSV, JSON lines or Parquet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from fusionzoo.errors import FusionZooError
from fusionzoo.structures import KINDS

from ..base import DATASETS, tidy
from ..failures import MAX_ERRORS, OnError
from ..paired import PairedDataset
from ..provenance import Provenance
from ..splits import SHARES, split_by_hash, split_groups
from ..table import word_list
from .columns import Columns, read_table

ROLES = ("id", "split", "target", "group")

TEXT_TYPES = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)


@DATASETS.register("manifest", family="own")
def manifest(
    *,
    root: str = "",
    columns: Mapping[str, str] | None = None,
    kinds: Mapping[str, str] | None = None,
    shares: Sequence[float] = SHARES,
    on_error: OnError = "raise",
    max_errors: float = MAX_ERRORS,
    modalities: str | Sequence[str] | None = None,
    missing: float = 0.0,
    targets: Mapping[str, str] | None = None,
    paths: str | Sequence[str] = (),
    allow_outside: bool = False,
    group_column: str | None = None,
) -> PairedDataset:
    """One's own data: a CSV, TSV, JSONL or Parquet file with a row per sample.

    Columns: `id` (default: the row's number), `split` (default: by a hash of the id, in the
    `shares` of train, val, test), `target` (may be absent: then one can only embed), and one per
    modality. Those named image, text, audio, vector, sequence are found; others are named by
    `columns={"xray": "file_2"}` (also `id`, `split`, `target`) and `kinds={"xray": "image"}`.
    Spaces around names and their case do not matter. Samples with one value in `group_column`
    (default: a column `group`, if there is one) stay together in splits by hash and in folds; an
    empty cell is a group of its own, and `group_column="id"` makes every sample one.

    An empty cell is a missing modality. Text stands in its cell, or, with `paths="text"`, in the
    file that the cell names; vectors and sequences are lists (JSONL, Parquet) or .npy files. Paths
    are relative to the manifest and may not leave its folder, links resolved, unless
    `allow_outside`.
    `targets` names columns of labels and what they hold (`{"age": "regression"}`), for `target`
    too; train.py sets it by its objective.
    """
    path = Path(root)
    table = _open_table(path, columns or {}, kinds or {}, group_column)
    label_names = _labels(table, targets or {})
    names = _modalities(table, kinds or {}, label_names)
    rows, provenance = _read_columns(table, shares, names, label_names)
    if targets is not None and "target" not in targets and "target" in table:
        table.used.discard(table.place("target"))
    dataset = PairedDataset(
        rows,
        names,
        root=path.parent,
        source=str(path),
        on_error=on_error,
        max_errors=max_errors,
        targets=targets,
        paths=word_list(paths),
        allow_outside=allow_outside,
        provenance=replace(provenance, unused=table.unused()),
    )
    return tidy(dataset, modalities, missing)


def _open_table(
    path: Path, columns: Mapping[str, str], kinds: Mapping[str, str], group_column: str | None
) -> Columns:
    roles = dict(columns)
    if "group" in {*roles, *kinds}:
        raise FusionZooError(
            f"{path}: a group is no modality: --data.group_column names its column"
        )
    if group_column is not None:
        roles["group"] = group_column
    return Columns(path, read_table(path), roles)


def _modalities(table: Columns, kinds: Mapping[str, str], labels: Sequence[str]) -> dict[str, str]:
    """Return modality -> kind: those that the user names, then those of usual names."""
    for role in table.roles:
        table.require(role, f"--data.{'group_column' if role == 'group' else f'columns.{role}'}")
    for name in kinds:
        table.require(name, f"--data.kinds.{name}")
    taken = {table.place(name) for name in [*(x for x in ROLES if x in table.roles), *labels]}
    names = [name for name in table.roles if name not in ROLES]
    for name in (*kinds, *KINDS):
        if name in table and name not in names:
            if name in KINDS and table.place(name) in {table.place(x) for x in names}:
                continue  # the column of a usual name that the user calls otherwise
            names.append(name)
    order = [*table.roles, *KINDS, *kinds]
    names = [name for name in sorted(names, key=order.index) if table.place(name) not in taken]
    if not names:
        table.require("image", "a modality (image, text, audio, vector, sequence)")
    for name in names:
        if kinds.get(name, name) not in KINDS:
            raise FusionZooError(
                f"{table.path}: what does column {name!r} hold?"
                f" --data.kinds.{name} image (or {', '.join(KINDS[1:])})"
            )
    return {name: kinds.get(name, name) for name in names}


def _labels(table: Columns, targets: Mapping[str, str]) -> list[str]:
    """Return the columns of labels besides `target`."""
    for name in targets:
        if name in table.roles and name not in ROLES:
            raise FusionZooError(
                f"{table.path}: {name!r} is a modality by --data.columns, and a target"
            )
        table.require(name, f"--targets.{name}")
        if name in ("id", "split"):
            raise FusionZooError(f"{table.path}: {name!r} cannot be a target")
    return [name for name in targets if name != "target"]


def _read_columns(
    table: Columns, shares: Sequence[float], names: Mapping[str, str], label_names: Sequence[str]
) -> tuple[pa.Table, Provenance]:
    """Return the table of a data set, and the rules behind its splits and groups."""
    taken = {table.place(name) for name in [*names, *label_names]}
    columns, provenance = _read_roles(table, shares, taken)
    columns |= {name: table.text(name) for name in label_names}
    columns |= {name: _references(table.values(name)) for name in names}
    return pa.table(columns), provenance


def _read_roles(
    table: Columns, shares: Sequence[float], taken: set[int]
) -> tuple[dict[str, Any], Provenance]:
    """Return the columns id, split, target and group, and the rules behind splits and groups.

    A column `group` that nobody named is used unless it is `taken` for something else.
    """
    rows = len(table.table)
    numbered = pa.array([str(row) for row in range(rows)])
    made = {"id": table.text("id") if "id" in table else numbered}
    if "target" in table:
        taken = taken | {table.place("target")}
        made["target"] = table.text("target")
    else:
        made["target"] = pa.nulls(rows, pa.string())
    split_rule = "by a hash of " + (repr(table.name("id")) if "id" in table else "the row")
    group_rule = ""
    keys = made["id"]
    if "group" in table and ("group" in table.roles or table.place("group") not in taken):
        groups = table.text("group")
        alone = f", {groups.null_count:,} empty cells stand alone" if groups.null_count else ""
        group_rule = f"column {table.name('group')!r}{alone}"
        made["group"] = keys = pc.coalesce(groups, made["id"], pa.scalar(""))
    if "split" in table:
        made["split"], split_rule = _given_splits(table, made["id"])
    elif "group" in made:
        splits, moved = split_groups(keys.to_pylist(), shares)
        made["split"] = pa.array([splits[key] for key in keys.to_pylist()])
        places = "".join(f"; {key!r} moved to {splits[key]}, else empty" for key in moved)
        split_rule = f"by a hash of {table.name('group')!r}{places}"
    else:
        made["split"] = pa.array([split_by_hash(key, shares) for key in keys.to_pylist()])
    return made, Provenance(split_rule=split_rule, group_rule=group_rule)


def _given_splits(table: Columns, ids: Any) -> tuple[Any, str]:
    splits, name = table.text("split"), table.name("split")
    if splits.null_count:
        row = splits.is_null().to_pylist().index(True)
        raise FusionZooError(
            f"{table.path}, row {row + 1}, sample {ids[row].as_py()!r}: {name} is empty; say train,"
            " val or test, or leave the whole column out for a split by hash"
        )
    return splits, f"column {name!r}"


def _references(column: Any) -> Any:
    """Keep text and lists; empty text is a missing value."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if not any(is_type(column.type) for is_type in TEXT_TYPES):
        return column
    return pa.array([value or None for value in column.to_pylist()], pa.string())
