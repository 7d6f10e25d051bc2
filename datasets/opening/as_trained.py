"""Read a table as a model's training table was read: its columns, what they hold, and refusals."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

import pyarrow as pa

from fusionzoo.errors import FusionZooError, list_names
from fusionzoo.ground.cells import fold, is_number

from ..sources.cell_kinds import DATE, NUMBER, date_reader, is_cell_kind, number_and_unit, order_of
from ..sources.columns import read_declared
from ..sources.infer import is_plain, named_columns, other_decimal_sign, read_cells_of
from ..tables.provenance import LoadedTable
from ..tables.table import ROLES, word_list
from .complete import has_open_sheet, load_table_of, missing_words, sheet_names
from .naming import TABLE, resolve_name
from .spec import DataSpec

SHARED_BY_FILES = (  # what describes columns rather than a file, and so holds for another one
    *("columns", "kinds", "group_column", "decimal", "na", "label_separator"),
    *("weight_column", "paths", "join", "on", "how", "frames", "sample_rate", "fields", "header"),
    *("image_range", "positive"),
)
PERCENT = "%"
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


def complete_for_model(settings: Mapping[str, Any], stored: Mapping[str, Any]) -> DataSpec:
    """Return settings that read a table as the one in `stored`; absent columns are added, empty."""
    chosen = resolve_name(settings)
    if chosen["name"] != TABLE or stored.get("name") != TABLE:
        of_images = {x: stored[x] for x in ("image_range",) if x in stored}
        return DataSpec(settings={**of_images, **chosen})
    remembered = {*(stored.get("columns") or {})} - {*(chosen.get("columns") or {})}
    described = {name: stored[name] for name in SHARED_BY_FILES if name in stored}
    for name in ("columns", "kinds"):
        described[name] = {**(described.get(name) or {}), **(chosen.get(name) or {})}
    if isinstance(chosen.get("join"), Mapping):
        chosen["join"] = _described_join(chosen["join"], stored.get("join"))
    chosen = {**described, **chosen, "columns": described["columns"], "kinds": described["kinds"]}
    loaded = _load_for_model(chosen, stored)
    spec = DataSpec(settings=chosen, loaded=loaded)
    spec = _without_absent(replace(spec, notes=_check_cells(spec)))
    columns = {x: y for x, y in spec.settings["columns"].items() if x in remembered}
    notes = [
        f"{role} of {list_names(word_list(words))}"
        for role, words in columns.items()
        if role not in ROLES and words != role
    ]
    if notes:
        note = f"{AS_TRAINED}: {'; '.join(notes)}"
        spec = replace(spec, notes=(note, *spec.notes))
    return spec


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


def _load_for_model(settings: dict[str, Any], stored: Mapping[str, Any]) -> LoadedTable:
    """Read the table; of a workbook the sheet with most of the columns that a model was trained on,
    which is set: of equal ones that of the training data, else the first."""
    if not has_open_sheet(settings):
        return load_table_of(settings)
    wanted = named_columns(stored) - {"target"}
    names = sheet_names(settings)
    best, most = None, (-1, False)
    for name in names if len(names) > 1 else ():
        with suppress(FusionZooError):  # an empty one
            loaded = load_table_of({**settings, "sheet": name})
            columns = {*map(fold, loaded.table.column_names)}
            rank = len(wanted & columns), name == stored.get("sheet")
            if rank > most:
                best, most, settings["sheet"] = loaded, rank, name
    return load_table_of(settings) if best is None else best


def _without_absent(spec: DataSpec) -> DataSpec:
    """Leave out what the table has no column for; add the columns that a tabular modality lacks."""
    chosen, table = dict(spec.settings), spec.table
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
    notes = [f"no column {missing} in {spec.source}: its cells are missing"]
    assert spec.loaded is not None
    return DataSpec(
        settings={**chosen, "columns": columns, "kinds": kinds},
        loaded=replace(spec.loaded, table=table),
        notes=(*spec.notes, *renamed, *(notes if absent else ())),
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


def _check_cells(spec: DataSpec) -> tuple[str, ...]:
    """Raise an error for numbers with another decimal sign or unit, or other dates, than the model
    was trained on; return warnings of numbers that may be shares instead of percent."""
    notes = []
    spelled = {fold(name): name for name in spec.table.column_names}
    for name, kind in spec.settings["kinds"].items():
        word, _, detail = str(kind).partition(" ")
        column = spelled.get(fold(name))
        if column is None or word not in (NUMBER, DATE) or (word == DATE and not order_of(detail)):
            continue
        cells = spec.table[column]
        if pa.types.is_dictionary(cells.type):
            cells = cells.cast(cells.type.value_type)
        if pa.types.is_temporal(cells.type):
            continue
        counts = read_cells_of(cells, missing_words(spec.settings, spec.loaded)).counts
        if detail == PERCENT and (share := _may_be_share(counts)):
            notes.append(
                f"warning: {column} in %: the model was trained on percentages, and cells such as"
                f" {share} are read as {share} %; write shares with %, or times 100"
            )
        if not (pa.types.is_string(cells.type) or pa.types.is_large_string(cells.type)):
            continue  # numbers are in the unit
        problem = ""
        if word == NUMBER:
            numbers = [divided[0] for cell in counts if (divided := number_and_unit(cell))]
            problem = other_decimal_sign(numbers, spec.settings.get("decimal") == ",")
        problem_of = _other_unit if word == NUMBER else _other_date
        for cell in counts if detail and not problem else ():
            if fault := problem_of(cell, detail):
                problem = f"{cell!r}, {fault}"
                break
        if problem:
            raise FusionZooError(f"{spec.source}: column {column!r} holds {problem}")
    return tuple(notes)


def _may_be_share(cells: Iterable[str]) -> str:
    """Return one of these numbers if none has a unit and all lie between -1 and 1; else nothing."""
    first = ""
    for cell in cells:
        number, unit = number_and_unit(cell) or ("", "")
        plain = number.replace(",", ".")
        if unit or not is_number(plain) or abs(float(plain)) > 1:
            return ""
        first = first or cell
    return first


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


def _other_date(cell: str, detail: str) -> str:
    order = order_of(detail)
    if date_reader(order)(cell) is not None:
        return ""
    return f"which is no date of {DATE_WORDS[order]}, as the model was trained on"


def refuse_without_labels(
    spec: DataSpec, targets: Sequence[str], stored: Mapping[str, Any], given: Mapping[str, Any]
) -> None:
    """Raise an error if a table lacks the column of a target, or all labels in it.

    `stored` and `given` are the columns that the model and the user name, by role. A table of
    classes under another name, `target` or a declared one, needs neither.
    """
    if spec.loaded is None or spec.settings.get("join"):
        return  # of joined tables, another one may have the labels
    declared = read_declared(spec.loaded.table, spec.loaded.source)
    has_classes = declared.has_target or declared.class_names
    spelled = {fold(name): name for name in spec.table.column_names}
    for target in targets:
        name = given.get(target) or stored.get(target) or (target if target != "target" else None)
        if not isinstance(name, str):
            continue
        column = spelled.get(fold(name))
        advice = "which holds the labels (--target names another; predict needs none)"
        if column is None and (target != "target" or target in given or not has_classes):
            hint = near_column(name, [*spelled.values()])
            raise FusionZooError(f"{spec.source} has no column {name!r}{hint}, {advice}")
        if column is not None and not _has_cells(spec, column):
            raise FusionZooError(f"{spec.source}: all cells are empty in {name!r}, {advice}")


def _has_cells(spec: DataSpec, column: str) -> bool:
    cells = spec.table[column]
    if not is_plain(cells.type):
        return cells.null_count < len(cells)
    return bool(read_cells_of(cells, missing_words(spec.settings, spec.loaded)).counts)
