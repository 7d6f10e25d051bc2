"""Complete the settings of one's own table: what its columns hold, and what the targets are."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from fusionzoo.errors import FusionZooError, check_known, list_names, one_line
from fusionzoo.ground.cells import fold
from fusionzoo.structures import KINDS

from ..media.arrays import DIMENSIONS, find_item
from ..sources.array_files import is_view_folder
from ..sources.cell_kinds import CATEGORY, DATE, NONE, NUMBER, TIMED, convert_cells, is_cell_kind
from ..sources.columns import read_declared
from ..sources.infer import (
    ARRAY,
    CONSTANT,
    EMPTY,
    GROUP,
    ID,
    OTHER,
    ColumnFinding,
    find_arrays,
    find_column,
    is_group_name,
    is_plain,
    may_group,
    named_columns,
    read_cells_of,
    target_kind,
    tells_alone,
)
from ..sources.table_files import is_workbook, reader_of
from ..sources.table_settings import TableSettings
from ..tables.arrow import ArrowColumn, is_list
from ..tables.provenance import LoadedTable
from ..tables.table import EDGES, MANY, ROLES, name_modality, word_list
from .load import load_table
from .naming import TABLE, resolve_name
from .spec import DataSpec

MODALITY_KINDS = ("image", "text", "audio", "vector", "sequence")  # of whole columns
TARGET_WORDS = {  # kind of a target -> what the column holds
    **{"classification": "classes", "regression": "numbers", "multilabel": "lists of labels"},
    **{"ordinal": "levels in order"},
}
NAMED = (*KINDS, "id", "split", "group")  # names of columns that say what they hold
SINGLE = ("group_column", "weight_column")  # settings that name one column, which is no input
HOW = {  # finding -> how it is shown
    **{EMPTY: "left out: empty", CONSTANT: "left out: constant", ID: "left out: id"},
    **{OTHER: "left out", NONE: "left out: --data.kinds", GROUP: "group"},
}


def load_table_of(settings: Mapping[str, Any]) -> LoadedTable:
    """Read the table that settings of a manifest name."""
    return load_table(TableSettings.of(settings))


def complete(
    settings: Mapping[str, Any],
    target: str | Sequence[str] = (),
    *,
    known: Collection[str] = (),
    infer_kinds: bool = True,
    to_train: bool = False,
    splits: Sequence[str] = (),
) -> DataSpec:
    """Return explicit settings of a data set with these targets; see `DataSpec`.

    With a target every column of a table is used, unless `columns` names the modalities. `known`
    are targets whose kind the user names. `to_train` refuses targets of which nothing can be
    learnt. `splits` are columns of splits, which are no inputs.
    """
    chosen = resolve_name(settings)
    if not target:
        path = Path(chosen["root"]).expanduser() if isinstance(chosen.get("root"), str) else None
        is_file = path is not None and (path.is_file() or is_view_folder(path))
        is_open = infer_kinds and not known and not {"join", "targets"} & chosen.keys()
        if to_train and is_file and is_open and chosen["name"] == TABLE:
            return _with_own_target(chosen)
        return DataSpec(settings=chosen)
    if chosen["name"] != TABLE:
        raise FusionZooError(f"--target {target}: {chosen['name']!r} has its own target")
    loaded = _load_with(chosen, target)
    names = _targets(target, loaded)
    columns = dict(chosen.get("columns") or {})
    if splits:
        of_splits = dict.fromkeys(_columns_of("--splits", splits, loaded), NONE)
        chosen["kinds"] = {**(chosen.get("kinds") or {}), **of_splits}
    num_missing = {name: _num_missing(chosen, loaded, name) for name in names}
    is_whole = not (infer_kinds and num_missing[names[0]])
    if len(names) == 1 and not known and is_whole:
        columns["target"] = names[0]  # of others labels may be missing
    elif not infer_kinds:
        raise FusionZooError(f"--objective needs one target: --targets.{names[0]} regression")
    chosen["columns"] = columns
    spec = DataSpec(settings=chosen, loaded=loaded)
    inferred = [name for name in names if name not in known]
    spec = _with_target_kinds(spec, inferred) if infer_kinds else spec
    for name in names if to_train else ():
        _check_labels(name, spec)
    notes = [
        _note_of_missing(chosen, loaded, name, count)
        for name, count in num_missing.items()
        if count
    ]
    spec = replace(spec, notes=(*spec.notes, *notes))
    if any(role not in ROLES for role in columns) or chosen.get("arrays"):
        return spec
    return _with_columns(spec, names)


def _with_own_target(settings: dict[str, Any]) -> DataSpec:
    """Return the settings of a file that must have a column `target`, as none is named."""
    loaded = load_table_of(settings)
    named = {fold(name) for name in (*loaded.table.column_names, *(settings.get("columns") or {}))}
    declared = read_declared(loaded.table, loaded.source).target
    if declared and "target" not in named:
        return complete(settings, declared, to_train=True)
    if "target" not in named:
        raise FusionZooError(
            f"{loaded.source} has no column 'target': --target names the column to predict, of"
            f" {list_names(loaded.table.column_names)}"
        )
    return DataSpec(settings=settings, loaded=loaded)


def _load_with(settings: dict[str, Any], target: str | Sequence[str]) -> LoadedTable:
    """Read the table; of a workbook the sheet that has the targets, which is set if it is not the
    first."""
    if not has_open_sheet(settings):
        return load_table_of(settings)

    def sheets() -> Iterator[str]:
        yield ""  # the first; the others are listed only if it does not fit
        names = sheet_names(settings)
        yield from names if len(names) > 1 else ()

    refusals = []
    for name in sheets():
        try:
            loaded = load_table_of({**settings, "sheet": name})
            _targets(target, loaded)
        except FusionZooError as error:
            refusals.append(error)
            continue
        if name:
            settings["sheet"] = name
        return loaded
    if len(refusals) == 1:
        raise refusals[0]
    names = ", ".join(sheet_names(settings))
    problem = f"no sheet of {names} has the columns of --target: {refusals[0]}"
    raise FusionZooError(f"{settings['root']}: {problem}")


def has_open_sheet(settings: Mapping[str, Any]) -> bool:
    """Whether the file is a workbook of which no sheet is named."""
    root = settings.get("root")
    return isinstance(root, str) and is_workbook(Path(root)) and not settings.get("sheet")


def sheet_names(settings: Mapping[str, Any]) -> list[str]:
    """Return the names of the sheets of the workbook that is `root`."""
    path = Path(str(settings["root"])).expanduser()
    return reader_of(path).sheets(path)


def _targets(target: str | Sequence[str], loaded: LoadedTable) -> list[str]:
    """Return the targets' columns as the table spells them."""
    spelled = {fold(name): name for name in loaded.table.column_names}
    whole = isinstance(target, str) and fold(target) in spelled
    words = [str(target)] if whole else word_list(target)
    return _columns_of("--target", words, loaded)


