"""Complete the settings of one's own table: what its columns hold, and what the targets are.

`--target y` is enough: every other column is read as what it holds. The result is explicit
settings, which a run's config.yaml and a model folder store.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fusionzoo.cells import fold
from fusionzoo.console import print_table
from fusionzoo.errors import FusionZooError, did_you_mean, one_line
from fusionzoo.structures import KINDS

from ..media.arrays import DIMENSIONS
from ..sources.cell_kinds import (
    CATEGORY,
    DATE,
    NONE,
    NUMBER,
    convert_cells,
    date_reader,
    is_cell_kind,
    number_and_unit,
)
from ..sources.columns import read_declared
from ..sources.infer import (
    ARRAY,
    CONSTANT,
    EMPTY,
    GROUP,
    ID,
    OTHER,
    ColumnFinding,
    find_column,
    is_group_name,
    is_plain,
    may_group,
    named_columns,
    other_decimal_sign,
    read_cells_of,
    target_kind,
    tells_alone,
)
from ..sources.table_files import is_workbook, sheet_names
from ..sources.table_settings import TableSettings
from ..tables.arrow import ArrowColumn, is_list, list_names
from ..tables.provenance import Loaded
from ..tables.table import EDGES, MANY, ROLES, name_modality, word_list
from .load import load_table
from .naming import is_name, settings_of

TABLE = "manifest"
COLUMNS = "Columns (--data.kinds.<column> changes what one is read as)"
HEADER = ("column", "read as", "holds")
MODALITY_KINDS = ("image", "text", "audio", "vector", "sequence")  # of whole columns
TARGET_WORDS = {  # kind of a target -> what the column holds
    **{"classification": "classes", "regression": "numbers", "multilabel": "lists of labels"},
    **{"ordinal": "levels in order"},
}
NAMED = (*KINDS, "id", "split", "group")  # names of columns that say what they hold
HOW = {  # finding -> how it is shown
    **{EMPTY: "left out: empty", CONSTANT: "left out: constant", ID: "left out: id"},
    **{OTHER: "left out", NONE: "left out: --data.kinds", GROUP: "group"},
}
SHARED_BY_FILES = (  # what describes columns rather than a file, and so holds for another one
    *("columns", "kinds", "group_column", "decimal", "na", "label_separator", "categorical"),
    *("paths", "join", "on", "how", "frames", "sample_rate", "fields"),
)
AS_TRAINED = "columns as the model was trained"  # how the note of what is read begins
UNITS = (  # with which names of columns end
    "kg g mg µg ug ng t lb lbs oz st km m cm mm µm um nm mi ft in inch s sec ms min h hr d days wk"
    " mo y yr years l dl cl ml µl mmol µmol umol mol nmol pa hpa kpa mpa bar mbar mmhg psi c f k"
    " celsius fahrenheit kelvin j kj cal kcal w kw kwh hz khz mhz bpm eur usd gbp chf percent"
    " % ° °c °f € $ £"
)
DATE_WORDS = {
    **{"iso": "year, month, day", "dmy": "day, month, year", "mdy": "month, day, year"},
    "excel": "days of a spreadsheet",
}


@dataclass(frozen=True, kw_only=True)
class Completed:
    """Explicit settings of a data set, and what was found out for them."""

    settings: dict[str, Any]
    loaded: Loaded | None = None  # the table, which is read once
    target_kinds: dict[str, str] = field(default_factory=dict)  # target -> kind, where inferred
    rows: tuple[tuple[str, str, str], ...] = ()  # column, read as, what it holds
    notes: tuple[str, ...] = ()

    @property
    def has_one_target(self) -> bool:
        """Whether the only target is the column in the role `target`, with a label in each row."""
        return len(self.target_kinds) == 1 and "target" in self.settings["columns"]

    @property
    def to_open(self) -> dict[str, Any]:
        """The settings with the table that was read in place of its path."""
        return self.settings if self.loaded is None else {**self.settings, "root": self.loaded}

    def with_repeated_ids(self) -> Completed:
        """Return the same, of a table that was read, whose rows may share an id; joins need ids."""
        if self.loaded is None or self.settings.get("join"):
            return self
        provenance = replace(self.loaded.provenance, repeated_ids={})
        return replace(self, loaded=replace(self.loaded, provenance=provenance))

    def show(self) -> None:
        """Print the table of columns and the notes."""
        if self.rows:
            print_table(COLUMNS, HEADER, self.rows)
        for note in self.notes:
            print(note)


def _load(settings: Mapping[str, Any]) -> Loaded:
    """Read the table that settings of a manifest name."""
    return load_table(TableSettings.of(settings))


def resolve_name(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings whose name is that of a data set, where it may be a path: `my.csv`."""
    chosen = dict(settings)
    if "group" in chosen:
        chosen["group_column"] = chosen.pop("group")
    if chosen.get("group_column") == NONE:
        chosen["group_column"] = "id"
    name = chosen.pop("name", None)
    root = chosen.get("root")
    if name is None and root is None:
        raise FusionZooError("settings of a data set need its name: {'name': 'digits'}")
    is_open = not isinstance(root, str | None)
    if isinstance(name, str) and (name == TABLE or is_open or is_name(name)):
        return {"name": name, **chosen}
    return {**settings_of(root if name is None else name), **chosen}


