"""Tables in memory: DataFrames, Arrow tables, lists of rows, dicts of columns, data sets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from numbers import Number
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
from torch import Tensor
from torch.utils.data import IterableDataset

from fusionzoo.errors import FusionZooError, explained, one_line
from fusionzoo.structures import Audio

from ..media.decode import MediaCells
from ..tables.arrow import row_numbers
from ..tables.hugging_face import is_hugging_face, read_hugging_face
from ..tables.parquet import join_splits
from ..tables.provenance import LoadedTable, mark_index
from .table_settings import TableSettings

STREAM_LIMIT = 20_000  # samples of a stream that are read into memory
SKIPPED = "_"  # in `fields`: an entry that nothing uses


class Items:
    """The items of a map-style data set as mappings; the last is kept for its other modalities."""

    def __init__(self, dataset: Any, fields: Sequence[str], source: str) -> None:
        self.dataset, self.fields, self.source = dataset, fields, source
        self._last: tuple[int, Mapping[str, Any]] = (-1, {})

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        if self._last[0] != index:
            where = f"{self.source}, item {index}"
            try:
                item = self.dataset[index]
            except Exception as error:
                reason = f"{type(error).__name__}: {one_line(error)}"
                raise FusionZooError(f"{where} cannot be read: {reason}") from error
            self._last = (index, as_row(item, self.fields, where))
        return self._last[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_last": (-1, {})}


def as_row(item: Any, fields: Sequence[str], where: str) -> dict[str, Any]:
    """Return an item as a mapping: one already, a named tuple, or a tuple with `fields`."""
    if isinstance(item, Mapping):
        return {str(name): value for name, value in item.items()}
    if not isinstance(item, tuple | list):
        raise FusionZooError(f"{where} is of type {type(item).__name__}: expected a dict or tuple")
    names = list(fields) or list(getattr(item, "_fields", ()))
    if len(names) != len(item):
        raise FusionZooError(
            f"{where} has {len(item)} entries, but fields names {len(names)}: name each, such as"
            f" fields={['image', 'target', *[SKIPPED] * len(item)][: len(item)]}"
        )
    return {name: x for name, x in zip(names, item, strict=True) if name != SKIPPED}


def _is_short(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(x, str) for x in value)
    is_number = isinstance(value, Tensor | np.ndarray) and not value.ndim
    return value is None or is_number or isinstance(value, str | int | float | np.generic)


def column_cells(values: Any) -> Any:
    """Return a column's values with None for what is missing; Arrow columns stay as they are."""
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values
    if isinstance(values, Tensor):
        values = values.detach().cpu()
    if isinstance(values, np.ndarray | Tensor) and values.ndim > 1:
        return values
    if isinstance(values, np.ndarray | Tensor):
        values = values.tolist()
    return [None if _is_missing(value) else _plain(value) for value in values]


def _plain(value: Any) -> Any:
    """Return a Python number for one of NumPy or PyTorch, text for a UUID, a list for a set."""
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    is_number = isinstance(value, np.generic) or (isinstance(value, Tensor) and not value.ndim)
    return value.item() if is_number else value


def _is_missing(value: Any) -> bool:
    """Whether a value is None, NaN, or one of pandas' markers for missing values."""
    if isinstance(value, float | np.floating):
        return bool(np.isnan(value))
    return value is None or type(value).__name__ in ("NAType", "NaTType")


def arrow_column(cells: Any) -> Any:
    """Return the values as an Arrow array if it holds them exactly; None: they stay objects."""
    if isinstance(cells, pa.Array | pa.ChunkedArray):
        return cells
    if not isinstance(cells, list):
        return None
    types = {type(cell) for cell in cells if cell is not None}
    if types and all(issubclass(kind, Mapping) for kind in types):
        is_media = all(set(cell or ()) <= {"bytes", "path"} for cell in cells)
        media = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        return pa.array(cells, media) if is_media else _arrow_rows(cells)
    if any(issubclass(kind, np.ndarray | Tensor | tuple | Mapping) for kind in types):
        return None
    try:
        return pa.array(cells) if types else pa.nulls(len(cells), pa.string())
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        if all(issubclass(kind, str | Number) for kind in types):
            return pa.array([None if cell is None else str(cell) for cell in cells], pa.string())
        return None