def _columns_of(flag: str, words: Sequence[str], loaded: LoadedTable) -> list[str]:
    """Return columns as the table spells them; an error names the flag."""
    spelled = {fold(name): name for name in loaded.table.column_names}
    for word in words:
        if fold(word) not in spelled:
            problem = f"{loaded.source} has no column {word!r} for {flag}"
            check_known(word, loaded.table.column_names, problem)
    return [spelled[fold(word)] for word in words]


def _with_target_kinds(spec: DataSpec, names: Sequence[str]) -> DataSpec:
    """Add what the targets are, with the flag that changes it."""
    chosen, table = dict(spec.settings), spec.table
    kinds: dict[str, str] = {}
    notes = []
    for name in names:
        read_as = target_kind(name, table[name], missing_words(chosen, spec.loaded))
        kinds[name] = read_as.kind
        if read_as.kind == "multilabel" and read_as.separator != ";":
            chosen.setdefault("label_separator", read_as.separator)
        if read_as.comma:
            chosen.setdefault("decimal", ",")
        if read_as.cells:
            chosen["kinds"] = {name: read_as.cells, **(chosen.get("kinds") or {})}
        if read_as.missing:
            chosen["na"] = [*missing_words(chosen, spec.loaded), *read_as.missing]
        others = [x for x in TARGET_WORDS if x != read_as.kind]
        what = TARGET_WORDS[read_as.kind] + read_as.cells.removeprefix(NUMBER)
        if read_as.kind == "multilabel" and not is_list(table[name].type):
            what += f" divided by {read_as.separator!r}"
        flag = f"--targets.{name} {', '.join(others[:-1])} or {others[-1]}"
        notes.append(f"target {name!r} holds {what} ({flag} changes that)")
    return replace(spec, settings=chosen, target_kinds=kinds, notes=(*spec.notes, *notes))


