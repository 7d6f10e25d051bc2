"""What a column's cells are, in words of `--data.kinds`, and how they are converted."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import pyarrow as pa

from fusionzoo.errors import FusionZooError
from fusionzoo.ground.cells import DATE_PARTS, EPOCH, is_number
from fusionzoo.ground.cells import NUMBER as NUMBER_PATTERN

from ..tables.arrow import ArrowColumn, flat

NUMBER, DATE, CATEGORY, NONE = "number", "date", "category", "none"
CELL = re.compile(  # a number with a currency before it or a unit behind it
    r"(?P<before>[$€£¥])?\s*(?P<number>[+-]?(?:[0-9]+(?:[.,'\s][0-9]+)*|[.,][0-9]+)(?:[eE][+-]?[0-9]+)?)"
    r"\s*(?P<behind>[^0-9\s].*?)?"
)
THOUSANDS = {  # whether a comma stands for the decimal point -> a number with signs between those
    True: re.compile(r"[+-]?[0-9]{1,3}(?:[.'\s][0-9]{3})+(?:,[0-9]+)?"),
    False: re.compile(r"[+-]?[0-9]{1,3}(?:[,'\s][0-9]{3})+(?:\.[0-9]+)?"),
}
DATE_ORDERS = ("iso", "dmy", "mdy", "excel")  # excel: days since 1899-12-30
TIMED = "time"  # behind the order of dates whose hours count
EXCEL_START = datetime.date(1899, 12, 30)
MAX_EXCEL_DAY = 2_958_465  # 9999-12-31
WEEKDAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")  # whatever the locale
SHORT_YEARS = 70  # `69` is 2069, `70` is 1970, as in POSIX
NUMERIC_DATE = re.compile(r"([0-9]{1,2})([./-])([0-9]{1,2})\2([0-9]{4}|[0-9]{2})(?:[ T,].*)?")
CLOCK = (  # `7:05`, `10`, `1030`, `10:30:15,5`, and an offset from UTC; words may precede a colon
    r"(?:.*[ T,](?=[0-9]{1,2}:))?([01][0-9]|2[0-4]|[0-9](?=:))"
    r"(?::?([0-5][0-9])(?::?([0-5][0-9](?:[.,][0-9]+)?))?)?"
    r"\s*(?:Z|([+-][0-9]{2}):?([0-9]{2})?)?"
)
CLOCK_NAMES = ["hour", "minute", "second", "ahead", "minutes_ahead"]
TIME = re.compile(rf"[^ T,]+[ T,]{CLOCK}")  # of a date and its time
ISO_DATE = re.compile(r"([0-9]{4})[-/.]([0-9]{1,2})[-/.]([0-9]{1,2})(?:[ T].*)?")
Reader = Callable[[str], "datetime.date | None"]


def is_cell_kind(kind: str) -> bool:
    """Whether a word names what cells are, rather than a modality's kind.

    >>> [is_cell_kind(x) for x in ("number kg", "date dmy", "category", "image")]
    [True, True, True, False]
    """
    return kind.partition(" ")[0] in (NUMBER, DATE, CATEGORY, NONE)


def split_kinds(kinds: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the kinds of modalities, and those of cells by column."""
    cells = {name: kind for name, kind in kinds.items() if is_cell_kind(str(kind))}
    for name, kind in cells.items():
        word, _, detail = kind.partition(" ")
        if word == DATE and order_of(detail) not in ("", *DATE_ORDERS):
            raise FusionZooError(
                f"--data.kinds.{name} {kind!r}: a date is one of"
                f" {', '.join(f'{DATE} {order}' for order in DATE_ORDERS)}, each also with `time`"
            )
    return {name: kind for name, kind in kinds.items() if name not in cells}, cells


def number_and_unit(cell: str) -> tuple[str, str] | None:
    """Divide a cell into a number and its unit; None where it is none.

    >>> [number_and_unit(x) for x in ("60,0 kg", "1.234,5 €", "$ 5", "7", "about 7")]
    [('60,0', 'kg'), ('1.234,5', '€'), ('5', '$'), ('7', ''), None]
    """
    match = CELL.fullmatch(cell.strip())
    if match is None or (match["before"] and match["behind"]):
        return None
    return match["number"], match["before"] or match["behind"] or ""


def number_patterns(unit: str, comma: bool) -> dict[str, str]:
    """Return how other programs read numbers of a unit: patterns of Python and JavaScript alike.

    A group of `pattern` is the number; one that `thousands` matches loses the signs `between`.
    """
    number = CELL.pattern.partition("(?P<number>")[2].partition(r")\s*(?P<behind>")[0]
    sign = re.escape(unit)
    before = rf"{sign}\s*({number})|" if unit and unit in "$€£¥" else ""
    return {
        "pattern": rf"{before}({number})\s*(?:{sign})?",
        "thousands": THOUSANDS[comma].pattern,
        "between": r"[.'\s]" if comma else r"[,'\s]",
    }


