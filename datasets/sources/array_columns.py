"""Modalities in files of arrays beside the table: `--data.arrays.audio feats.npy`.

Shapes: `N` values, `T` steps, `D` width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from fusionzoo.errors import FusionZooError, located
from fusionzoo.ground.cells import fold

from ..media.arrays import (
    NUMBERS,
    WORDS,
    ArrayItem,
    ArrayRows,
    NamedArrays,
    array_names,
    find_item,
    group_names,
    open_array,
)
from ..tables.paths import PathChecker
from ..tables.provenance import LoadedTable
from ..tables.table import word_list
from .columns import Columns
from .table_settings import TableSettings

FEATURES, IDS, LENGTHS = "features", "ids", "lengths"  # names of arrays in a file of several


class ArrayColumns(NamedTuple):
    """A table with a column of numbers per modality in arrays, and what these numbers refer to."""

    table: pa.Table
    roles: dict[str, str]
    kinds: dict[str, str]
    memory: dict[str, Any]
    notes: tuple[tuple[str, str], ...]  # for the data summary
    missing: Mapping[str, Counter[str]] = {}  # column -> words in cells that were read as missing


class _Values(NamedTuple):
    """A modality's values in a file, their ids (None: in the order of the rows) and their kind."""

    values: Any  # number -> ArrayItem
    size: int
    ids: Sequence[str] | None
    kind: str
    about: str


def gather_arrays(
    loaded: LoadedTable, roles: Mapping[str, str], kinds: Mapping[str, str], settings: TableSettings
) -> ArrayColumns:
    """Add a column of numbers for each modality in `arrays`, whose kind its shape tells."""
    gathered = ArrayColumns(loaded.table, dict(roles), dict(kinds), {}, ())
    for name, words in (settings.arrays or {}).items():
        flag = f"--data.arrays.{name}"
        files = [_find(word, flag, loaded, settings) for word in word_list(words)]
        if len(files) not in (1, 2):
            raise FusionZooError(f"{flag} takes a file of arrays and, if any, one of ids")
        ids_array = files[1] if len(files) == 2 else None
        array = replace(files[0], rate=settings.sample_rate)
        with located(flag):
            values = _open(array, ids_array, kinds.get(name))
        numbers = _match_rows(Columns(loaded, roles, settings), values, flag)
        column = name
        while fold(column) in map(fold, gathered.table.column_names):
            column = f"{column} (array)"
        gathered = ArrayColumns(
            gathered.table.append_column(column, numbers),
            {**gathered.roles, name: column},
            {**gathered.kinds, name: values.kind},
            {**gathered.memory, name: values.values},
            (*gathered.notes, (name, f"{values.kind} of {values.about}")),
        )
    return gathered


def _find(word: str, flag: str, loaded: LoadedTable, settings: TableSettings) -> ArrayItem:
    root = loaded.root or Path()
    allow_outside = settings.allow_outside or loaded.root is None
    item = find_item(word, root)
    if item is None or item.rows is not None:
        raise FusionZooError(f"{flag} {word!r} names no file of arrays: .npy, .npz, .h5 or .hdf5")
    file = str(item.path.relative_to(root)) if item.path.is_relative_to(root) else str(item.path)
    problem = PathChecker(root, allow_outside=allow_outside, must_exist=True).problem(file)
    if problem:
        raise FusionZooError(f"{flag}: {problem.partition(' (--data.on_error')[0]}")
    return item