def _num_missing(settings: Mapping[str, Any], loaded: LoadedTable, name: str) -> int:
    """Return how many rows have no label in a column; an empty list is one."""
    column = loaded.table[name]
    if not is_plain(column.type) or not len(column):
        return int(column.null_count)
    cells = read_cells_of(column, missing_words(settings, loaded))
    return cells.num_rows - cells.num_cells if cells.num_cells else 0


def _note_of_missing(
    settings: Mapping[str, Any], loaded: LoadedTable, name: str, count: int
) -> str:
    """Say how many rows have no label; a warning where a word that may be a class is read so."""
    column, missing = loaded.table[name], missing_words(settings, loaded)
    words = (
        [x for x in read_cells_of(column, ()).counts if x in missing]
        if is_plain(column.type)
        else []
    )
    note = f"{count:,} of {len(column):,} rows have no {name!r}"
    if words:
        read = ", ".join(map(repr, words))
        note = f"warning: {note}, as {read} is read as missing (--data.na '' makes it a class)"
    return f"{note}: they are not trained on"


def _check_labels(name: str, spec: DataSpec) -> None:
    """Raise an error for a target that is empty, or has one value, or hardly two rows a class."""
    column = spec.table[name]
    if not len(column):
        raise FusionZooError(f"{spec.source} has no rows")
    flat = pc.list_flatten(column) if is_list(column.type) else column
    counts = read_cells_of(flat, missing_words(spec.settings, spec.loaded)).counts
    if len(counts) < 2:
        problem = "has a single value" if counts else "is empty in all rows"
        raise FusionZooError(f"{spec.source}: the target {name!r} {problem}")
    num_rows = counts.total()
    is_class = spec.target_kinds.get(name) == "classification"
    if is_class and num_rows >= MANY and len(counts) > num_rows / 2:
        problem = f"{spec.source}: the target {name!r} has {len(counts):,} different values"
        advice = f"too many for classes: --targets.{name} regression"
        raise FusionZooError(f"{problem} in {num_rows:,} rows, {advice}")


def missing_words(settings: Mapping[str, Any], loaded: LoadedTable | None) -> list[str]:
    """Return the words in cells that stand for missing values."""
    has_nulls = loaded is None or loaded.has_nulls
    return TableSettings(na=settings.get("na")).missing_words(has_nulls)