def complete(
    settings: Mapping[str, Any],
    target: str | Sequence[str] = (),
    *,
    known: Collection[str] = (),
    infer_kinds: bool = True,
    to_train: bool = False,
) -> Completed:
    """Return explicit settings of a data set with these targets; see `Completed`.

    With a target every column of a table is used, unless `columns` names the modalities. `known`
    are targets whose kind the user names. `to_train` refuses targets of which nothing can be
    learnt.
    """
    chosen = resolve_name(settings)
    if not target:
        is_file = isinstance(chosen.get("root"), str) and Path(chosen["root"]).is_file()
        is_open = infer_kinds and not known and not {"join", "targets"} & chosen.keys()
        if to_train and is_file and is_open:
            return _with_own_target(chosen)
        return Completed(settings=chosen)
    if chosen["name"] != TABLE:
        raise FusionZooError(
            f"--target {target}: the data set {chosen['name']!r} has its own target; --target is"
            " for a table of one's own"
        )
    loaded = _load_with(chosen, target)
    names = _targets(target, loaded)
    columns = dict(chosen.get("columns") or {})
    num_missing = {name: _num_missing(chosen, loaded, name) for name in names}
    is_whole = not (infer_kinds and num_missing[names[0]])
    if len(names) == 1 and not known and is_whole:
        columns["target"] = names[0]  # of others labels may be missing
    elif not infer_kinds:
        raise FusionZooError(
            f"--objective is about one target: give each of {', '.join(names)} its own,"
            f" --targets.{names[0]} regression"
        )
    chosen["columns"] = columns
    done = Completed(settings=chosen, loaded=loaded)
    inferred = [name for name in names if name not in known]
    done = _with_target_kinds(done, inferred) if infer_kinds else done
    for name in names if to_train else ():
        _check_labels(name, done)
    notes = [
        f"{count:,} of {len(loaded.table):,} rows have no {name!r}: they are not trained on"
        for name, count in num_missing.items()
        if count
    ]
    done = replace(done, notes=(*done.notes, *notes))
    if any(role not in ROLES for role in columns) or chosen.get("arrays"):
        return done
    return _with_columns(done, names)


def _with_own_target(settings: dict[str, Any]) -> Completed:
    """Return the settings of a file that must have a column `target`, as none is named."""
    loaded = _load(settings)
    named = {fold(name) for name in (*loaded.table.column_names, *(settings.get("columns") or {}))}
    if "target" not in named:
        raise FusionZooError(
            f"{loaded.source} has no column 'target': --target names the column to predict, of"
            f" {list_names(loaded.table.column_names)}"
        )
    return Completed(settings=settings, loaded=loaded)


def _load_with(settings: dict[str, Any], target: str | Sequence[str]) -> Loaded:
    """Read the table; of a workbook the sheet that has the targets, which is set if it is not the
    first."""
    root = settings.get("root")
    if not _has_open_sheet(settings):
        return _load(settings)
    refused = _refusal(settings, target)
    if not isinstance(refused, FusionZooError):
        return refused
    names = sheet_names(Path(str(root)).expanduser())
    for name in names if len(names) > 1 else ():
        loaded = _refusal({**settings, "sheet": name}, target)
        if isinstance(loaded, Loaded):
            settings["sheet"] = name
            return loaded
    if len(names) < 2:
        raise refused
    raise FusionZooError(
        f"{root}: no sheet of {', '.join(names)} has the columns of --target {target}"
        f" (--data.sheet names one): {refused}"
    )


