"""Turn a table with one row per sample into a data set: roles, modalities, splits and groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fusionzoo.errors import FusionZooError, one_line
from fusionzoo.structures import KINDS

from ..failures import MAX_ERRORS, OnError
from ..paired import PairedDataset
from ..provenance import Provenance
from ..refusals import is_collecting
from ..splits import SHARES
from ..table import ROLES, word_list
from .cell_columns import Roles, tabular_columns
from .cells import CellRules
from .columns import Columns
from .declared import apply_declared
from .embedded import check_cell_paths, take_out
from .gather import gather
from .loaded import Loaded
from .others import other_columns
from .roles import missing_words, read_groups, read_ids, read_labels
from .split_columns import read_splits


def open_table(
    table: pa.Table,
    *,
    source: str,
    root: Path | None,
    columns: Roles | None = None,
    kinds: Mapping[str, str] | None = None,
    shares: Sequence[float] = SHARES,
    on_error: OnError = "raise",
    max_errors: float = MAX_ERRORS,
    targets: Mapping[str, str] | None = None,
    paths: str | Sequence[str] = (),
    allow_outside: bool = False,
    group_column: str | None = None,
    categorical: str | Sequence[str] = (),
    arrays: Mapping[str, str | Sequence[str]] | None = None,
    sample_rate: int | None = None,
    cells: CellRules | None = None,
    loaded: Loaded | None = None,
) -> PairedDataset:
    """Return the data set of a table; for the settings see `manifest`.

    `source` names the table in messages; paths are relative to `root`. `loaded` has the values of
    columns whose cells are row numbers, and what is known of the others.
    """
    table, declared_kinds, roles, inferred = apply_declared(
        table, source, kinds or {}, columns or {}, targets or {}, loaded
    )
    table, embedded = take_out(table, root, tabular_columns(table, roles, declared_kinds))
    gathered = gather(
        table,
        source,
        root,
        columns=roles,
        kinds=declared_kinds,
        arrays=arrays or {},
        labels=targets or {},
        categorical=categorical,
        allow_outside=allow_outside,
        sample_rate=sample_rate,
        group_column=group_column,
    )
    provenance = replace(loaded.provenance if loaded else Provenance(), inferred=inferred)
    known = Columns(
        source, gathered.table, gathered.roles, cells=cells, row_numbers=provenance.row_numbers
    )
    try:
        rows, names, provenance = _read_columns(
            known, gathered.kinds, shares, targets, word_list(paths), provenance
        )
    except (pa.ArrowException, UnicodeDecodeError) as error:  # a date for an id, bytes for a label
        raise FusionZooError(
            f"{source}: a column is of a type that cannot be used: {one_line(error)}"
        ) from error
    if loaded and loaded.split_rule:
        provenance = replace(provenance, split_rule=loaded.split_rule)
    values: dict[str, Any] = {**embedded, **(loaded.memory if loaded else {})}
    rows = rows.drop_columns([x for x in values if x in rows.column_names and x not in names])
    memory = {name: values[known.name(name)] for name in names if known.name(name) in values}
    dataset = PairedDataset(
        rows,
        _in_stored_order(names, loaded, columns),
        memory={**memory, **gathered.memory},
        root=root,
        source=source,
        on_error=on_error,
        max_errors=max_errors,
        targets=targets,
        paths=word_list(paths),
        allow_outside=allow_outside,
        provenance=replace(provenance, notes=gathered.notes),
    )
    dataset.sample_rate = sample_rate
    check_cell_paths(dataset, must_exist=on_error == "raise")
    return dataset


def _in_stored_order(
    names: Mapping[str, str], loaded: Loaded | None, columns: Roles | None
) -> dict[str, str]:
    """Return the modalities in the order that the source stores, unless the user names columns."""
    order = [*(loaded.order if loaded and not columns else ()), *names]
    return {name: names[name] for name in sorted(names, key=order.index)}


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
        table.require("image", f"a modality ({', '.join(KINDS)})")
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
    paths: Sequence[str],
    provenance: Provenance,
) -> tuple[pa.Table, dict[str, str], Provenance]:
    """Return the table of the data set, its modalities with their kinds, and its provenance."""
    labels = _label_columns(table, targets or {})
    names = _modalities(table, kinds, labels)
    num_rows = len(table.table)
    values = _drop_empty(table, {name: table.references(name) for name in names})
    values, notes = _with_slashes(
        values, [name for name, kind in names.items() if kind != "text" or name in paths]
    )
    columns = {"id": read_ids(table), "target": pa.nulls(len(table.table), pa.string())}
    kinds_of_labels = {"target": "classification"} if targets is None else targets
    if "target" in table:
        columns["target"] = read_labels(table, "target", kinds_of_labels)
    columns |= {name: read_labels(table, name, kinds_of_labels) for name in labels}
    groups, group_rule = read_groups(table, {table.position(x) for x in [*names, *labels]})
    if groups is not None:
        columns["group"] = pc.coalesce(groups, columns["id"])
    splits = read_splits(table, columns, kinds_of_labels, shares)
    columns |= {"split": splits.column, **values}
    if targets is not None and "target" not in targets and "target" in table:
        table.used.discard(table.position("target"))
    provenance = replace(
        provenance,
        reading=(*provenance.reading, *table.cells.notes, *notes),
        missing=missing_words(table),
        empty_rows=num_rows - len(table.table),
        split_rule=splits.rule,
        split_shares=splits.shares,
        group_rule=group_rule,
        unused=table.unused(),
        row_numbers=table.row_numbers,
    )
    return pa.table({**other_columns(table, columns), **columns}), names, provenance


def _drop_empty(table: Columns, values: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the rows without any modality, or raise an error if the user does not allow that."""
    has_any = np.zeros(len(table.table), dtype=bool)
    if not len(has_any):
        raise FusionZooError(f"{table.source} has no rows")
    for column in values.values():
        has_any |= np.asarray(column.is_valid())
    if has_any.all() or (is_collecting() and not table.cells.drop_empty):
        return dict(values)
    if not table.cells.drop_empty:
        row, num_empty = int(np.argmin(has_any)), int((~has_any).sum())
        key = table.text("id", words_missing=False)[row].as_py() if "id" in table else None
        sample = "" if key is None else f", sample {key!r}"
        raise FusionZooError(
            f"{table.where(row)}{sample}: every modality is empty, as in {num_empty:,} of"
            f" {len(has_any):,} rows: --data.drop_empty true leaves them out"
        )
    if not has_any.any():
        raise FusionZooError(f"{table.source}: every modality is empty in all rows")
    table.keep(has_any)
    return {name: column.filter(pa.array(has_any)) for name, column in values.items()}


def _with_slashes(
    values: Mapping[str, Any], path_columns: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """Return the modalities with slashes in paths for backslashes, and notes of this."""
    columns, notes = dict(values), []
    for name in path_columns:
        if not pa.types.is_string(columns[name].type):
            continue
        if pc.any(pc.match_substring(columns[name], "\\")).as_py():
            columns[name] = pc.replace_substring(columns[name], "\\", "/")
            notes.append(f"backslashes in {name} as slashes")
    return columns, notes
