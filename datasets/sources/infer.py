"""Find out what a table's columns hold, as explicit settings that a model stores."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fusionzoo.errors import FusionZooError
from fusionzoo.ground.cells import fold
from fusionzoo.targets import decimal_hint, read_list

from ..media.arrays import DIMENSIONS, find_item
from ..media.formats import SUFFIXES, VIDEOS
from ..tables.arrow import ArrowColumn, is_list, is_text
from ..tables.table import MANY, word_list
from .cell_kinds import (
    CATEGORY,
    DATE,
    NONE,
    NUMBER,
    THOUSANDS,
    find_date_order,
    number_and_unit,
    without_thousands,
)
from .table_settings import NA

VECTOR = "vector"
ARRAY = "array"  # files of arrays, whose dimensions tell whether they are vectors or sequences
ID, EMPTY, CONSTANT, OTHER, GROUP, TARGET = "id", "empty", "constant", "other", "group", "target"
LEFT_OUT = (ID, EMPTY, CONSTANT, OTHER, NONE)
FEW_EACH = 10  # samples per integer on average, below which they may be quantities
SEPARATORS = (";", ",", "|", "/")
MANY_CATEGORIES = 50  # said above this
MANY_PHRASES = 20  # different cells of several words, above which they may be meant as texts
NEARLY_ALL = 0.9  # of the cells: so many different ones make codes an id
FREE_TEXT_WORDS = 3.0  # on average, from which on cells are sentences
MAX_UNIT = 8  # characters
ODD_WORDS = 3  # different words in a column of numbers that may stand for a missing value
ODD_SHARE = 0.2  # of its cells, at most
PERFECT = 0.995  # share of rows that a column alone has to tell
POINT = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
COMMA = re.compile(r"[+-]?[0-9]*,[0-9]+([eE][+-]?[0-9]+)?")
CLEAR = {  # whether a comma stands for the decimal point -> what only such numbers look like
    True: re.compile(r".*[.'\s][0-9]{3},[0-9]+|.*\.[0-9]{3}\.[0-9]{3}"),
    False: re.compile(r".*[,'\s][0-9]{3}\.[0-9]+|.*,[0-9]{3},[0-9]{3}"),
}
PERSON = (
    "patient|subject|proband|person|participant|speaker|sprecher|user|nutzer|customer|kunde|client"
    "|animal|family|familie|session|sitzung|group|gruppe|donor|author|rater"
)
GROUP_NAME = re.compile(
    rf"({PERSON})(en|in|innen)?(s|n)?[\s_\-.]*(id|ids|nr|no|num|number|nummer|code|key)?\.?"
)
GRADE_NAME = re.compile(
    r"(^|[\W_])(grades?|ratings?|stars?|scores?|severity|levels?|stages?|likert|quality|noten?"
    r"|stufen?|schweregrad|bewertung|sterne|stadium)($|[\W_])"
)
MAX_LEVELS = 11  # 0 to 10
ID_NAME = re.compile(r"(.*[\s_\-.])?(id|uid|uuid|key|index|idx|nr|no|nummer|number|row|zeile)\.?")


@dataclass(frozen=True)
class ColumnFinding:
    """What a column holds."""

    name: str
    kind: str  # a word of `--data.kinds`, or one of `LEFT_OUT`
    about: str  # for the table of columns
    comma: bool = False  # whether a comma stands for the decimal point
    missing: tuple[str, ...] = ()  # words that stand for a missing number
    is_explicit: bool = True  # whether the settings must name the kind, for cells to be converted
    warning: str = ""


class Cells(NamedTuple):
    """A column as text: its different values and how often each occurs."""

    counts: Counter[str]
    num_rows: int

    @property
    def num_cells(self) -> int:
        return sum(self.counts.values())


def read_cells_of(column: ArrowColumn, missing: Collection[str]) -> Cells:
    """Count the values of a column, without empty cells and words for missing ones."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    text = pc.utf8_trim_whitespace(column.cast(pa.string()))
    counted = pc.value_counts(text.drop_null())
    pairs = zip(
        counted.field("values").to_pylist(), counted.field("counts").to_pylist(), strict=True
    )
    counts = Counter({value: n for value, n in pairs if value and value not in missing})
    return Cells(counts, len(column))


