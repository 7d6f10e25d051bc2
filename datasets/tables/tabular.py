"""Columns of a table as one modality: their cells, and statistics of the training split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fusionzoo.errors import FusionZooError
from fusionzoo.ground.cells import (
    EPOCH,
    category_of,
    date_of,
    fold,
    is_number,
    read_cell,
    read_cells,
)
from fusionzoo.targets import MAX_NUMBER, decimal_hint

from .arrow import ArrowColumn, flat, is_text
from .table import Samples

MAX_CATEGORIES = 1000  # of a column; the rarest ones count as unknown
ROWS_PER_BIN, FEWEST_BINS = 10, 4  # narrower bins hold too few rows to learn from
MAX_SHOWN = 20  # columns in the data summary
NUMERIC = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)


def join_cells(
    columns: Mapping[str, ArrowColumn], categorical: Collection[str] = ()
) -> pa.StructArray:
    """Join columns to one of structs, null where all cells of a row are empty.

    Those named in `categorical` become dictionaries, as categories of pandas are: their cells are
    categories even where they are numbers.
    """
    cells = {}
    for name, column in columns.items():
        cells[name] = _clean(name, column, forced=name in categorical)
    empty = None
    for column in cells.values():
        is_null = pc.is_null(column)
        empty = is_null if empty is None else pc.and_(empty, is_null)
    return pa.StructArray.from_arrays(list(cells.values()), names=list(cells), mask=empty)


def _clean(name: str, column: ArrowColumn, forced: bool) -> pa.Array:
    """Return a column's cells: text without spaces around it, null for an empty one and for NaN."""
    column = flat(column)
    if pa.types.is_dictionary(column.type):
        column, forced = column.cast(column.type.value_type), True
    if pa.types.is_boolean(column.type) or (forced and _is(column, NUMERIC)):
        values = [None if x is None else category_of(x) for x in map(read_cell, column.to_pylist())]
        column = pa.array(values, pa.string())
    if is_text(column.type):
        column = pc.utf8_trim_whitespace(column.cast(pa.string()))
        column = pc.if_else(pc.equal(column, ""), pa.scalar(None, pa.string()), column)
        return column.dictionary_encode() if forced else column
    if pa.types.is_null(column.type):
        return column.cast(pa.string())
    if not _is(column, NUMERIC):
        raise FusionZooError(f"column {name!r} is of type {column.type}: give numbers or text")
    column = column.cast(pa.float64())
    return pc.if_else(pc.is_nan(column), pa.scalar(None, pa.float64()), column)


def _is(column: ArrowColumn, tests: Collection[Any]) -> bool:
    return any(test(column.type) for test in tests)


