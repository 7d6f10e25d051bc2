"""Turn a table with one row per sample into a data set: roles, modalities, splits and groups."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fusionzoo.errors import FusionZooError, one_line

from ..failures import MAX_ERRORS, OnError
from ..paired import PairedDataset
from ..provenance import Provenance
from ..refusals import is_collecting, labels_of_join
from ..splits import SHARES
from ..table import ROLES, word_list
from .cell_columns import Roles, cell_columns
from .cells import CellRules
from .columns import Columns
from .declared import apply_declared
from .embedded import check_cell_paths, take_out
from .gather import gather
from .list_cells import read_list_cells
from .loaded import Loaded
from .modalities import find_modalities
from .others import other_columns
from .roles import missing_words, read_groups, read_ids, read_labels
from .segments import read_segments, split_roles
from .several import expand_patterns, with_slashes, without_empty
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
    frames: int | None = None,
) -> PairedDataset:
    """Return the data set of a table; for the settings see `manifest`.

    `source` names the table in messages; paths are relative to `root`. `loaded` has the values of
    columns whose cells are row numbers, and what is known of the others.
    """
    columns, segments = split_roles(columns or {}, kinds or {})
    table, declared_kinds, roles, inferred = apply_declared(
        table, source, kinds or {}, columns, targets or {}, loaded
    )
    as_cells = cell_columns(table, roles, declared_kinds, group_column, targets or {})
    table, embedded = take_out(table, root, as_cells)
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
        cells=cells,
    )
    origin = loaded or Loaded(table=table, source=source)
    provenance = replace(origin.provenance, inferred=inferred, split_rule=origin.split_rule)
    known = Columns(source, gathered.table, gathered.roles, cells, provenance.row_numbers)
    known.missing.update(gathered.missing)
    with _errors_of_types(source):
        rows, names, provenance = _read_columns(
            known, gathered.kinds, shares, targets, word_list(paths), provenance, segments
        )
    rows, memory = _without_numbers(rows, known, names, {**embedded, **origin.memory})
    outside = {name: kind for name, kind in names.items() if name not in memory}
    rows, provenance = expand_patterns(
        rows, outside, provenance, source=source, root=root, frames=frames, on_error=on_error
    )
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
    dataset.sample_rate, dataset.frames = sample_rate, frames
    check_cell_paths(dataset, must_exist=on_error == "raise")
    return dataset


@contextmanager
def _errors_of_types(source: str) -> Iterator[None]:
    """Name the source in errors of Arrow: a date for an id, bytes for a label."""
    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise FusionZooError(
            f"{source}: a column is of a type that cannot be used: {one_line(error)}"
        ) from error


def _without_numbers(
    rows: pa.Table, table: Columns, names: Collection[str], values: Mapping[str, Any]
) -> tuple[pa.Table, dict[str, Any]]:
    """Drop row numbers of values that no modality has; return the others by modality, too."""
    rows = rows.drop_columns([x for x in values if x in rows.column_names and x not in names])
    return rows, {x: values[table.name(x)] for x in names if table.name(x) in values}


def _in_stored_order(
    names: Mapping[str, str], loaded: Loaded | None, columns: Roles | None
) -> dict[str, str]:
    """Return the modalities in the order that the source stores, unless the user names columns."""
    order = [*(loaded.order if loaded and not columns else ()), *names]
    return {name: names[name] for name in sorted(names, key=order.index)}


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
    segments: Mapping[str, str],
) -> tuple[pa.Table, dict[str, str], Provenance]:
    """Return the table of the data set, its modalities with their kinds, and its provenance."""
    labels = _label_columns(table, targets or {})
    names = find_modalities(table, kinds, labels)
    num_rows = len(table.table)
    values, notes = _read_values(table, names, paths)
    columns = {"id": read_ids(table), "target": pa.nulls(len(table.table), pa.string())}
    kinds_of_labels = {"target": "classification"} if targets is None else targets
    if "target" in table:
        columns["target"] = read_labels(table, "target", kinds_of_labels)
    columns |= {name: read_labels(table, name, kinds_of_labels) for name in labels}
    groups, group_rule = read_groups(table, {table.position(x) for x in [*names, *labels]})
    if groups is not None:
        columns["group"] = pc.coalesce(groups, columns["id"])
    splits = read_splits(table, columns, kinds_of_labels, shares)
    taken = {table.position(name) for name in ("id", "target", *names, *labels) if name in table}
    edges, segment_notes = read_segments(table, names, values, segments, taken)
    columns |= {"split": splits.column, **edges, **values}
    in_join = labels_of_join()
    read = targets if in_join is None else in_join
    if read is not None and "target" not in read and "target" in table:
        table.used.discard(table.position("target"))
    joined_labels = {table.name(name) for name in in_join or () if name in table}
    provenance = replace(
        provenance,
        reading=(*provenance.reading, *table.cells.notes, *notes, *segment_notes),
        missing=missing_words(table),
        numbered="id" not in table,
        empty_rows=num_rows - len(table.table),
        split_rule=provenance.split_rule or splits.rule,
        split_shares=splits.shares,
        group_rule=group_rule,
        unused=tuple(name for name in table.unused() if name not in joined_labels),
        row_numbers=table.row_numbers,
    )
    return pa.table({**other_columns(table, columns), **columns}), names, provenance


def _read_values(
    table: Columns, kinds: Mapping[str, str], paths: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """Return the columns of the modalities, and notes of how they were read."""
    values = without_empty({name: table.references(name) for name in kinds}, kinds)
    values = _drop_empty(table, values)
    path_columns = [name for name, kind in kinds.items() if kind != "text" or name in paths]
    values, notes = with_slashes(values, path_columns)
    values, list_notes = read_list_cells(table, values, kinds)
    return values, [*notes, *list_notes]


def _drop_empty(table: Columns, values: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the rows without any modality, or raise an error if the user does not allow that."""
    has_any = np.zeros(len(table.table), dtype=bool)
    if not len(has_any):
        raise FusionZooError(f"{table.source} has no rows")
    for column in values.values():
        has_any |= np.asarray(column.is_valid())
    refused_later = is_collecting() or labels_of_join() is not None
    if has_any.all() or (refused_later and not table.cells.drop_empty):
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