def is_plain(kind: pa.DataType) -> bool:
    """Whether cells of an Arrow type can be written as text."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    types = pa.types
    is_number = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
    is_other = types.is_boolean(kind) or types.is_temporal(kind) or types.is_null(kind)
    return bool(is_text(kind) or is_number or is_other)


def find_arrays(name: str, values: Iterable[Any]) -> ColumnFinding:
    """Return what arrays or tensors in cells are: vectors of one width, or sequences of them."""
    arrays = [value for value in values if value is not None]
    if not all(hasattr(array, "shape") and hasattr(array, "dtype") for array in arrays):
        return ColumnFinding(
            name, OTHER, f"{type(arrays[0]).__name__} (--data.kinds names its kind)"
        )
    shapes = {tuple(array.shape) for array in arrays}
    return _of_dimensions(name, {len(shape) for shape in shapes}, {shape[-1:] for shape in shapes})


def _of_lists(name: str, column: ArrowColumn) -> ColumnFinding | None:
    """Return what lists of numbers in cells are; None: they hold something else."""
    num_dimensions, kind = 0, column.type
    while is_list(kind):
        num_dimensions, kind = num_dimensions + 1, kind.value_type
    if not num_dimensions or not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        return None
    for _ in range(num_dimensions - 1):
        column = pc.list_flatten(column)
    widths = pc.list_value_length(column).drop_null().unique().to_pylist()
    return _of_dimensions(name, {num_dimensions}, {(width,) for width in widths})


def _of_dimensions(name: str, dimensions: set[int], widths: set[tuple[int, ...]]) -> ColumnFinding:
    kind = next((x for x, number in DIMENSIONS.items() if dimensions == {number}), OTHER)
    if not widths:
        return ColumnFinding(name, EMPTY, "no cell has a value")
    if kind == OTHER or len(widths) > 1:
        low, high = min(widths), max(widths)
        about = "arrays" if kind == OTHER else f"{low[0]:,} to {high[0]:,} numbers"
        return ColumnFinding(name, OTHER, f"{about}: of one length they are vectors")
    return ColumnFinding(
        name, kind, f"{next(iter(widths))[0]:,} numbers" + " a step" * (kind != VECTOR)
    )


def find_column(name: str, column: ArrowColumn, missing: Collection[str] = NA) -> ColumnFinding:
    """Return what a column holds."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _category(name, read_cells_of(column, missing))
    if pa.types.is_temporal(kind) and not (pa.types.is_time(kind) or pa.types.is_duration(kind)):
        return _date(name, read_cells_of(column.cast(pa.string()), missing), "iso")
    if lists := _of_lists(name, column):
        return lists
    if not is_plain(kind) or pa.types.is_time(kind) or pa.types.is_duration(kind):
        return ColumnFinding(name, OTHER, f"{kind} (--data.kinds names its kind)")
    cells = read_cells_of(column, missing)
    if not cells.counts:
        return ColumnFinding(name, EMPTY, "no cell has a value")
    if len(cells.counts) == 1:
        only = next(iter(cells.counts))
        return ColumnFinding(name, CONSTANT, f"{_shown(only)} in all rows")
    if pa.types.is_boolean(kind):
        return _category(name, cells)
    return _numbers(name, cells) or _of_text(name, cells)