def _with_columns(spec: DataSpec, targets: Sequence[str]) -> DataSpec:
    """Add the settings that read every column as what it holds."""
    chosen, table = _joined(spec.settings, spec.table), spec.table
    taken = _taken(chosen, spec.loaded, targets)
    kinds = {fold(name): str(kind) for name, kind in (chosen.get("kinds") or {}).items()}
    known = {*map(fold, table.column_names), *map(fold, chosen["columns"])}
    for name in kinds if "join" not in chosen else ():
        if name not in known:
            problem = f"{spec.source} has no column {name!r} for --data.kinds"
            check_known(name, table.column_names, problem)
    free = [name for name in table.column_names if fold(name) and fold(name) not in taken]
    assert spec.loaded is not None
    objects = spec.loaded.memory
    findings = [
        find_arrays(name, objects[name])
        if name in objects
        else find_column(name, table[name], missing_words(chosen, spec.loaded))
        for name in free
        if fold(name) not in kinds or is_cell_kind(kinds[fold(name)])
    ]
    findings = [
        _with_dimensions(finding, spec) if finding.kind == ARRAY else finding
        for finding in findings
    ]
    findings = [_as_told(finding, kinds, table) for finding in findings]
    findings, group = _with_group(findings, chosen, spec)
    chosen = _explicit(chosen, findings, group, spec)
    if len(free) == len(findings) and not {*map(fold, table.column_names)} & {*KINDS}:
        _check_inputs(chosen, findings, spec)
    warnings = list(_warnings(findings, table, spec.target_kinds))
    by_name = {finding.name: finding for finding in findings}
    rows = [
        (name, "target", f"{TARGET_WORDS.get(kind, kind)}, {_count(table[name])}")
        for name, kind in spec.target_kinds.items()
    ]
    for name in table.column_names:
        if name in by_name:
            rows.append(_row(by_name[name]))
        elif fold(name) in NAMED and fold(name) in taken and name not in targets:
            rows.append(_row_by_name(name, table[name]))
    return replace(spec, settings=chosen, rows=tuple(rows), notes=(*spec.notes, *warnings))


def _check_inputs(
    settings: Mapping[str, Any], findings: Sequence[ColumnFinding], spec: DataSpec
) -> None:
    """Raise an error that says why each column is left out, if none is an input."""
    assert spec.loaded is not None
    inputs = {role for role in settings["columns"] if role not in ROLES}
    inputs |= {name for name, kind in settings["kinds"].items() if not is_cell_kind(str(kind))}
    if inputs or spec.loaded.kinds or "join" in settings or not findings:
        return
    reasons = "; ".join(f"{x.name} ({_row(x)[1]}: {x.about})" for x in findings[:MANY])
    flag = f"--data.kinds.{shlex.quote(findings[0].name)}"
    raise FusionZooError(
        f"{spec.source} has no column to learn from: {reasons}; {flag} says what one holds instead"
    )


def _taken(
    settings: Mapping[str, Any], loaded: LoadedTable | None, targets: Sequence[str]
) -> set[str]:
    """Return the columns, folded, whose use is known by their names or by the user."""
    assert loaded is not None
    declared = read_declared(loaded.table, loaded.source)
    names = {*ROLES, "group", *KINDS, *EDGES, *declared.kinds, declared.index}
    names |= {*loaded.kinds, *targets}
    for word in (*(settings.get(x) for x in SINGLE), settings.get("on", "id")):
        names |= {word} if isinstance(word, str) else set()
    names |= {f"{kind}_{edge}" for kind in ("image", "audio") for edge in EDGES}
    cell_kinds = {
        fold(name) for name, kind in (settings.get("kinds") or {}).items() if is_cell_kind(kind)
    }
    names -= {"split"} & cell_kinds
    return {fold(name) for name in names} | (named_columns(settings) - cell_kinds)


def _with_dimensions(finding: ColumnFinding, spec: DataSpec) -> ColumnFinding:
    """Return whether a column of arrays holds vectors or sequences, by the first of them."""
    cell = next(x for x in spec.table[finding.name].to_pylist() if x and x.strip())
    top = Path((spec.loaded and spec.loaded.root) or "").resolve()
    item = find_item(cell.strip(), top)
    assert item is not None
    problem = "its folder is another one"
    if item.path.resolve().is_relative_to(top) or spec.settings.get("allow_outside"):
        try:
            num_dimensions = len(item.shape)
            kind = next((x for x, n in DIMENSIONS.items() if n == num_dimensions), OTHER)
            if kind != OTHER:
                return replace(finding, kind=kind)
            problem = f"it has {num_dimensions} dimensions"
        except FusionZooError as error:
            problem = one_line(error)
    return ColumnFinding(finding.name, OTHER, f"arrays such as {cell!r}: {problem}")