def _arrow_rows(rows: Sequence[Mapping[str, Any] | None]) -> Any:
    """Return rows of a tabular modality as structs; None: they hold more than numbers and text."""
    cells = [cell for row in rows for cell in (row or {}).values()]
    if not cells or not all(cell is None or isinstance(cell, str | Number) for cell in cells):
        return None
    names = list(dict.fromkeys(str(name) for row in rows for name in row or {}))
    columns = [
        arrow_column(column_cells([(row or {}).get(name) for row in rows])) for name in names
    ]
    return pa.StructArray.from_arrays(columns, names, mask=pa.array([x is None for x in rows]))


def read_objects(settings: TableSettings) -> LoadedTable:
    """Read the table or data set in memory that `settings.root` is; objects stay as they are."""
    data, fields = settings.root, settings.field_names
    kind = f"the {type(data).__name__}"
    if is_hugging_face(data):
        return _read_hugging_face(settings)
    if type(data).__module__.partition(".")[0] == "pandas" and hasattr(data, "columns"):
        return _read_frame(data, kind)
    if hasattr(data, "__arrow_c_stream__"):
        return LoadedTable(table=_arrow_table(data), source=kind)
    if isinstance(data, Mapping):
        if not _holds_tables(data):
            return read_columns(data, "the columns")
        parts = {str(x): _arrow_table(y).replace_schema_metadata(None) for x, y in data.items()}
        table = join_splits(parts, "the tables of the splits")
        return LoadedTable(table=table, source="the splits", split_rule="the keys of the dict")
    if isinstance(data, list | tuple):
        return read_rows(data, "the list", fields)
    is_stream = isinstance(data, IterableDataset)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not is_stream:
        return _read_map_style(data, fields, kind)
    if isinstance(data, Iterable) and not isinstance(data, str | bytes):
        return read_rows(_read_stream(data, kind), kind, fields)
    raise FusionZooError(f"{kind} is no table: give a DataFrame, dicts or a data set")


def is_table(data: Any) -> bool:
    """Whether data is a table or a data set in memory, rather than a name, a path or settings."""
    if isinstance(data, Mapping):
        return is_hugging_face(data) or _holds_tables(data) or _holds_columns(data)
    if isinstance(data, np.ndarray | Tensor):
        return False
    return not isinstance(data, str | bytes) and (
        is_hugging_face(data)
        or hasattr(data, "__arrow_c_stream__")
        or hasattr(data, "__getitem__")
        or isinstance(data, Iterable)
    )


def read_rows(rows: Sequence[Any], source: str, fields: Sequence[str]) -> LoadedTable:
    """Read a list of mappings, or of tuples whose entries `fields` names."""
    mappings = [as_row(row, fields, f"{source}, row {n}") for n, row in enumerate(rows, start=1)]
    if not mappings:
        raise FusionZooError(f"{source} has no rows")
    names = dict.fromkeys(name for row in mappings for name in row)
    return read_columns({name: [row.get(name) for row in mappings] for name in names}, source)