def _numbers(name: str, cells: Cells) -> ColumnFinding | None:
    """Return the finding of a column of numbers, with one unit or none; None: it holds others."""
    divided = {cell: number_and_unit(cell) for cell in cells.counts}
    comma = _decimal_comma([parts[0] for parts in divided.values() if parts])
    with_unit: dict[str, tuple[str, str]] = {}  # cell -> number, unit
    odd: Counter[str] = Counter()
    for cell, count in cells.counts.items():
        number, unit = divided[cell] or ("", "")
        plain = without_thousands(number, comma)
        if POINT.fullmatch(plain) or COMMA.fullmatch(plain):
            with_unit[cell] = plain, unit
        else:
            odd[cell] = count
    if not with_unit or len(odd) > ODD_WORDS or sum(odd.values()) > ODD_SHARE * cells.num_cells:
        return None
    units = {unit for _, unit in with_unit.values()}
    unit = max(units, key=len)
    if len(unit) > MAX_UNIT or not units <= {unit, ""} or ("" in units and len(units) > 1 and odd):
        return None
    if unit and (unit[0] in "-/.:" or any(x.isdigit() for x in unit)):
        return None  # a date, a time, a range, a code
    if (unit and odd) or (odd and any(any(x.isdigit() for x in cell) for cell in odd)):
        return None
    values = {cell: float(number.replace(",", ".")) for cell, (number, _) in with_unit.items()}
    comma = any("," in number for number, _ in with_unit.values())
    has_thousands = any((divided[x] or ("",))[0] != number for x, (number, _) in with_unit.items())
    whole = all(value.is_integer() for value in values.values()) and not comma
    if whole and not unit and _is_index(name, values, cells):
        return ColumnFinding(name, ID, f"{len(values):,} different numbers")
    low, high = min(values.values()), max(values.values())
    about = f"{low:.6g} to {high:.6g}{unit and ' ' + unit}"
    notes = ["decimal comma"] * comma + ["signs between thousands"] * has_thousands
    notes += [f"{word!r} is missing" for word in odd]
    about += f" ({', '.join(notes)})" if notes else ""
    kind = f"{NUMBER} {unit}".strip()
    about += _gaps(cells)
    return ColumnFinding(
        name, kind, about, comma=comma, missing=tuple(odd), is_explicit=bool(unit) or has_thousands
    )


def _decimal_comma(numbers: Sequence[str]) -> bool:
    """Whether a comma stands for the decimal point where there may be signs between thousands."""
    if any(CLEAR[False].fullmatch(x) for x in numbers):
        return False
    if any(CLEAR[True].fullmatch(x) for x in numbers):
        return True
    return any(COMMA.fullmatch(x) for x in numbers) and all(
        COMMA.fullmatch(x) or THOUSANDS[True].fullmatch(x) or x.lstrip("+-").isdigit()
        for x in numbers
    )


def other_decimal_sign(numbers: Sequence[str], comma: bool) -> str:
    """Say which of a new table's numbers has another decimal sign than those of training, if it is
    not read, or its neighbours as thousands; nothing if there is none. `comma`: that of training.

    >>> other_decimal_sign(["7", "62,8"], comma=False)
    "'62,8'; --data.decimal , reads it as 62.8"
    >>> other_decimal_sign(["62.8", "1.234"], comma=True)
    "'62.8' and '1.234', which --data.decimal '.' does not read as 1234"
    >>> other_decimal_sign(["62.8"], comma=True)
    ''
    """
    sign, written = (".", POINT) if comma else (",", COMMA)
    other = [x for x in numbers if sign in x and written.fullmatch(x)]
    thousands = [x for x in other if THOUSANDS[comma].fullmatch(x)]
    fractions = [x for x in other if not THOUSANDS[comma].fullmatch(x)]
    if not comma:
        return f"{fractions[0]!r}{decimal_hint(fractions[0])}" if fractions else ""
    if not (fractions and thousands) or any(CLEAR[True].fullmatch(x) for x in numbers):
        return ""
    grouped = thousands[0]
    return (
        f"{fractions[0]!r} and {grouped!r}, which --data.decimal '.' does not read as"
        f" {without_thousands(grouped, True)}"
    )