def _as_told(finding: ColumnFinding, kinds: Mapping[str, str], table: pa.Table) -> ColumnFinding:
    """Return the finding with the kind that the user names; a date with the order of its parts."""
    kind = kinds.get(fold(finding.name))
    if kind is None or kind == finding.kind:
        return finding
    if kind == DATE:
        if finding.kind.startswith(DATE):
            return finding
        kind = f"{DATE} excel"
    if kind.startswith(DATE):
        if finding.kind.endswith(TIMED) and not kind.endswith(TIMED):
            kind = f"{kind} {TIMED}"
        convert_cells(finding.name, kind, table[finding.name].cast(pa.string()))  # or an error
    if kind == NUMBER and finding.kind.startswith(NUMBER):
        return finding
    return replace(finding, kind=kind, warning="")


def _with_group(
    findings: Sequence[ColumnFinding], settings: Mapping[str, Any], spec: DataSpec
) -> tuple[list[ColumnFinding], str | None]:
    """Mark the column of groups, if one is named as such and its values recur."""
    named, table = settings.get("group_column"), spec.table
    has_group = any(fold(name) == "group" for name in table.column_names)
    if named is not None or has_group:
        return list(findings), named
    for position, finding in enumerate(findings):
        is_code = finding.kind.partition(" ")[0] in (NUMBER, CATEGORY, ID)
        if not is_code or not is_group_name(finding.name):
            continue
        cells = read_cells_of(table[finding.name], missing_words(settings, spec.loaded))
        if may_group(cells):
            about = f"{len(cells.counts):,} groups, each in one split (--group none: an input)"
            marked = [*findings]
            marked[position] = ColumnFinding(finding.name, GROUP, about)
            return marked, finding.name
    return list(findings), None


def _explicit(
    settings: Mapping[str, Any],
    findings: Sequence[ColumnFinding],
    group: str | None,
    spec: DataSpec,
) -> dict[str, Any]:
    """Return settings that say what each column is."""
    table = spec.table
    columns, kinds = dict(settings["columns"]), dict(settings.get("kinds") or {})
    tabular = [x for x in findings if x.kind.partition(" ")[0] in (NUMBER, DATE, CATEGORY)]
    if tabular:
        columns["tabular"] = [x.name for x in tabular]
        kinds |= {x.name: x.kind for x in tabular if x.is_explicit}
    known = {fold(name) for name in (*table.column_names, *kinds)}
    for kind in MODALITY_KINDS:
        of_kind = [x.name for x in findings if x.kind == kind]
        alone = len(of_kind) == 1 and kind not in known and kind not in kinds.values()
        for name in of_kind:
            modality = kind if alone else name_modality(name)
            while modality in columns:
                modality += "_"
            columns[modality] = name
            if modality != kind:
                kinds[modality] = kind
    ids = [x.name for x in findings if x.kind == ID and table[x.name].null_count == 0]
    ids = [name for name in ids if len(table[name].unique()) == len(table)]
    if ids and "id" not in columns and not any(fold(x) == "id" for x in table.column_names):
        columns["id"] = ids[0]
    declared = read_declared(table, spec.source)
    if declared.target:  # of views: a DataFrame of the same columns declares nothing
        kinds = {**declared.kinds, **kinds}
    chosen = {**settings, "columns": columns, "kinds": kinds}
    if group is not None:
        chosen["group_column"] = group
    if any(x.comma for x in tabular):
        chosen.setdefault("decimal", ",")
    missing = sorted({word for x in tabular for word in x.missing})
    if missing:
        chosen["na"] = [*missing_words(settings, spec.loaded), *missing]
    return chosen


