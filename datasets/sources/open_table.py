"""Turn a table with one row per sample into a data set: roles, modalities, splits and groups."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fusionzoo.errors import FusionZooError, explained, list_names, located
from fusionzoo.ground.cells import fold
from fusionzoo.structures import KINDS

from ..base import DEFAULTS, SharedSettings
from ..paired import PairedDataset
from ..tables.arrow import ArrowColumn, flat, is_list, is_text
from ..tables.paths import is_collecting, labels_of_join, refuse, tell_apart
from ..tables.provenance import MANY_OF, LoadedTable, Provenance
from ..tables.splits import (
    SPLITS,
    class_columns,
    make_splits,
    renamed_splits,
    splits_by_time,
    usual_splits,
)
from ..tables.table import ROLES, word_list
from .array_columns import ArrayColumns, gather_arrays
from .cell_kinds import NONE, order_of, read_moments
from .columns import (
    Columns,
    apply_declared,
    cell_columns,
    gather_columns,
    read_declared,
    read_label_objects,
    read_list_cells,
    role_columns,
)
from .infer import is_plain
from .media_columns import (
    check_cell_paths,
    expand_patterns,
    read_segments,
    split_roles,
    take_out,
    with_slashes,
    without_empty,
)
from .table_settings import Roles, TableSettings

WHOLE, TRUTH = r"^(0|-?[1-9][0-9]{0,17})$", r"^([Tt]rue|[Ff]alse|TRUE|FALSE)$"
TIME = "time_column"  # role of the column by whose times splits are made
WEIGHT = "weight_column"  # role of the column that says how much each row counts


def gather(
    loaded: LoadedTable, columns: Roles, kinds: Mapping[str, str], settings: TableSettings
) -> ArrayColumns:
    """Return a table in which every modality has one column."""
    for name in {*ROLES} & {*kinds, *(settings.arrays or {})} | {"group"} & {*columns}:
        advice = "--data.group_column" if name == "group" else f"--data.columns.NAME {name}"
        raise FusionZooError(f"{loaded.source}: {name} is no modality: {advice} names its column")
    table, roles, missing = gather_columns(loaded, columns, kinds, settings)
    single = {"group": settings.group_column, TIME: settings.time_column}
    single[WEIGHT] = settings.weight_column
    roles |= {role: name for role, name in single.items() if name is not None}
    gathered = gather_arrays(replace(loaded, table=table), roles, kinds, settings)
    return gathered._replace(missing=missing)


def find_modalities(
    table: Columns, kinds: Mapping[str, str], labels: Sequence[str]
) -> dict[str, str]:
    """Return the kind of each modality: those that the user names, then those of known names."""
    for role in table.roles:
        setting = {"group": "group_column", TIME: TIME, WEIGHT: WEIGHT}.get(role, f"columns.{role}")
        table.require(role, f"--data.{setting}")
    for name in kinds:
        table.require(name, f"--data.kinds.{name}")
    if WEIGHT in table.roles:
        _refuse_as_weight(table, [*ROLES, *({*table.roles, *kinds} - {WEIGHT, TIME}), *labels])
    roles = [x for x in (*ROLES, WEIGHT) if x in table.roles]
    taken = {table.position(name) for name in [*roles, *labels]}
    names = [name for name in table.roles if name not in (*ROLES, TIME, WEIGHT)]
    for name in (*kinds, *KINDS):
        if name in table and name not in names:
            if name in KINDS and table.position(name) in {table.position(x) for x in names}:
                continue  # the user gave this column another name
            names.append(name)
    order = [*table.roles, *KINDS, *kinds]
    names = [name for name in sorted(names, key=order.index) if table.position(name) not in taken]
    if not names and not any(label in table for label in labels_of_join() or ()):
        raise FusionZooError(_no_modality(table, taken))
    return {name: kinds.get(name, name) for name in names}


def _no_modality(table: Columns, taken: Collection[int]) -> str:
    """Return the message for a table of which no column is known to be a modality."""
    known = table.table.column_names
    free = [name for position, name in enumerate(known) if position not in taken]
    if len(known) == 1 and not known[0].isidentifier():
        advice = "it has one column: --data.delimiter ';' names the character between cells"
    elif free:
        advice = (
            f"--data.columns.text {shlex.quote(free[0])} names one, or --target COLUMN reads all"
            " others as what they hold"
        )
    else:
        advice = "add one"
    return (
        f"{table.source} has no column of a modality ({', '.join(KINDS)}); {advice}."
        f" Its columns: {list_names(known)}"
    )


def read_ids(table: Columns, *, may_repeat: bool) -> tuple[ArrowColumn, dict[str, str] | None]:
    """Return the ids; without a column of them the rows' numbers from 0.

    If they `may_repeat`, the ids returned all differ; return also the table's own of those changed.
    """
    if "id" in table:
        ids = table.text("id", words_missing=False)
    else:
        ids = pa.array(table.row_ids).cast(pa.string())
    if not may_repeat:
        return ids, None
    in_table = ids.to_pylist()
    different = tell_apart(in_table, table.row_numbers)
    changed = {x: y for x, y in zip(different, in_table, strict=True) if x != y}
    return pa.array(different, pa.string()), changed


def read_groups(table: Columns, taken: set[int]) -> tuple[ArrowColumn | None, str]:
    """Return the groups and their rule, or None; a column `group` that is `taken` is none."""
    if "target" in table:
        taken = taken | {table.position("target")}
    if "group" not in table or ("group" not in table.roles and table.position("group") in taken):
        return None, ""
    groups = table.text("group")
    alone = f", {groups.null_count:,} empty cells stand alone" if groups.null_count else ""
    return groups, f"column {table.name('group')!r}{alone}"


def note_of_missing(table: Columns, names: Collection[str] | None = None) -> str:
    """Say which words were read as missing values: `'NA' 3 in text`; by default in all columns."""
    used = {name: words for name, words in table.missing.items() if words}
    parts = [
        ", ".join(f"{word!r} {count:,}" for word, count in words.most_common()) + f" in {name}"
        for name, words in used.items()
        if names is None or name in names
    ]
    return "; ".join(parts)


def other_columns(table: Columns, taken: Container[str]) -> dict[str, ArrowColumn]:
    """Return text and numbers of unused columns as text, but for names that are `taken`."""
    columns = {}
    used = set(table.used)
    for name in table.unused():
        if not name.strip() or name.strip() in taken or name.strip() in ROLES:
            continue
        kind = table.table.schema.field(name).type
        is_kept = is_text(kind.value_type) if is_list(kind) else is_plain(kind)
        if is_kept and not pa.types.is_null(kind):
            columns[name.strip()] = table.text(name)
    table.used = used
    return columns


def read_splits(
    table: Columns, columns: Mapping[str, ArrowColumn], modalities: Collection[str]
) -> tuple[ArrowColumn, str, tuple[float, ...] | None]:
    """Return the splits of the column `split`, unless it is one of `modalities` or left out;
    without one, made by a column of times, or by a hash of the group or id. Return also the rule
    behind them, and the shares of those made by a hash.

    `columns` has the ids, groups and labels. Splits by hash have every class in each split where
    that is possible, see `make_splits`.
    """
    inputs = {table.position(name) for name in modalities}
    is_left_out = table.settings.cell_kinds.get("split") == NONE
    has_splits = "split" in table and table.position("split") not in inputs and not is_left_out
    if has_splits and TIME in table.roles:
        raise FusionZooError(f"{table.source} has splits: leave out --data.time_column")
    if has_splits:
        return *_read_column(table, columns["id"]), None
    key = "group" if "group" in columns else "id"
    if TIME in table.roles:
        return *_by_time(table, columns[key]), None
    labels = class_columns(columns, table.settings.label_kinds)
    by_hash = make_splits(columns[key], labels, table.settings.shares, unique=key == "id")
    name = repr(table.name(key)) if key in table else "the row"
    rule = f"by a hash of {name}{by_hash.rule}"
    return by_hash.splits, rule, tuple(table.settings.shares)


def _by_time(table: Columns, keys: ArrowColumn) -> tuple[ArrowColumn, str]:
    """Return splits by the column of times, and the rule with the first time of each."""
    name, cells = table.name(TIME), table.text(TIME)
    encoded = flat(cells).dictionary_encode()
    kind = table.settings.cell_kinds.get(fold(name), "")
    moments = read_moments(encoded.dictionary.to_pylist(), order_of(kind.partition(" ")[2]))
    times = np.array([*(np.nan if x is None else x for x in moments), np.nan])
    times = times[pc.fill_null(encoded.indices, len(moments)).to_numpy()]
    for row in np.flatnonzero(np.isnan(times)).tolist():
        cell = cells[row].as_py()
        problem = "is empty" if cell is None else f"is {cell!r}, no date, time or number"
        raise FusionZooError(f"{table.where(row)}: {name!r} {problem} (--data.time_column)")
    shares = table.settings.shares
    splits = splits_by_time(times, keys, shares)
    starts = []
    for split, share in zip(SPLITS, shares, strict=True):
        rows = pc.indices_nonzero(pc.equal(splits, split)).to_numpy()
        if share and not len(rows):
            raise FusionZooError(f"{table.source}: by {name!r}, no row is left for {split}")
        if share:
            starts.append(f"{split} from {cells[int(rows[times[rows].argmin()])].as_py()}")
    return splits, f"by time in {name!r}: {', '.join(starts)}"


def _read_column(table: Columns, ids: ArrowColumn) -> tuple[ArrowColumn, str]:
    """Return the column of splits, which must be complete, and the rule behind it."""
    splits, name = table.text("split"), table.name("split")
    for row in splits.is_null().to_numpy(zero_copy_only=False).nonzero()[0].tolist():
        advice = "write train, val or test, or remove the whole column for a split by hash"
        with located(f"{table.where(row)}, sample {ids[row].as_py()!r}"):
            refuse(f"{name} is empty; {advice}", "split", row=row, column=name)
    splits, renamed = usual_splits(splits)
    return splits, f"column {name!r}{renamed_splits(renamed)}"


def open_table(
    loaded: LoadedTable, settings: TableSettings, shared: SharedSettings = DEFAULTS
) -> PairedDataset:
    """Return the data set of a table."""
    index = read_declared(loaded.table, loaded.source).index
    columns, segments = split_roles(settings)
    table, kinds, roles, inferred = apply_declared(loaded, columns, settings)
    as_cells = cell_columns(table, roles, kinds, settings)
    labels = role_columns(table, roles, kinds, settings)
    loaded = _with_labels_of_objects(replace(loaded, table=table), labels)
    table, embedded = take_out(loaded.table, loaded.root, as_cells)
    gathered = gather(replace(loaded, table=table), roles, kinds, settings)
    provenance = replace(
        loaded.provenance, inferred=inferred, split_rule=loaded.split_rule, notes=gathered.notes
    )
    known = Columns(replace(loaded, table=gathered.table), gathered.roles, settings)
    known.missing.update(gathered.missing)
    id_column = known.name("id").strip() if "id" in known else "id"
    provenance = replace(provenance, id_column="id" if id_column == index else id_column)
    unusable = f"{loaded.source}: a column is of a type that cannot be used"
    with explained(unusable, pa.ArrowException, UnicodeDecodeError):
        rows, modalities, provenance = _read_columns(known, gathered.kinds, provenance, segments)
    values = {**embedded, **loaded.memory}  # of which the rows have numbers
    rows = rows.drop_columns([x for x in values if x in rows.column_names and x not in modalities])
    memory = {x: values[y] for x in modalities if (y := known.name(x)) in values}
    outside = {name: kind for name, kind in modalities.items() if name not in memory}
    must_exist = shared.on_error == "raise"
    expanded = expand_patterns(
        replace(loaded, table=rows, provenance=provenance), outside, settings, must_match=must_exist
    )
    order = [*(() if columns else loaded.order), *modalities]  # that of the source goes first
    dataset = PairedDataset(
        expanded.table,
        {name: modalities[name] for name in sorted(modalities, key=order.index)},
        memory={**memory, **gathered.memory},
        root=loaded.root,
        source=loaded.source,
        on_error=shared.on_error,
        max_errors=shared.max_errors,
        targets=settings.targets,
        positive=settings.positive,
        paths=word_list(settings.paths),
        allow_outside=settings.allow_outside,
        provenance=expanded.provenance,
        sample_rate=settings.sample_rate,
        frames=settings.frames,
        weight_column=known.name(WEIGHT).strip() if WEIGHT in known.roles else None,
    )
    check_cell_paths(dataset, must_exist=must_exist)
    return dataset


def _with_labels_of_objects(loaded: LoadedTable, names: Collection[str]) -> LoadedTable:
    """Move the lists of labels that are objects in memory, arrays and tuples, into the table."""
    table, memory = loaded.table, dict(loaded.memory)
    for name in [name for name in memory if name in names]:
        cells = read_label_objects(loaded.source, name, memory.pop(name))
        table = table.set_column(table.column_names.index(name), name, cells)
    return replace(loaded, table=table, memory=memory)


def _label_columns(table: Columns) -> list[str]:
    """Return the columns of labels besides `target`."""
    targets = table.settings.targets or {}
    for name in targets:
        if name in table.roles and name not in ROLES:
            raise FusionZooError(f"{table.source}: {name!r} is a modality and a target")
        table.require(name, f"--targets.{name}")
        if name in ("id", "split"):
            raise FusionZooError(f"{table.source}: {name!r} cannot be a target")
    return [name for name in targets if name != "target"]


def _read_columns(
    table: Columns, kinds: Mapping[str, str], provenance: Provenance, segments: Mapping[str, str]
) -> tuple[pa.Table, dict[str, str], Provenance]:
    """Return the table of the data set, its modalities with their kinds, and its provenance."""
    targets = table.settings.targets
    label_kinds = {**(labels_of_join() or {}), **table.settings.label_kinds}
    labels = _label_columns(table)
    names = find_modalities(table, kinds, labels)
    num_rows = len(table.table)
    values, notes = _read_values(table, names)
    ids, repeated = read_ids(table, may_repeat=provenance.repeated_ids is not None)
    columns = {"id": ids, "target": pa.nulls(len(table.table), pa.string())}
    if "target" in table:
        columns["target"] = table.labels("target", label_kinds.get("target", ""))
    columns |= {name: table.labels(name, label_kinds.get(name, "")) for name in labels}
    groups, group_rule = read_groups(table, {table.position(x) for x in [*names, *labels]})
    if groups is not None:
        columns["group"] = pc.coalesce(groups, columns["id"])
    splits, split_rule, shares = read_splits(table, columns, names)
    taken = {table.position(name) for name in ("id", "target", *names, *labels) if name in table}
    edges, segment_notes = read_segments(table, names, values, segments, taken)
    columns |= {"split": splits, **edges, **values}
    columns |= _read_weights(table, columns)
    in_join = labels_of_join()
    read = targets if in_join is None else in_join
    if read is not None and "target" not in read and "target" in table:
        table.used.discard(table.position("target"))
    joined_labels = {table.name(name) for name in in_join or () if name in table}
    provenance = replace(
        provenance,
        reading=(*provenance.reading, *table.settings.notes, *notes, *table.notes, *segment_notes),
        missing=note_of_missing(table),
        missing_labels={
            name: words
            for name in ("target", *labels)
            if name in table and (words := note_of_missing(table, [table.name(name)]))
        },
        types={
            name: kind
            for name in ("id", "target", *labels)
            if name in table and (kind := _type_of(table, name, columns[name]))
        },
        numbered="id" not in table,
        repeated_ids=repeated,
        empty_rows=num_rows - len(table.table),
        split_rule=provenance.split_rule or split_rule,
        split_shares=shares,
        group_rule=group_rule,
        unused=tuple(name for name in table.unused() if name not in joined_labels),
        row_numbers=table.row_numbers,
    )
    return pa.table({**other_columns(table, columns), **columns}), names, provenance


def _type_of(table: Columns, role: str, cells: ArrowColumn) -> str:
    """Return what ids or labels were before they became the text `cells`; nothing of text. Whole
    numbers and truth values of a text file are those that pandas would read."""
    kind = table.table.column(table.position(role)).type
    is_many = is_list(kind)
    while is_list(kind) or pa.types.is_dictionary(kind):
        kind = kind.value_type
    names = {"bool": pa.types.is_boolean, "int": pa.types.is_integer, "float": pa.types.is_floating}
    name = next((name for name, is_type in names.items() if is_type(kind)), "")
    if not name and table.from_text:
        distinct = cells.unique().drop_null()
        for written, of_text in ((WHOLE, "int"), (TRUTH, "bool")):
            if len(distinct) and pc.all(pc.match_substring_regex(distinct, written)).as_py():
                name = of_text
    return f"{MANY_OF}{name}" if is_many else name


def _read_weights(table: Columns, columns: Collection[str]) -> dict[str, ArrowColumn]:
    """Return the column of weights as text with decimal points, under its own name, which is that
    of no other column."""
    if WEIGHT not in table.roles:
        return {}
    name = table.name(WEIGHT).strip()
    if name in columns:
        raise FusionZooError(f"{table.source}: {name!r} is a modality, too: rename the column")
    return {name: table.numbers(WEIGHT)}


def _refuse_as_weight(table: Columns, roles: Collection[str]) -> None:
    """Raise an error if the column of weights has one of these roles."""
    place = table.position(WEIGHT)
    for role in roles:
        if role in table and table.position(role) == place:
            problem = f"{table.source}: column {table.name(role)!r} is the {role}"
            raise FusionZooError(f"{problem}, and the weight (--data.weight_column): choose one")


def _read_values(
    table: Columns, kinds: Mapping[str, str]
) -> tuple[dict[str, ArrowColumn], list[str]]:
    """Return the columns of the modalities, and notes of how they were read."""
    values = without_empty({name: table.references(name) for name in kinds}, kinds)
    values = _drop_empty(table, values)
    paths = word_list(table.settings.paths)
    path_columns = [name for name, kind in kinds.items() if kind != "text" or name in paths]
    values, notes = with_slashes(values, path_columns)
    values, list_notes = read_list_cells(table, values, kinds)
    return values, [*notes, *list_notes]


def _drop_empty(table: Columns, values: Mapping[str, ArrowColumn]) -> dict[str, ArrowColumn]:
    """Drop the rows without any modality, or raise an error if the user does not allow that."""
    has_any = np.zeros(len(table.table), dtype=bool)
    if not len(has_any):
        raise FusionZooError(f"{table.source} has no rows")
    for column in values.values():
        has_any |= np.asarray(column.is_valid())
    refused_later = is_collecting() or labels_of_join() is not None
    if has_any.all() or (refused_later and not table.settings.drop_empty):
        return dict(values)
    if not table.settings.drop_empty:
        row, num_empty = int(np.argmin(has_any)), int((~has_any).sum())
        key = table.text("id", words_missing=False)[row].as_py() if "id" in table else None
        sample = "" if key is None else f", sample {key!r}"
        where = f"{table.where(row)}{sample}: every modality is empty, as in {num_empty:,} rows"
        raise FusionZooError(f"{where}: --data.drop_empty true leaves them out")
    if not has_any.any():
        raise FusionZooError(f"{table.source}: every modality is empty in all rows")
    table.keep(has_any)
    return {name: column.filter(pa.array(has_any)) for name, column in values.items()}