def _is_index(name: str, values: Mapping[str, float], cells: Cells) -> bool:
    """Whether whole numbers are all different and count the rows, or are called so."""
    if len(values) < NEARLY_ALL * cells.num_cells or len(values) < MANY:
        return False
    counts_up = max(values.values()) - min(values.values()) == cells.num_rows - 1
    return counts_up or ID_NAME.fullmatch(fold(name)) is not None


def _of_text(name: str, cells: Cells) -> ColumnFinding:
    distinct = list(cells.counts)
    media = _media_kind(distinct)
    if media:
        return ColumnFinding(name, media, f"files such as {_shown(distinct[0])}" + _gaps(cells))
    order = find_date_order(distinct)
    if order:
        return _date(name, cells, order)
    num_words = sum(len(cell.split()) * n for cell, n in cells.counts.items()) / cells.num_cells
    share = len(distinct) / cells.num_cells
    if num_words >= FREE_TEXT_WORDS and (share > 0.5 or len(distinct) > MANY_CATEGORIES):
        return ColumnFinding(name, "text", f"{num_words:.0f} words on average" + _gaps(cells))
    if share >= NEARLY_ALL and len(distinct) >= MANY:
        if num_words >= 1.5:
            return ColumnFinding(name, "text", f"{num_words:.0f} words on average" + _gaps(cells))
        return ColumnFinding(
            name, ID, f"{len(distinct):,} different, such as {_shown(distinct[0])}"
        )
    return _category(name, cells, num_words)


def _category(name: str, cells: Cells, num_words: float = 1.0) -> ColumnFinding:
    most, count = cells.counts.most_common(1)[0]
    about = f"{len(cells.counts):,}, most often {_shown(most)} ({count:,})" + _gaps(cells)
    warning = ""
    if len(cells.counts) > MANY_CATEGORIES:
        warning = f"{len(cells.counts):,} categories, of which rare ones teach little"
    elif len(cells.counts) > MANY_PHRASES and num_words >= FREE_TEXT_WORDS:
        warning = (
            f"{len(cells.counts)} categories of {num_words:.0f} words on average:"
            f" --data.kinds.{shlex.quote(name)} text reads the words"
        )
    return ColumnFinding(name, CATEGORY, about, warning=warning)


def _date(name: str, cells: Cells, order: str) -> ColumnFinding:
    from .cell_kinds import TIMED, date_reader, have_times

    read = date_reader(order)
    dates = sorted(date for cell in cells.counts if (date := read(cell)) is not None)
    if not dates:
        return ColumnFinding(name, EMPTY, "no cell has a value")
    with_time = have_times(cells.counts, order)
    parts = "year, month, weekday, days elapsed" + ", hour" * with_time
    about = f"{dates[0]} to {dates[-1]}: {parts}" + _gaps(cells)
    return ColumnFinding(name, f"{DATE} {order}" + f" {TIMED}" * with_time, about)


def _media_kind(cells: Sequence[str]) -> str:
    """Return the kind of the files that cells name, if all of them do."""
    kinds = {"image": {*SUFFIXES["image"]}, "audio": {*SUFFIXES["audio"]}, "video": VIDEOS}
    for kind, suffixes in kinds.items():
        if cells and all(Path(cell).suffix.lower() in suffixes for cell in cells):
            return "image" if kind == "video" else kind  # its frames
    return ARRAY if cells and all(map(_names_an_array, cells)) else ""


def _names_an_array(cell: str) -> bool:
    """Whether a cell is a .npy file, or a part of a file of arrays."""
    item = find_item(cell)
    is_part = item is not None and (item.key != "" or item.rows is not None)
    return is_part or Path(cell).suffix.lower() == ".npy"


def _gaps(cells: Cells) -> str:
    gaps = cells.num_rows - cells.num_cells
    return f", {gaps:,} missing" if gaps else ""


def _shown(cell: str) -> str:
    return repr(cell if len(cell) <= 24 else f"{cell[:21]}...")


