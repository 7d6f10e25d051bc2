"""Values in arrays: `feats.npy[17]`, `feats.npz::audio`, `feats.h5::video/frames[100:250]`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fusionzoo.errors import FusionZooError

from .array_files import open_array
from .budgets import check_shape

DIMENSIONS = {"vector": 1, "sequence": 2}
MAX_OPENED = 200  # arrays whose length is compared with a table's cells when it is opened
PATTERN = (  # file, name of the array, row or rows
    r"^(?P<file>.+?\.(?i:npy|npz|h5|hdf5))(?:::(?P<key>[^\[\]]+))?"
    r"(?:\[(?P<start>[0-9]{1,15})(?:(?P<colon>:)(?P<stop>[0-9]{1,15}))?\])?$"
)
_pattern = re.compile(PATTERN)


@dataclass(frozen=True)
class ArrayItem:
    """A part of an array in a file: all of it, a row, or rows from a start to a stop."""

    path: Path
    key: str = ""
    rows: int | tuple[int, int] | None = None
    length: int | None = None  # steps of a padded sequence that are real
    rate: int | None = None  # Hz, of samples of audio

    def __str__(self) -> str:
        key = f"::{self.key}" if self.key else ""
        rows = f"{self.rows[0]}:{self.rows[1]}" if isinstance(self.rows, tuple) else self.rows
        return f"{self.path}{key}" + ("" if rows is None else f"[{rows}]")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        shape = tuple(open_array(self.path, self.key).shape)
        if isinstance(self.rows, tuple):
            shape = (self.rows[1] - self.rows[0], *shape[1:])
        elif self.rows is not None:
            shape = shape[1:]
        return shape if self.length is None else (min(self.length, shape[0]), *shape[1:])

    @property
    def cost(self) -> float:
        """The number of steps, as far as it is known without opening the file."""
        if isinstance(self.rows, tuple):
            return float(self.rows[1] - self.rows[0])
        return float(self.length or 1)

    def read(self) -> np.ndarray:
        """Return a copy of the value, at its own type."""
        array = open_array(self.path, self.key)
        if self.rows is not None:
            start, stop = self.rows if isinstance(self.rows, tuple) else (self.rows, self.rows + 1)
            if not array.shape or stop > array.shape[0] or start >= stop:
                raise FusionZooError(
                    f"{self} is out of range: the array has shape {tuple(array.shape)}"
                )
        check_shape(self.shape, str(self))
        part = slice(*self.rows) if isinstance(self.rows, tuple) else self.rows
        value = array[()] if part is None else array[part]
        return np.array(value if self.length is None else value[: self.length])


def find_item(cell: str, root: Path | None = None, rate: int | None = None) -> ArrayItem | None:
    """Return the part of an array that a cell names; None if it names no file of arrays.

    >>> str(find_item("a/feats.npz::audio[17]"))
    'a/feats.npz::audio[17]'
    """
    match = _pattern.match(cell)
    if match is None:
        return None
    path = (root or Path()) / match["file"]
    rows: int | tuple[int, int] | None = None
    if match["start"]:
        rows = int(match["start"])
        rows = (rows, int(match["stop"])) if match["colon"] else rows
    return ArrayItem(path, match["key"] or "", rows, rate=rate)


def refer(cell: Any, kind: str, root: Path | None, rate: int | None) -> Any:
    """Return the file or the part of an array that a cell names; of a list each of them.

    Cells that are no text, and lists of numbers, stay as they are.
    """
    if isinstance(cell, list) and kind in ("image", "audio"):
        return [refer(item, kind, root, rate) for item in cell]
    if not isinstance(cell, str):
        return cell
    item = find_item(cell, root, rate)
    is_file = item is not None and not item.key and item.rows is None and kind in DIMENSIONS
    return (root or Path()) / cell if item is None or is_file else item


def file_of(cell: str) -> str:
    """Return the path in a cell, without the name of an array and its rows.

    >>> file_of("feats.npy[17]"), file_of("cat.png")
    ('feats.npy', 'cat.png')
    """
    match = _pattern.match(cell)
    return cell if match is None else match["file"]


class ArrayRows:
    """A modality's values by row of an array: `ArrayItem` of one row or, packed, of several.

    `offsets` (N + 1,) say where the values start in packed sequences, `lengths` (N,) how many steps
    of padded ones are real; without them, row i is value i.
    """

    def __init__(
        self,
        array: ArrayItem,
        *,
        offsets: Any = None,
        lengths: Any = None,
    ) -> None:
        self.array, self.offsets, self.lengths = array, offsets, lengths

    def __getitem__(self, row: int) -> ArrayItem:
        array, rows = self.array, row
        if self.offsets is not None:
            packed = int(self.offsets[row]), int(self.offsets[row + 1])
            return ArrayItem(array.path, array.key, packed, rate=array.rate)
        length = None if self.lengths is None else int(self.lengths[row])
        return ArrayItem(array.path, array.key, rows, length, array.rate)


class NamedArrays:
    """A modality's values in arrays of their own, by number."""

    def __init__(self, path: Path, keys: Sequence[str], rate: int | None = None) -> None:
        self.path, self.keys, self.rate = path, list(keys), rate

    def __getitem__(self, number: int) -> ArrayItem:
        return ArrayItem(self.path, self.keys[number], rate=self.rate)