def _open(array: ArrayItem, ids_array: ArrayItem | None, kind: str | None) -> _Values:
    """Open a modality's values: one array of all, or one of each id."""
    path, key = array.path, array.key
    names = array_names(path)
    if names and not key and len(names) > 1 and FEATURES in names:
        key = FEATURES
    members = group_names(path, key) if key else (names if len(names) > 1 else None)
    if members:
        keys = [f"{key}/{name}" if key else name for name in members]
        items = NamedArrays(path, keys, array.rate)
        first = open_array(path, keys[0])
        about = f"{len(keys):,} arrays in {path.name}, by id"
        return _Values(
            items, len(keys), members, _kind(kind, first.shape, first.dtype, array), about
        )
    opened = open_array(path, key)
    if not opened.shape:
        raise FusionZooError(f"{array} holds a single number")
    ids = lengths = None
    if key == FEATURES:
        ids = _words(path, IDS) if IDS in names else None
        lengths = open_array(path, LENGTHS)[:] if LENGTHS in names else None
    ids = _words(ids_array.path, ids_array.key) if ids_array else ids
    values, shape = _rows(ArrayItem(path, key, rate=array.rate), opened, lengths)
    count = len(opened) if lengths is None else len(lengths)
    if ids is not None and len(ids) != count:
        raise FusionZooError(f"{array} has {count:,} values, and {len(ids):,} ids")
    order = "in the order of the rows" if ids is None else "by id"
    about = f"shape ({', '.join(map(str, shape))}) in {path.name}, {order}"
    return _Values(values, count, ids, _kind(kind, shape, opened.dtype, array), about)


def _words(path: Path, key: str) -> list[str]:
    """Return an array of ids as text."""
    array = open_array(path, key, NUMBERS + WORDS)
    if len(array.shape) != 1:
        raise FusionZooError(f"the ids in {path} have shape {tuple(array.shape)}; expected (N,)")
    cells = array[:].tolist()
    return [(cell.decode() if isinstance(cell, bytes) else str(cell)).strip() for cell in cells]


def _rows(item: ArrayItem, array: Any, lengths: Any) -> tuple[ArrayRows, Sequence[int | str]]:
    """Return the values of an array, and the shape of a value."""
    if lengths is None:
        return ArrayRows(item), array.shape[1:]
    lengths = np.asarray(lengths)
    is_count = lengths.ndim == 1 and lengths.dtype.kind in "iu" and (lengths >= 0).all()
    if not is_count:
        raise FusionZooError(f"{item.path}::{LENGTHS} must be whole numbers, one per value")
    if len(array.shape) == 2 and lengths.sum() == array.shape[0]:
        offsets = np.concatenate([[0], lengths.cumsum()])
        return ArrayRows(item, offsets=offsets), ("T", array.shape[1])
    if len(array.shape) == 3 and len(lengths) == len(array) and lengths.max() <= array.shape[1]:
        return ArrayRows(item, lengths=lengths), ("T", array.shape[2])
    raise FusionZooError(f"{item}: the lengths do not fit its shape {tuple(array.shape)}")


def _kind(kind: str | None, shape: Sequence[int | str], dtype: Any, array: ArrayItem) -> str:
    """Return the kind of values of a shape; an error if the user's is another."""
    fitting = {1: ["vector"], 2: ["sequence"]}.get(len(shape), [])
    if dtype == np.uint8 and len(shape) in (2, 3):
        fitting.insert(0, "image")
    if len(shape) == 1 and array.rate is not None:
        fitting.append("audio")
    if kind in fitting:
        return str(kind)
    if kind == "audio" and len(shape) == 1:
        raise FusionZooError(f"{array}: samples need a rate: --data.sample_rate 16000 (Hz)")
    if kind is not None or not fitting:
        wanted = kind or "a vector (D,), sequence (T, D) or image (H, W, 3) of uint8"
        raise FusionZooError(f"{array} has values of shape {(*shape,)} and {dtype}, not {wanted}")
    return fitting[0]


def _match_rows(columns: Columns, values: _Values, flag: str) -> pa.Array:
    """Return the number of each row's value, null where it has none."""
    count = len(columns.table)
    if values.ids is None:
        if values.size != count:
            raise FusionZooError(f"{flag} has {values.size:,} values, not {count:,}: add ids.npy")
        return pa.array(range(count), pa.int64())
    numbers = {key: number for number, key in enumerate(values.ids)}
    if len(numbers) < len(values.ids):
        twice = next(key for number, key in enumerate(values.ids) if numbers[key] != number)
        raise FusionZooError(f"{flag}: id {twice!r} occurs more than once")
    if "id" not in columns:
        raise FusionZooError(f"{flag} has ids: --data.columns.id names those of the table")
    ids = columns.text("id", words_missing=False).to_pylist()
    rows = [numbers.get(key) for key in ids]
    if all(number is None for number in rows):
        raise FusionZooError(f"{flag}: none of its ids is in {columns.source}")
    return pa.array(rows, pa.int64())