def _has_open_sheet(settings: Mapping[str, Any]) -> bool:
    """Whether the file is a workbook of which no sheet is named."""
    root = settings.get("root")
    return isinstance(root, str) and is_workbook(Path(root)) and not settings.get("sheet")


def _load_for_model(settings: dict[str, Any], stored: Mapping[str, Any]) -> Loaded:
    """Read the table; of a workbook the sheet with most of the columns that a model was trained on,
    which is set: of equal ones that of the training data, else the first."""
    if not _has_open_sheet(settings):
        return _load(settings)
    wanted = named_columns(stored) - {"target"}
    names = sheet_names(Path(str(settings["root"])).expanduser())
    best, most = None, (-1, False)
    for name in names if len(names) > 1 else ():
        with suppress(FusionZooError):  # an empty one
            loaded = _load({**settings, "sheet": name})
            columns = {*map(fold, loaded.table.column_names)}
            rank = len(wanted & columns), name == stored.get("sheet")
            if rank > most:
                best, most, settings["sheet"] = loaded, rank, name
    return _load(settings) if best is None else best


def _refusal(settings: Mapping[str, Any], target: str | Sequence[str]) -> Loaded | FusionZooError:
    """Return the table if it has the targets, else the error that says so."""
    try:
        loaded = _load(settings)
        _targets(target, loaded)
    except FusionZooError as error:
        return error
    return loaded


def _targets(target: str | Sequence[str], loaded: Loaded) -> list[str]:
    """Return the targets' columns as the table spells them."""
    spelled = {fold(name): name for name in loaded.table.column_names}
    whole = isinstance(target, str) and fold(target) in spelled
    words = [str(target)] if whole else word_list(target)
    for word in words:
        if fold(word) not in spelled:
            raise FusionZooError(
                f"{loaded.source} has no column {word!r} for --target."
                f"{did_you_mean(word, spelled.values())}"
                f" Its columns: {list_names(loaded.table.column_names)}"
            )
    return [spelled[fold(word)] for word in words]


def _with_target_kinds(done: Completed, names: Sequence[str]) -> Completed:
    """Add what the targets are, with the flag that changes it."""
    chosen, table = dict(done.settings), _table(done)
    kinds: dict[str, str] = {}
    notes = []
    for name in names:
        read_as = target_kind(name, table[name], _missing(chosen, done.loaded))
        kinds[name] = read_as.kind
        if read_as.kind == "multilabel" and read_as.separator != ";":
            chosen.setdefault("label_separator", read_as.separator)
        if read_as.comma:
            chosen.setdefault("decimal", ",")
        if read_as.cells:
            chosen["kinds"] = {name: read_as.cells, **(chosen.get("kinds") or {})}
        if read_as.missing:
            chosen["na"] = [*_missing(chosen, done.loaded), *read_as.missing]
        others = [x for x in TARGET_WORDS if x != read_as.kind]
        what = TARGET_WORDS[read_as.kind] + read_as.cells.removeprefix(NUMBER)
        if read_as.kind == "multilabel" and not is_list(table[name].type):
            what += f" divided by {read_as.separator!r}"
        flag = f"--targets.{name} {', '.join(others[:-1])} or {others[-1]}"
        notes.append(f"target {name!r} holds {what} ({flag} changes that)")
    return replace(done, settings=chosen, target_kinds=kinds, notes=(*done.notes, *notes))


def _num_missing(settings: Mapping[str, Any], loaded: Loaded, name: str) -> int:
    """Return how many rows have no label in a column; an empty list is one."""
    column = loaded.table[name]
    if not is_plain(column.type) or not len(column):
        return int(column.null_count)
    cells = read_cells_of(column, _missing(settings, loaded))
    return cells.num_rows - cells.num_cells if cells.num_cells else 0