def read_columns(columns: Mapping[str, Any], source: str) -> LoadedTable:
    """Read columns of equal length: lists, arrays, tensors, Series."""
    if not columns:
        raise FusionZooError(f"{source}: there is no column")
    lengths = {str(name): len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{name!r} has {length:,}" for name, length in lengths.items())
        raise FusionZooError(f"{source}: the columns differ in their number of values: {counts}")
    arrays: dict[str, Any] = {}
    memory: dict[str, Any] = {}
    kinds: dict[str, str] = {}
    for name, values in ((str(name), values) for name, values in columns.items()):
        cells = column_cells(values)
        array = arrow_column(cells)
        if array is None:
            memory[name] = MediaCells(cells)
            kinds |= _kind(name, cells)
            array = row_numbers(np.array([cell is not None for cell in cells], dtype=bool))
        arrays[name] = array
    return LoadedTable(table=pa.table(arrays), source=source, memory=memory, kinds=kinds)


def _read_hugging_face(settings: TableSettings) -> LoadedTable:
    data, fields = settings.root, settings.field_names
    if (getattr(data, "format", None) or {}).get("type") == "custom":
        return _read_map_style(data, fields, "the Dataset with a transform")
    return read_hugging_face(data, _read_stream, partial(read_rows, fields=fields))


def _read_map_style(data: Any, fields: Sequence[str], source: str) -> LoadedTable:
    items = Items(data, fields, source)
    columns: dict[str, list[Any]] = {}
    large: dict[str, Any] = {}  # name -> the first image, clip or array of entries that have any
    for index in range(len(items)):
        row = items[index]
        columns |= {name: [None] * index for name in row if name not in columns}
        for name, cells in columns.items():
            value = row.get(name)
            if not _is_short(value):  # it is read again when it is used
                large.setdefault(name, value)
                value = True
            cells.append(value)
    if not columns:
        raise FusionZooError(f"{source} has no items")
    # Large values stand in the table as the numbers of their rows, like other objects.
    has_value = {name: np.array([x is not None for x in columns[name]]) for name in large}
    loaded = read_columns({**columns, **{x: row_numbers(y) for x, y in has_value.items()}}, source)
    kinds = dict(loaded.kinds)
    memory = dict(loaded.memory)
    for name in columns:
        if name in large:
            kinds |= _kind(name, [large[name]])
            memory[name] = MediaCells(items, name)
    return LoadedTable(table=loaded.table, source=source, memory=memory, kinds=kinds)


def _read_stream(rows: Iterable[Any], source: str) -> list[Any]:
    read = list(islice(rows, STREAM_LIMIT + 1))
    if len(read) > STREAM_LIMIT:
        raise FusionZooError(
            f"{source} is a stream of more than {STREAM_LIMIT:,} samples: give `list(stream)`, or"
            " `fusionzoo.convert` it to a folder"
        )
    return read


def _read_frame(frame: Any, source: str) -> LoadedTable:
    """Read a DataFrame of pandas; a column that Arrow cannot hold stays as objects."""
    try:
        return LoadedTable(table=mark_index(pa.Table.from_pandas(frame)), source=source)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        if not frame.columns.is_unique:
            raise FusionZooError(f"{source} has two columns of one name: rename one") from error
    index = pa.Table.from_pandas(frame[[]])
    levels = dict(zip(index.column_names, index.columns, strict=True))
    loaded = read_columns({**{str(x): frame[x] for x in frame.columns}, **levels}, source)
    table = mark_index(loaded.table.replace_schema_metadata(index.schema.metadata))
    return replace(loaded, table=table)


def _arrow_table(data: Any) -> pa.Table:
    with explained("the table cannot be read", pa.ArrowException, TypeError, ValueError):
        return pa.table(data)


def _kind(name: str, cells: Any) -> dict[str, str]:
    """Return the kind of a column of PIL images or clips, which the first value tells."""
    first = next((cell for cell in cells if cell is not None), None)
    if isinstance(first, list):
        lists = [cell if isinstance(cell, list) else [cell] for cell in cells if cell is not None]
        return _kind(name, [item for items in lists for item in items][:1])
    if isinstance(first, Audio) or hasattr(first, "get_all_samples"):
        return {name: "audio"}
    if isinstance(first, Mapping):
        return {name: "audio"} if "sampling_rate" in first else {}
    if isinstance(first, tuple):
        is_pair = len(first) == 2 and isinstance(first[1], int) and not isinstance(first[0], str)
        return {name: "audio"} if is_pair and hasattr(first[0], "__len__") else {}
    return {name: "image"} if hasattr(first, "getbands") else {}


def _holds_tables(data: Mapping[str, Any]) -> bool:
    return bool(data) and all(hasattr(value, "__arrow_c_stream__") for value in data.values())


def _holds_columns(data: Mapping[str, Any]) -> bool:
    """Whether every value of a mapping is a column, as no data set's settings are."""
    return bool(data) and all(
        hasattr(value, "__len__")
        and hasattr(value, "__getitem__")
        and not isinstance(value, str | bytes | Mapping)
        for value in data.values()
    )