def date_patterns(kind: str) -> dict[str, Any]:
    """Return how other programs read dates of a kind: patterns of Python and JavaScript alike, with
    the names of their groups, the parts that each date becomes, and which of the hours count."""
    detail = kind.partition(" ")[2]
    order, timed = order_of(detail) or "excel", detail.endswith(TIMED)
    day, year = "([0-9]{1,2})", "([0-9]{4})"
    iso = rf"{year}[-/.]{day}[-/.]{day}(?:[ T]{CLOCK}|[ T].*)?"
    patterns: list[tuple[str, list[str]]] = [(iso, ["year", "month", "day", *CLOCK_NAMES])]
    if order in ("dmy", "mdy"):
        first = ["day", "month"] if order == "dmy" else ["month", "day"]
        numeric = rf"{day}([./-]){day}\2([0-9]{{4}}|[0-9]{{2}})(?:[ T,]{CLOCK}|[ T,].*)?"
        patterns.append((numeric, [first[0], "sign", first[1], "year", *CLOCK_NAMES]))
    if order == "excel":
        patterns = [(rf"({NUMBER_PATTERN.replace('(', '(?:')})", ["serial"])]
    return {
        "patterns": patterns,
        "parts": DATE_PARTS if timed else DATE_PARTS[:-1],
        "clock": CLOCK_NAMES[:3] if timed else [],
        "timed": timed,
        "weekdays": WEEKDAYS,
    }


def without_thousands(number: str, comma: bool) -> str:
    """Return a number without the signs between its thousands; `comma`: for the decimal point.

    >>> [without_thousands(*x) for x in (("1.234,5", True), ("1,234.5", False), ("1.234", False))]
    ['1234,5', '1234.5', '1.234']
    """
    if not THOUSANDS[comma].fullmatch(number):
        return number
    whole, point, rest = number.partition("," if comma else ".")
    return re.sub(r"[^0-9+-]", "", whole) + point + rest


def convert_cells(
    name: str, kind: str, column: ArrowColumn, comma: bool = False
) -> tuple[dict[str, ArrowColumn], bool]:
    """Return what a column of a kind becomes, `{name: column}`, and whether they are categories.

    A date becomes year and days since 1970, numbers, and month and weekday, categories; with a
    time also the hour, and all are those of UTC where an offset stands behind it. `comma`: that
    stands for the decimal point of numbers, as it still does in what is returned.
    """
    word, _, detail = kind.partition(" ")
    is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
    if word == NUMBER and is_text:
        return {name: _plain_numbers(column, detail, comma)}, False
    if word == DATE:
        return _date_columns(name, column, detail), False
    return {name: column}, word == CATEGORY


def _plain_numbers(column: ArrowColumn, unit: str, comma: bool) -> pa.Array:
    """Remove the unit and the signs between thousands; cells that are no number stay."""
    encoded = flat(column).dictionary_encode()
    plain = []
    for cell in encoded.dictionary.to_pylist():
        divided = number_and_unit(cell)
        is_number = divided is not None and divided[1] in (unit, "")
        plain.append(without_thousands(divided[0], comma) if is_number and divided else cell)
    return pa.array(plain, pa.string()).take(encoded.indices)


def order_of(detail: str) -> str:
    """Return the order of a kind of dates, without the word for their times.

    >>> order_of("dmy time"), order_of("time"), order_of("iso")
    ('dmy', '', 'iso')
    """
    return detail.removesuffix(TIMED).strip()


def have_times(cells: Iterable[str], order: str) -> bool:
    """Whether some of these dates have another time of the day than others."""
    read = date_reader(order)
    hours = (_day_and_hour(cell, read, order)[1] for cell in cells)
    first = next(hours, 0.0)
    return any(hour != first for hour in hours)


def _day_and_hour(cell: str, read: Reader, order: str) -> tuple[datetime.date | None, float]:
    """Return the day and the hour of a date, in UTC where it has an offset."""
    cell = cell.strip()
    date = read(cell)
    if date is None:
        return None, 0.0
    if order == "excel":
        seconds = (float(cell) - (EPOCH - EXCEL_START).days) * 86_400
    else:
        seconds = _seconds(date, cell)
    days, rest = divmod(round(seconds, 3), 86_400)
    try:
        return EPOCH + datetime.timedelta(days=days), rest / 3600
    except OverflowError:  # an offset leads out of the years 1 to 9999
        return None, 0.0