def _check_labels(name: str, done: Completed) -> None:
    """Raise an error for a target that is empty, or has one value, or hardly two rows a class."""
    column = _table(done)[name]
    if not len(column):
        raise FusionZooError(f"{_source_of(done)} has no rows")
    flat = pc.list_flatten(column) if is_list(column.type) else column
    counts = read_cells_of(flat, _missing(done.settings, done.loaded)).counts
    if not counts:
        raise FusionZooError(f"{_source_of(done)}: the target {name!r} is empty in all rows")
    if len(counts) == 1:
        raise FusionZooError(
            f"{_source_of(done)}: the target {name!r} is {next(iter(counts))!r} in all rows that"
            " have one, so there is nothing to learn"
        )
    num_rows = counts.total()
    is_class = done.target_kinds.get(name) == "classification"
    if is_class and num_rows >= MANY and len(counts) > num_rows / 2:
        raise FusionZooError(
            f"{_source_of(done)}: the target {name!r} has {len(counts):,} different values in"
            f" {num_rows:,} rows, too many for classes: name another column, or say what it holds,"
            f" --targets.{name} regression"
        )


def _table(done: Completed) -> pa.Table:
    assert done.loaded is not None
    return done.loaded.table


def _missing(settings: Mapping[str, Any], loaded: Loaded | None) -> list[str]:
    """Return the words in cells that stand for missing values."""
    has_nulls = loaded is None or loaded.has_nulls
    return TableSettings(na=settings.get("na")).missing_words(has_nulls)


def _with_columns(done: Completed, targets: Sequence[str]) -> Completed:
    """Add the settings that read every column as what it holds."""
    chosen, table = _joined(done.settings, _table(done)), _table(done)
    taken = _taken(chosen, done.loaded, targets)
    kinds = {fold(name): str(kind) for name, kind in (chosen.get("kinds") or {}).items()}
    known = {*map(fold, table.column_names), *map(fold, chosen["columns"])}
    for name in kinds if "join" not in chosen else ():
        if name not in known:
            raise FusionZooError(
                f"{_source_of(done)} has no column {name!r} for --data.kinds."
                f"{did_you_mean(name, table.column_names)}"
                f" Its columns: {list_names(table.column_names)}"
            )
    free = [name for name in table.column_names if fold(name) and fold(name) not in taken]
    findings = [
        find_column(name, table[name], _missing(chosen, done.loaded))
        for name in free
        if fold(name) not in kinds or is_cell_kind(kinds[fold(name)])
    ]
    findings = [
        _with_dimensions(finding, done) if finding.kind == ARRAY else finding
        for finding in findings
    ]
    findings = [_as_told(finding, kinds, table) for finding in findings]
    findings, group = _with_group(findings, chosen, done)
    chosen = _explicit(chosen, findings, group, done)
    warnings = list(_warnings(findings, table, done.target_kinds))
    by_name = {finding.name: finding for finding in findings}
    rows = [*_target_rows(done)]
    for name in table.column_names:
        if name in by_name:
            rows.append(_row(by_name[name]))
        elif fold(name) in NAMED and fold(name) in taken and name not in targets:
            rows.append(_row_by_name(name, table[name]))
    return replace(done, settings=chosen, rows=tuple(rows), notes=(*done.notes, *warnings))


def _taken(settings: Mapping[str, Any], loaded: Loaded | None, targets: Sequence[str]) -> set[str]:
    """Return the columns, folded, whose use is known by their names or by the user."""
    assert loaded is not None
    declared = read_declared(loaded.table, loaded.source)
    names = {*ROLES, "group", *KINDS, *EDGES, *declared.kinds, declared.index}
    names |= {*loaded.kinds, *loaded.memory, *targets}
    for word in (settings.get("group_column"), settings.get("on", "id")):
        names |= {word} if isinstance(word, str) else set()
    names |= {f"{kind}_{edge}" for kind in ("image", "audio") for edge in EDGES}
    cell_kinds = {
        fold(name) for name, kind in (settings.get("kinds") or {}).items() if is_cell_kind(kind)
    }
    return {fold(name) for name in names} | (named_columns(settings) - cell_kinds)