def is_group_name(name: str) -> bool:
    """Whether a column of codes is named as people or sessions are.

    >>> [is_group_name(x) for x in ("Patient", "patient_id", "Patienten-Nr", "Patientenalter")]
    [True, True, True, False]
    """
    return GROUP_NAME.fullmatch(fold(name)) is not None


def may_group(cells: Cells) -> bool:
    """Whether values recur as those of a group do: several rows each, and many groups."""
    return 5 <= len(cells.counts) <= cells.num_cells / 1.15


class TargetKind(NamedTuple):
    """What a column of labels holds, and how its cells are read."""

    kind: str
    separator: str = ";"  # between the labels of a cell
    comma: bool = False  # whether a comma stands for the decimal point
    cells: str = ""  # a word of `--data.kinds` for numbers with a unit
    missing: tuple[str, ...] = ()  # words that stand for a missing number


def target_kind(name: str, column: ArrowColumn, missing: Collection[str] = NA) -> TargetKind:
    """Return the kind of a target.

    Numbers are a quantity if they have fractions or a unit, or are many for the rows; a few whole
    numbers in a row are levels if the column is called as such are; lists, also in brackets, and
    cells that divide into recurring words are lists of labels; all else is a class.
    """
    if is_list(column.type):
        return TargetKind("multilabel")
    is_bytes = pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)
    if not (is_bytes or is_plain(column.type)):
        raise FusionZooError(f"target {name!r} holds {column.type}, no labels")
    if pa.types.is_floating(column.type):
        column = column.cast(pa.float64())
        column = pc.if_else(pc.is_nan(column), pa.scalar(None, pa.float64()), column)
    cells = read_cells_of(column, missing)
    distinct = list(cells.counts)
    if distinct and all(read_list(cell) is not None for cell in distinct):
        return TargetKind("multilabel")
    if distinct and all(POINT.fullmatch(cell) or COMMA.fullmatch(cell) for cell in distinct):
        values = {float(cell.replace(",", ".")) for cell in distinct}
        fractions = not all(value.is_integer() for value in values)
        many = len(values) > MANY and cells.num_cells / len(values) < FEW_EACH
        if len(values) > 2 and (fractions or many):
            return TargetKind("regression", comma=any("," in cell for cell in distinct))
        in_a_row = max(values) - min(values) == len(values) - 1
        is_level = GRADE_NAME.search(fold(name)) and 2 < len(values) <= MAX_LEVELS and in_a_row
        return TargetKind("ordinal" if is_level else "classification")
    numbers = _numbers(name, cells) if len(distinct) > 2 else None
    if numbers is not None and numbers.is_explicit and numbers.kind.startswith(NUMBER):
        return TargetKind("regression", ";", numbers.comma, numbers.kind, numbers.missing)
    array = pa.array(distinct, pa.string())
    for separator in SEPARATORS:
        several = sum(n for cell, n in cells.counts.items() if separator in cell)
        if several >= 0.05 * cells.num_cells and _words_recur(array, separator):
            return TargetKind("multilabel", separator)
    return TargetKind("classification")


def objective_hint(labels: ArrowColumn) -> str:
    """Return which objective would fit a column of classes better, as `target_kind` finds it.

    >>> objective_hint(pa.array(["sun, sea", "sun", "sea"]))[:49]
    "targets such as 'sun, sea' are lists of labels: -"
    """
    distinct = labels.drop_null().unique().to_pylist()
    found = target_kind("", labels, ())
    if found.kind == "multilabel":
        example = next((x for x in distinct if found.separator in x), distinct[0])
        flag = f" --data.label_separator {_shell(found.separator)}" * (found.separator != ";")
        return f"targets such as {example!r} are lists of labels: --objective.name multilabel{flag}"
    if found.kind == "regression" and not found.cells:
        flags = "--objective.name regression" + " --data.decimal ," * found.comma
        return f"the {len(distinct):,} different targets are numbers: {flags} learns them as such"
    if len(distinct) == len(labels) - labels.null_count > 2:
        return (
            f"each of the {len(distinct):,} targets occurs once, so there are no classes to learn:"
            " --data.columns.target names another column, --objective.name regression learns"
            " numbers, multilabel several labels in a cell"
        )
    return ""