def check_rows(
    table: pa.Table, kinds: Mapping[str, str], root: Path, place: Callable[[int], str]
) -> None:
    """Raise an error for a cell whose array lacks its rows, or has another shape than the others.

    `kinds` maps the columns to their kinds. At most `MAX_OPENED` arrays are opened; what is wrong
    with others is found when their cells are read.
    """
    for name, kind in kinds.items():
        if not pa.types.is_string(table[name].type):
            continue
        cells = _array_cells(table[name])
        arrays = cells.group_by(["file", "key", "is_row"]).aggregate([("end", "max")]).to_pylist()
        first: tuple[str, int] | None = None  # the first array, and the width of its values
        for array in arrays if len(arrays) <= MAX_OPENED else ():
            checked = _problem(array, cells, kind, root, first)
            if isinstance(checked, int):
                first = first or (array["file"], checked)
                continue
            problem, row = checked
            raise FusionZooError(f"{place(row)}: {name} {table[name][row].as_py()!r} {problem}")


def _array_cells(column: Any) -> pa.Table:
    """Return file, key, row of the table and the end of the rows of each cell that names some."""
    parts = pc.extract_regex(column, PATTERN).combine_chunks()
    fields = {field.name: parts.field(number) for number, field in enumerate(parts.type)}
    is_row = pc.equal(fields["colon"], "")
    last = pc.if_else(is_row, fields["start"], fields["stop"])
    last = pc.if_else(pc.equal(last, ""), pa.scalar(None, pa.string()), last)
    end = pc.add(last.cast(pa.int64()), is_row.cast(pa.int64()))
    rows = pa.array(range(len(column)))
    columns = {"file": fields["file"], "key": fields["key"], "is_row": is_row}
    cells = pa.table({**columns, "row": rows, "end": end})
    return cells.filter(pc.and_(parts.is_valid(), last.is_valid()))


def _problem(
    array: Mapping[str, Any], cells: pa.Table, kind: str, root: Path, first: tuple[str, int] | None
) -> int | tuple[str, int]:
    """Return the width of an array's values, or what is wrong with it and a row that says so."""
    same = pc.and_(pc.equal(cells["file"], array["file"]), pc.equal(cells["key"], array["key"]))
    rows = cells.filter(pc.and_(same, pc.equal(cells["is_row"], array["is_row"])))
    row = rows["row"][0].as_py()
    try:
        shape = tuple(open_array(root / array["file"], array["key"]).shape)
    except FusionZooError as error:
        return f"cannot be read: {error}", row
    if array["end_max"] > (shape[0] if shape else 0):
        outside = rows.filter(pc.greater(rows["end"], shape[0] if shape else 0))
        return f"is out of range: the array has shape {shape}", outside["row"][0].as_py()
    if kind not in DIMENSIONS:
        return 0
    value = shape[1:] if array["is_row"] else shape
    if len(value) != DIMENSIONS[kind]:
        return f"has shape {value}; a {kind} has {DIMENSIONS[kind]} dimension(s)", row
    if first is not None and first[1] != value[-1]:
        return f"is {value[-1]} wide, and {first[0]} has values of width {first[1]}", row
    return int(value[-1])