def _date_columns(name: str, column: ArrowColumn, detail: str) -> dict[str, ArrowColumn]:
    encoded = flat(column.cast(pa.string())).dictionary_encode()
    cells = encoded.dictionary.to_pylist()
    order, with_time = order_of(detail) or find_date_order(cells) or "excel", detail.endswith(TIMED)
    read = date_reader(order)
    dates, hours = [], []
    for cell in cells:
        date, hour = _day_and_hour(cell, read, order) if with_time else (read(cell), 0.0)
        if date is None:
            raise FusionZooError(f"column {name!r}: {cell!r} is no date: correct or empty it")
        dates.append(date)
        hours.append(hour)
    parts = {
        "year": pa.array([float(x.year) for x in dates], pa.float64()),
        "days": pa.array([float((x - EPOCH).days) for x in dates], pa.float64()),
        "month": pa.array([str(x.month) for x in dates], pa.string()),
        "weekday": pa.array([WEEKDAYS[x.weekday()] for x in dates], pa.string()),
    }
    if with_time:
        parts["hour"] = pa.array(hours, pa.float64())
    columns = {f"{name} {part}": values.take(encoded.indices) for part, values in parts.items()}
    for part in ("month", "weekday"):
        columns[f"{name} {part}"] = columns[f"{name} {part}"].dictionary_encode()
    return columns


def date_reader(order: str) -> Reader:
    """Return the function that reads a date in this order; None: the text is none.

    >>> date_reader("dmy")("03.02.2021"), date_reader("mdy")("02/03/21")
    (datetime.date(2021, 2, 3), datetime.date(2021, 2, 3))
    """

    def read(text: str) -> datetime.date | None:
        text = text.strip()
        if order == "excel":
            return _excel_date(text)
        if match := ISO_DATE.fullmatch(text):
            return _date(*map(int, match.groups()))
        match = NUMERIC_DATE.fullmatch(text)
        if match is None or order == "iso":
            return None
        first, second, year = int(match[1]), int(match[3]), int(match[4])
        if len(match[4]) == 2:
            year += 1900 if year >= SHORT_YEARS else 2000
        day, month = (first, second) if order == "dmy" else (second, first)
        return _date(year, month, day)

    return read


def _date(year: int, month: int, day: int) -> datetime.date | None:
    try:
        return datetime.date(year, month, day)
    except ValueError:
        return None


def _excel_date(text: str) -> datetime.date | None:
    try:
        days = float(text)
    except ValueError:
        return None
    if not 1 <= days <= MAX_EXCEL_DAY:
        return None
    return EXCEL_START + datetime.timedelta(days=int(days))


def read_moments(cells: list[str], order: str = "") -> list[float | None]:
    """Return dates and times as seconds since 1970, other numbers as they are; None: it is none.

    Times with an offset are those of UTC, others are taken as they stand.

    >>> read_moments(["1970-01-02", "02.01.1970 01:00", "1970-01-02T01:00:00+01:00"], "dmy")
    [86400.0, 90000.0, 86400.0]
    >>> read_moments(["3", "2.5", "soon"])
    [3.0, 2.5, None]
    """
    read = date_reader(order or find_date_order(cells) or "iso")
    return [_moment(cell.strip(), read) for cell in cells]


def _moment(cell: str, read: Reader) -> float | None:
    if is_number(cell):
        return float(cell)
    if (date := read(cell)) is not None:
        return _seconds(date, cell)
    with suppress(ValueError):
        moment = datetime.datetime.fromisoformat(cell)
        return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp()
    return None


def _seconds(date: datetime.date, cell: str) -> float:
    """Return the seconds since 1970, in UTC, of a cell with this date and perhaps a time."""
    clock = TIME.fullmatch(cell)
    read = [(x or "0").replace(",", ".") for x in clock.groups()] if clock else ["0"] * 5
    hours, minutes, seconds, ahead, minutes_ahead = map(float, read)
    minutes -= 60 * ahead + math.copysign(minutes_ahead, -1 if read[3].startswith("-") else 1)
    return (date - EPOCH).days * 86_400 + hours * 3600 + minutes * 60 + seconds


def find_date_order(cells: list[str]) -> str:
    """Return the order in which all of these cells are dates, or nothing.

    Of `03/02/2021` the day comes first where points or hyphens divide it, or where no cell has a
    month above 12 so and one has one the other way round; else the month does, as in the US.
    """
    if not cells or not all(cell[:1].isdigit() for cell in cells):
        return ""
    with_slash = any("/" in cell for cell in cells)
    for order in ("iso", "mdy", "dmy") if with_slash else ("iso", "dmy", "mdy"):
        read = date_reader(order)
        if all(read(cell) is not None for cell in cells):
            return order
    return ""