def learn_columns(data: Samples, modality: str, bins: int = 0) -> list[dict[str, Any]]:
    """Return the setting `columns` of a modality's encoder, from the table's training split.

    A column is numeric if all of its cells are numbers, and else categorical. One of which most
    cells are numbers, but not all, is an error. Without training split all rows are used. With
    `bins`, numeric columns have the edges of as many bins of quantiles, or fewer: one for every
    `ROWS_PER_BIN` rows.
    """
    splits = data.table["split"].to_pylist()
    rows = [row for row, split in enumerate(splits) if split == "train"] or list(range(len(splits)))
    bins = min(bins, max(FEWEST_BINS, len(rows) // ROWS_PER_BIN))
    learned = []
    for name, column in _columns(data, modality, rows).items():
        try:
            learned.append({"name": name, **_learn(column, bins)})
        except _NotNumber as error:
            row = rows[pc.index(column, error.cell).as_py()]
            place = data.sample_place(row)
            raise FusionZooError(f"{place}: column {name!r}: {error}") from None
        except FusionZooError as error:
            raise FusionZooError(f"{data.source}: column {name!r} {error}") from None
    return learned


def _columns(data: Samples, modality: str, rows: list[int]) -> dict[str, Any]:
    """Return the cells of each column of a modality in some rows."""
    if modality in data.memory:
        return _columns_in_memory(data, modality, rows)
    cells = data.table[modality].combine_chunks().take(pa.array(rows))
    return dict(zip([field.name for field in cells.type], cells.flatten(), strict=True))


def _columns_in_memory(data: Samples, modality: str, rows: list[int]) -> dict[str, Any]:
    values = [data.reference(modality, row) for row in rows]
    samples = [{} if value is None else read_cells(value) or {} for value in values]
    columns = {}
    for name in dict.fromkeys(name for sample in samples for name in sample):
        cells = [sample.get(name) for sample in samples]
        if any(isinstance(cell, str) for cell in cells):
            cells = [f"{cell:.17g}" if isinstance(cell, float) else cell for cell in cells]
        columns[name] = pa.array(cells)
    return columns


def strange_cells(
    data: Samples, modality: str, is_strange: Mapping[str, Callable[[float | str], bool]]
) -> dict[str, str]:
    """Say for each of these columns how many cells are strange, if any is, by the column."""
    notes = {}
    tests = {fold(name): test for name, test in is_strange.items()}
    for name, column in _columns(data, modality, data.rows.tolist()).items():
        if fold(name) not in tests:
            continue
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        cells = column.drop_null()
        counted = pc.value_counts(cells).to_pylist()
        strange = [x for x in counted if tests[fold(name)](x["values"])]
        if strange:
            count, first = sum(x["counts"] for x in strange), category_of(strange[0]["values"])
            where = f"{count:,} of {len(cells):,} cells"
            notes[fold(name)] = f"{name} in {where}, such as {first!r}"
    return notes


class _NotNumber(FusionZooError):
    """A cell among numbers that is none."""

    def __init__(self, cell: str, num_numbers: int, num_cells: int) -> None:
        self.cell = cell
        hint = ", --data.decimal , where a comma stands for the point" * ("," in cell)
        super().__init__(
            f"{cell!r} is not a number, though {num_numbers:,} of {num_cells:,} cells are: correct"
            f" or empty it (a column of categories: --data.kinds.<column> category{hint})"
        )


def _learn(column: Any, bins: int) -> dict[str, Any]:
    """Return mean, standard deviation, range and edges of numbers, or the categories."""
    column = column.drop_null()
    if not len(column):
        raise FusionZooError("is empty in the training split: leave it out of --data.columns")
    if pa.types.is_floating(column.type):
        return _learn_numbers(column.to_numpy(zero_copy_only=False), None, bins)
    forced = pa.types.is_dictionary(column.type)
    if forced:
        column = column.cast(pa.string())
    counted = pc.value_counts(column)
    counts = dict(
        zip(counted.field("values").to_pylist(), counted.field("counts").to_pylist(), strict=True)
    )
    numbers = {cell: count for cell, count in counts.items() if not forced and is_number(cell)}
    num_numbers = sum(numbers.values())
    if numbers and len(numbers) == len(counts):
        values = np.array([float(cell) for cell in numbers])
        return _learn_numbers(values, np.array([*numbers.values()]), bins)
    if 2 * num_numbers > len(column):
        odd = next(cell for cell in counts if cell not in numbers)
        raise _NotNumber(odd, num_numbers, len(column))
    categories: Counter[str] = Counter()
    for cell, count in counts.items():
        categories[category_of(cell)] += count
    return {"values": sorted(value for value, _ in categories.most_common(MAX_CATEGORIES))}


def _learn_numbers(numbers: Any, counts: Any, bins: int) -> dict[str, Any]:
    if not np.isfinite(numbers).all():
        raise FusionZooError("contains numbers that are not finite")
    largest = numbers[np.abs(numbers).argmax()]
    if abs(largest) > MAX_NUMBER:
        raise FusionZooError(f"holds {largest:g}, beyond what float32 can hold: empty it")
    mean = float(np.average(numbers, weights=counts))
    std = float(np.average((numbers - mean) ** 2, weights=counts)) ** 0.5
    learned: dict[str, Any] = {"mean": mean, "std": std or 1.0}  # a constant is standardised to 0
    learned["range"] = [float(numbers.min()), float(numbers.max())]
    return {**learned, "edges": _edges(numbers, counts, bins)} if bins else learned


def _edges(numbers: Any, counts: Any, bins: int) -> list[float]:
    """Return the bounds of bins with equally many numbers, ascending; of few values, the values."""
    edges = np.unique(numbers)
    if len(edges) > bins + 1:
        rows = numbers if counts is None else np.repeat(numbers, counts)
        edges = np.unique(np.quantile(rows, np.linspace(0, 1, bins + 1)))
    return [float(edge) for edge in edges]


def describe_columns(data: Samples, modality: str) -> tuple[str, list[str]]:
    """Return what the columns of a modality hold, and hints, for the data summary."""
    try:
        columns = learn_columns(data, modality)
    except FusionZooError as error:
        return str(error), []
    cells = _columns(data, modality, data.rows.tolist())
    missing = {name: column.null_count for name, column in cells.items()}
    whole = [x for x in columns if not date_of(x["name"], cells) or x["name"].endswith(" days")]
    shown = [_describe(column, missing[column["name"]], cells) for column in whole[:MAX_SHOWN]]
    more = [f"{len(whole) - MAX_SHOWN} more"] * (len(whole) > MAX_SHOWN)
    return ", ".join([*shown, *more]), [hint for x in columns if (hint := _decimal_hint(x))]


def _decimal_hint(column: Mapping[str, Any]) -> str:
    """Return a hint at categories that are numbers with a decimal comma, or nothing."""
    values = column.get("values", ())
    if not values or not all(is_number(x) or decimal_hint(x) for x in values):
        return ""
    cell = next((x for x in values if not is_number(x)), "")
    return cell and f"the categories of {column['name']} are numbers: {cell!r}{decimal_hint(cell)}"


def _describe(column: Mapping[str, Any], num_missing: int, names: Collection[str]) -> str:
    missing = f" ({num_missing:,} missing)" if num_missing else ""
    if date := date_of(column["name"], names):
        middle = EPOCH + timedelta(days=round(column["mean"]))
        return f"{date} {middle} ± {column['std']:.3g} days{missing}"
    if "mean" in column:
        return f"{column['name']} {column['mean']:.4g} ± {column['std']:.3g}{missing}"
    count = len(column["values"])
    most = " (the most frequent)" if count == MAX_CATEGORIES else ""
    return f"{column['name']} {count:,} categor{'y' if count == 1 else 'ies'}{most}{missing}"