def _with_dimensions(finding: ColumnFinding, done: Completed) -> ColumnFinding:
    """Return whether a column of .npy files holds vectors or sequences, by the first of them."""
    cell = next(x for x in _table(done)[finding.name].to_pylist() if x and x.strip())
    top = Path((done.loaded and done.loaded.root) or "").resolve()
    file = (top / cell.strip()).resolve()
    problem = "its folder is another one"
    if file.is_relative_to(top) or done.settings.get("allow_outside"):
        try:
            num_dimensions = np.load(file, mmap_mode="r", allow_pickle=False).ndim
            kind = next((x for x, n in DIMENSIONS.items() if n == num_dimensions), OTHER)
            if kind != OTHER:
                return replace(finding, kind=kind)
            problem = f"it has {num_dimensions} dimensions"
        except (OSError, ValueError) as error:
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
        convert_cells(finding.name, kind, table[finding.name].cast(pa.string()))  # or an error
    if kind == NUMBER and finding.kind.startswith(NUMBER):
        return finding
    return replace(finding, kind=kind, warning="")


def _with_group(
    findings: Sequence[ColumnFinding], settings: Mapping[str, Any], done: Completed
) -> tuple[list[ColumnFinding], str | None]:
    """Mark the column of groups, if one is named as such and its values recur."""
    named, table = settings.get("group_column"), _table(done)
    has_group = any(fold(name) == "group" for name in table.column_names)
    if named is not None or has_group:
        return list(findings), named
    for position, finding in enumerate(findings):
        is_code = finding.kind.partition(" ")[0] in (NUMBER, CATEGORY, ID)
        if not is_code or not is_group_name(finding.name):
            continue
        cells = read_cells_of(table[finding.name], _missing(settings, done.loaded))
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
    done: Completed,
) -> dict[str, Any]:
    """Return settings that say what each column is."""
    table = _table(done)
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
    ids = [x.name for x in findings if x.kind == ID and _is_complete(table[x.name])]
    if ids and "id" not in columns and not any(fold(x) == "id" for x in table.column_names):
        columns["id"] = ids[0]
    chosen = {**settings, "columns": columns, "kinds": kinds}
    if group is not None:
        chosen["group_column"] = group
    if any(x.comma for x in tabular):
        chosen.setdefault("decimal", ",")
    missing = sorted({word for x in tabular for word in x.missing})
    if missing:
        chosen["na"] = [*_missing(settings, done.loaded), *missing]
    return chosen


def _is_complete(column: ArrowColumn) -> bool:
    return column.null_count == 0 and len(column.unique()) == len(column)


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


def _target_rows(done: Completed) -> list[tuple[str, str, str]]:
    table = _table(done)
    return [
        (name, "target", f"{TARGET_WORDS.get(kind, kind)}, {_count(table[name])}")
        for name, kind in done.target_kinds.items()
    ]


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
    example = f", such as {first[0]!r:.40}" if first and _is_short(first[0]) else ""
    return name, fold(name), f"by its name{example}{gaps}"


def _is_short(cell: Any) -> bool:
    return isinstance(cell, str | int | float)


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
        loaded = _load(settings_of_source)
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


def _source(settings: dict[str, Any], loaded: Loaded, on: Any) -> dict[str, Any]:
    """Return explicit settings of a joined source that names no modality."""
    columns = dict(settings.get("columns") or {})
    names = {fold(name) for name in loaded.table.column_names}
    if any(role not in ROLES for role in columns) or settings.get("arrays") or names & {*KINDS}:
        return settings
    done = Completed(settings={**settings, "columns": columns, "on": on}, loaded=loaded)
    completed = dict(_with_columns(done, ()).settings)
    del completed["on"]
    return completed


def complete_for_model(settings: Mapping[str, Any], stored: Mapping[str, Any]) -> Completed:
    """Return settings that read a table as the model's training table, which `stored` describes.

    Which columns are read, unless the user names them, and which are absent is said once: these
    are added, empty.
    """
    chosen = resolve_name(settings)
    if chosen["name"] != TABLE or stored.get("name") != TABLE:
        return Completed(settings=chosen)
    remembered = {*(stored.get("columns") or {})} - {*(chosen.get("columns") or {})}
    described = {name: stored[name] for name in SHARED_BY_FILES if name in stored}
    for name in ("columns", "kinds"):
        described[name] = {**(described.get(name) or {}), **(chosen.get(name) or {})}
    if isinstance(chosen.get("join"), Mapping):
        chosen["join"] = _described_join(chosen["join"], stored.get("join"))
    chosen = {**described, **chosen, "columns": described["columns"], "kinds": described["kinds"]}
    loaded = _load_for_model(chosen, stored)
    done = Completed(settings=chosen, loaded=loaded)
    _check_cells(done)
    done = _without_absent(done)
    columns = {x: y for x, y in done.settings["columns"].items() if x in remembered}
    notes = [
        f"{role} of {list_names(word_list(words))}"
        for role, words in columns.items()
        if role not in ROLES and words != role
    ]
    if notes:
        note = f"{AS_TRAINED}: {'; '.join(notes)}"
        done = replace(done, notes=(note, *done.notes))
    return done