def _warnings(
    findings: Sequence[ColumnFinding], table: pa.Table, kinds: Mapping[str, str]
) -> list[str]:
    """Return what to look at before training: leaks, and categories that are very many."""
    notes = [f"column {x.name!r} has {x.warning}" for x in findings if x.warning]
    for finding in findings:
        if finding.kind.partition(" ")[0] not in (NUMBER, CATEGORY):
            continue
        for target, kind in kinds.items():
            if tells_alone(table[finding.name], finding.kind, table[target], kind):
                notes.append(
                    f"column {finding.name!r} alone predicts {target!r}: if it is known only after"
                    f" the target, leave it out by --data.kinds.{finding.name} {NONE}"
                )
    return notes


def _count(column: ArrowColumn) -> str:
    """Return how many different labels a column holds, and how many are missing."""
    flat = pc.list_flatten(column) if is_list(column.type) else column
    missing = f", {column.null_count:,} missing" if column.null_count else ""
    return f"{len(flat.drop_null().unique()):,} different{missing}"


def _row(finding: ColumnFinding) -> tuple[str, str, str]:
    return finding.name, HOW.get(finding.kind, finding.kind), finding.about


def _row_by_name(name: str, column: ArrowColumn) -> tuple[str, str, str]:
    """Return the row of a column whose name alone says what it is."""
    gaps = f", {column.null_count:,} missing" if column.null_count else ""
    first = column.drop_null().slice(0, 1).to_pylist()
    is_short = first and isinstance(first[0], str | int | float)
    example = f", such as {first[0]!r:.40}" if is_short else ""
    return name, fold(name), f"by its name{example}{gaps}"


def _joined(settings: Mapping[str, Any], table: pa.Table) -> dict[str, Any]:
    """Complete the sources of a join, and find the column by which they belong together."""
    chosen = dict(settings)
    sources = chosen.get("join")
    if not isinstance(sources, Mapping):
        return chosen
    completed: dict[str, Any] = {}
    tables = {}
    for name, source in sources.items():
        settings_of_source = source if isinstance(source, Mapping) else {"root": source}
        if not isinstance(settings_of_source.get("root"), str):
            completed[name] = source
            continue
        loaded = load_table_of(settings_of_source)
        tables[name] = loaded
        completed[name] = dict(settings_of_source)
    if tables and "on" not in chosen:
        common = _common_column(table, [x.table for x in tables.values()])
        if common is not None:
            chosen["on"] = common
    for name, loaded in tables.items():
        completed[name] = _source(completed[name], loaded, chosen.get("on", "id"))
    chosen["join"] = completed
    return chosen


def _common_column(table: pa.Table, others: Sequence[pa.Table]) -> str | None:
    """Return the only column that all tables have, unless it is `id`; of several the first."""
    shared = {fold(name) for name in table.column_names}
    for other in others:
        shared &= {fold(name) for name in other.column_names}
    if not shared or "id" in shared:
        return None
    return next(name for name in table.column_names if fold(name) in shared)


def _source(settings: dict[str, Any], loaded: LoadedTable, on: Any) -> dict[str, Any]:
    """Return explicit settings of a joined source that names no modality."""
    columns = dict(settings.get("columns") or {})
    names = {fold(name) for name in loaded.table.column_names}
    if any(role not in ROLES for role in columns) or settings.get("arrays") or names & {*KINDS}:
        return settings
    spec = DataSpec(settings={**settings, "columns": columns, "on": on}, loaded=loaded)
    completed = dict(_with_columns(spec, ()).settings)
    del completed["on"]
    return completed


def target_columns(settings: Mapping[str, Any], target: str | Sequence[str]) -> dict[str, Any]:
    """Return settings whose target is this column, for a table of other names."""
    words = word_list(target) if target else []
    if len(words) != 1:
        return dict(settings)
    return {**settings, "columns": {**(settings.get("columns") or {}), "target": words[0]}}