def separator_hint(name: str, classes: Sequence[str]) -> str:
    """Return a hint at labels of a multilabel target that look like several, or nothing."""
    separator = target_kind(name, pa.array(classes, pa.string()), ()).separator
    if separator == ";":
        return ""
    example = next(label for label in classes if separator in label)
    flag = f"--data.label_separator {_shell(separator)}"
    return f"labels of {name} such as {example!r} look like several: {flag}"


def _words_recur(cells: ArrowColumn, separator: str) -> bool:
    """Return whether cells divide into words of which one is a cell, too, or that are few."""
    parts = pc.list_flatten(pc.split_pattern(cells, separator))
    words = pc.utf8_trim_whitespace(parts)
    distinct = words.unique()
    several = cells.filter(pc.match_substring(cells, separator))
    in_several = pc.utf8_trim_whitespace(pc.list_flatten(pc.split_pattern(several, separator)))
    alone = pc.any(pc.is_in(in_several, value_set=cells)).as_py()
    return bool(alone) or len(distinct) < len(cells) or len(distinct) < len(words) / 2


def _shell(separator: str) -> str:
    return f"'{separator}'" if separator in ";|" else separator


def tells_alone(column: ArrowColumn, kind: str, target: ArrowColumn, target_kind: str) -> bool:
    """Whether a column alone predicts the target: what must be asked of a column that leaks it."""
    if not (is_plain(column.type) and is_plain(target.type)):
        return False
    frame = pa.table({"x": column.cast(pa.string()), "y": target.cast(pa.string())}).drop_null()
    if len(frame) < MANY:
        return False
    if target_kind == "regression" or kind.partition(" ")[0] in (NUMBER, DATE):
        return _ordered_alone(frame, target_kind)
    if target_kind != "classification":
        return False
    pairs = frame.group_by(["x", "y"]).aggregate([([], "count_all")])
    best = pairs.group_by("x").aggregate([("count_all", "max")])
    share = pc.sum(best["count_all_max"]).as_py() / len(frame)
    return len(best) <= len(frame) / 5 and len(best) > 1 and share >= PERFECT


def _ordered_alone(frame: pa.Table, target_kind: str) -> bool:
    """Whether sorting by the column's numbers sorts the target, too."""
    x, y = (_as_floats(frame[name].to_pylist()) for name in ("x", "y"))
    if x is None:
        return False
    if target_kind == "regression":
        if y is None or not x.std() or not y.std():
            return False
        return bool(abs(np.corrcoef(x, y)[0, 1]) > 0.9999)
    labels = np.asarray(frame["y"].to_pylist())[np.argsort(x, kind="stable")]
    runs = 1 + int((labels[1:] != labels[:-1]).sum())
    return len(set(labels.tolist())) > 1 and runs == len(set(labels.tolist()))


def _as_floats(cells: Sequence[str]) -> Any:
    divided = [number_and_unit(cell) for cell in cells]
    numbers = [parts[0] for parts in divided if parts]
    comma = _decimal_comma(numbers)
    try:
        plain = [without_thousands(x, comma).replace(",", ".") for x in numbers]
        return np.asarray([float(x) for x in plain]) if len(numbers) == len(cells) else None
    except ValueError:
        return None


def named_columns(settings: Mapping[str, Any]) -> set[str]:
    """Return the columns, folded, that settings of a table name."""
    roles = (settings.get("columns") or {}).values()
    names = [*(x for role in roles for x in word_list(role)), *(settings.get("kinds") or {})]
    return {fold(name) for name in names}