def _described_join(join: Mapping[str, Any], stored: Any) -> dict[str, Any]:
    """Return the sources that the user joins, each with what the model knows of its columns."""
    known = stored if isinstance(stored, Mapping) else {}
    described: dict[str, Any] = {}
    for name, source in join.items():
        of_model = known.get(name)
        is_file = isinstance(source, str) or (isinstance(source, Mapping) and "root" in source)
        if not is_file or not isinstance(of_model, Mapping):
            described[name] = source
            continue
        settings_of_file = source if isinstance(source, Mapping) else {"root": source}
        shared = {x: of_model[x] for x in SHARED_BY_FILES if x in of_model}
        described[name] = {**shared, **settings_of_file}
    return described


def _without_absent(done: Completed) -> Completed:
    """Leave out what the table has no column for; add the columns that a tabular modality lacks."""
    chosen, table = dict(done.settings), _table(done)
    names = {fold(name) for name in table.column_names}
    columns: dict[str, Any] = {}
    absent: list[str] = []
    renamed: list[str] = []  # hints at what columns of whole modalities may be called now
    named = named_columns(chosen)
    free = [name for name in table.column_names if fold(name) and fold(name) not in named]
    for role, words in chosen["columns"].items():
        is_list = not isinstance(words, str) or chosen["kinds"].get(role, role) == "tabular"
        wanted = word_list(words) if is_list and words not in table.column_names else [words]
        lost = [word for word in wanted if fold(word) not in names]
        if len(lost) < len(wanted):
            columns[role] = words
            absent += lost
        elif role not in ROLES and words != role and len(wanted) == 1:
            hint = near_column(wanted[0], free)
            flag = f"--data.columns.{role} names it"
            renamed += [f"no column {wanted[0]}{hint[:-1]}: {flag})"] if hint else []
    is_read = {fold(name) for name in [*columns, *table.column_names]}
    kinds = {
        x: kind for x, kind in chosen["kinds"].items() if is_cell_kind(kind) or fold(x) in is_read
    }
    group = chosen.get("group_column")
    if isinstance(group, str) and fold(group) not in names:
        del chosen["group_column"]
    for name in absent:
        table = table.append_column(name, pa.nulls(len(table), pa.string()))
    missing = ", ".join(f"{name}{near_column(name, free)}" for name in absent)
    notes = [f"no column {missing} in {_source_of(done)}: its cells are missing"]
    assert done.loaded is not None
    return Completed(
        settings={**chosen, "columns": columns, "kinds": kinds},
        loaded=replace(done.loaded, table=table),
        notes=(*renamed, *(notes if absent else ())),
    )


def near_column(name: str, names: Sequence[str]) -> str:
    """Return a hint at the column that `name` may be called now, or nothing.

    >>> near_column("Gewicht_kg", ["Gewicht", "Alter"]), near_column("Gewicht_kg", ["Gewicht (g)"])
    (" (is it 'Gewicht'?)", " (is it 'Gewicht (g)'? its unit is g instead of kg)")
    """
    stem, unit = _stem_and_unit(name)
    for other in names if unit else ():
        other_stem, other_unit = _stem_and_unit(other)
        if stem == other_stem and other_unit and other_unit != unit:
            return f" (is it {other!r}? its unit is {other_unit} instead of {unit})"
    spelled = {fold(other): other for other in names}
    spelled |= {x: other for other in names if (x := _stem_and_unit(other)[0]) == stem}
    near = get_close_matches(fold(name), [*spelled], n=1, cutoff=0.6)
    if stem in spelled:
        near = [stem]
    return f" (is it {spelled[near[0]]!r}?)" if near else ""


def _stem_and_unit(name: str) -> tuple[str, str]:
    """Divide a column's name into what comes before its unit, folded, and the unit, if any.

    >>> [_stem_and_unit(x) for x in ("Gewicht_kg", "Weight [g]", "Blood pressure")]
    [('gewicht', 'kg'), ('weight', 'g'), ('blood pressure', '')]
    """
    match = re.fullmatch(r"(.*[^\s_\-.(\[])[\s_\-.(\[]+([^\s_\-.(\[\])]+)[)\]]?", fold(name))
    if match is None or match[2] not in UNITS.split():
        return fold(name), ""
    return match[1], match[2]


def _check_cells(done: Completed) -> None:
    """Raise an error for numbers with another decimal sign or unit, or other dates, than the model
    was trained on."""
    spelled = {fold(name): name for name in _table(done).column_names}
    for name, kind in done.settings["kinds"].items():
        word, _, detail = str(kind).partition(" ")
        column = spelled.get(fold(name))
        if column is None or word not in (NUMBER, DATE) or (word == DATE and not detail):
            continue
        cells = _table(done)[column]
        if pa.types.is_dictionary(cells.type):
            cells = cells.cast(cells.type.value_type)
        if not (pa.types.is_string(cells.type) or pa.types.is_large_string(cells.type)):
            continue  # numbers are in the unit; dates are dates
        counts = read_cells_of(cells, _missing(done.settings, done.loaded)).counts
        problem = ""
        if word == NUMBER:
            numbers = [divided[0] for cell in counts if (divided := number_and_unit(cell))]
            problem = other_decimal_sign(numbers, done.settings.get("decimal") == ",")
        problem_of = _other_unit if word == NUMBER else _other_date
        for cell in counts if detail and not problem else ():
            if fault := problem_of(cell, detail):
                problem = f"{cell!r}, {fault}"
                break
        if problem:
            raise FusionZooError(f"{_source_of(done)}: column {column!r} holds {problem}")


def _other_unit(cell: str, unit: str) -> str:
    """Say how a cell differs from numbers of this unit; nothing if it does not."""
    divided = number_and_unit(cell)
    if divided is None:
        return f"which is no number; the model was trained on numbers in {unit}"
    if divided[1] in ("", unit):
        return ""
    return (
        f"in {divided[1]}; the model was trained on {unit}: convert the column, or write plain"
        f" numbers if these are in {unit}"
    )


def _other_date(cell: str, order: str) -> str:
    if date_reader(order)(cell) is not None:
        return ""
    return f"which is no date of {DATE_WORDS[order]}, as the model was trained on"


def refuse_without_labels(
    done: Completed, targets: Sequence[str], stored: Mapping[str, Any], given: Mapping[str, Any]
) -> None:
    """Raise an error if a table lacks the column of a target, or all labels in it.

    `stored` and `given` are the columns that the model and the user name, by role. A table of
    classes under another name, `target` or a declared one, needs neither.
    """
    if done.loaded is None or done.settings.get("join"):
        return  # of joined tables, another one may have the labels
    declared = read_declared(done.loaded.table, done.loaded.source)
    has_classes = declared.has_target or declared.class_names
    spelled = {fold(name): name for name in _table(done).column_names}
    for target in targets:
        name = given.get(target) or stored.get(target) or (target if target != "target" else None)
        if not isinstance(name, str):
            continue
        column = spelled.get(fold(name))
        advice = "which holds the labels (--target names another; predict needs none)"
        if column is None and (target != "target" or target in given or not has_classes):
            hint = near_column(name, [*spelled.values()])
            raise FusionZooError(f"{_source_of(done)} has no column {name!r}{hint}, {advice}")
        if column is not None and not _has_cells(done, column):
            raise FusionZooError(f"{_source_of(done)}: all cells are empty in {name!r}, {advice}")


def _has_cells(done: Completed, column: str) -> bool:
    cells = _table(done)[column]
    if not is_plain(cells.type):
        return cells.null_count < len(cells)
    return bool(read_cells_of(cells, _missing(done.settings, done.loaded)).counts)


def _source_of(done: Completed) -> str:
    assert done.loaded is not None
    return done.loaded.source


def target_columns(settings: Mapping[str, Any], target: str | Sequence[str]) -> dict[str, Any]:
    """Return settings whose target is this column, for a table of other names."""
    words = word_list(target) if target else []
    if len(words) != 1:
        return dict(settings)
    return {**settings, "columns": {**(settings.get("columns") or {}), "target": words[0]}}
