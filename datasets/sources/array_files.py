"""Views and labels as papers ship them, read as a table: .mat (v5, v7.3), .npz, folders of CSV.

Shapes: `N` samples, `D` width of a view, `K` classes.
"""

from __future__ import annotations

import json
import math
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from fusionzoo.errors import FusionZooError, explained
from fusionzoo.ground.cells import fold

from ..media.arrays import NUMBERS, WORDS, array_names, hdf5, is_stored_elsewhere, open_array
from ..media.budgets import check_expansion
from ..tables.provenance import FUSIONZOO, TARGET, Provenance
from ..tables.table import ROLES, name_modality

LABEL = "label"  # the column of labels
LABELS = (  # names of arrays of labels, as `_letters` returns them; of several the first is read
    *("gt", "gnd", "truth", "truelabel", "truelabels", "groundtruth", "label", "labels"),
    *("y", "target", "targets", "class", "classes"),
)
VIEWS = ("x", "data", "views", "view", "fea", "feature", "features")
SPLITS = {
    **dict.fromkeys(("train", "tr", "trn"), "train"),
    **dict.fromkeys(("val", "valid", "dev"), "val"),
    **dict.fromkeys(("test", "te", "tst"), "test"),
}
PART = re.compile(rf"(?P<base>.*[^_])_(?P<split>{'|'.join(SPLITS)})", re.I)
NUMBERED = re.compile(r"(?P<stem>.*?)(?P<number>[0-9]+)")
HDF5_STARTS = (b"MATLAB 7.3", b"\x89HDF\r\n\x1a\n")
COMPRESSED = 15  # type of an element of a .mat file that zlib compressed
MAT_HEADER = 128  # bytes before the first element
MAX_WHOLE = 2.0**53  # whole numbers from here on are not all float64
MAX_SHOWN = 20  # variables that a message names
HOW_TO_SAVE = (
    "expected views as a cell array X, as x1, x2, ..., or as arrays of names of your own, and a"
    " label per sample as Y, gt, gnd, labels or truth; for a fixed split x1_train, gt_train,"
    " x1_test, gt_test"
)


@dataclass(frozen=True)
class Unread:
    """A variable that is never read, and what it is."""

    what: str


@dataclass(frozen=True, kw_only=True)
class _Part:
    """The samples of one split, or of the whole file."""

    views: dict[str, np.ndarray]  # (N, D), or (N, T, D) of sequences
    labels: pa.Array  # (N,)
    notes: tuple[str, ...] = ()


@dataclass
class _File:
    """A file's variables: arrays, cells as lists of arrays, and what is not read."""

    path: Path
    variables: dict[str, Any]
    used: set[str] = field(default_factory=set)

    @property
    def first_class(self) -> int:
        """The number of the class of a one-hot label's first column."""
        return 1 if self.path.suffix.lower() == ".mat" else 0

    def refuse(self, problem: str) -> FusionZooError:
        """Return the error of a file that is laid out in another way."""
        shown = [f"{name} {_shape_words(x)}" for name, x in self.variables.items()]
        more = f" and {len(shown) - MAX_SHOWN} more" if len(shown) > MAX_SHOWN else ""
        holds = f"{', '.join(shown[:MAX_SHOWN])}{more}" if shown else "nothing"
        return FusionZooError(f"{self.path} {problem}. It holds {holds}; {HOW_TO_SAVE}")


def is_view_folder(folder: Path) -> bool:
    """Whether a folder is like ROSMAP: `1_tr.csv`, `2_tr.csv`, `labels_tr.csv`, `1_te.csv`, ..."""
    stems = [path.stem for path in folder.glob("*.csv")]
    matches = [match for stem in stems if (match := PART.fullmatch(stem))]
    bases = [x["base"] for x in matches if SPLITS[x["split"].lower()] == "train"]
    labels = [base for base in bases if _letters(base) in LABELS]
    return 0 < len(labels) < len(bases)


def read_array_file(path: Path) -> tuple[pa.Table, Provenance]:
    """Read a .mat or .npz file, or a folder of CSV files that `is_view_folder` knows.

    Returns a column of lists per view, `label`, and `split` if names say it. Views are a cell array
    (named view1, view2, ...), arrays numbered alike (x1, x2, ...), or else all arrays with as many
    rows, or columns, as there are labels.
    """
    if path.is_dir():
        variables = {file.stem: _read_csv(file) for file in sorted(path.glob("*.csv"))}
    else:
        variables = _read_npz(path) if path.suffix.lower() == ".npz" else _read_mat(path)
    file = _File(path, variables)
    by_split = _by_split(file)
    parts = {split: _read_part(file, split, names) for split, names in by_split.items()}
    columns, kinds = _joined_views(file, parts)
    labels = [part.labels for part in parts.values()]
    if len({x.type for x in labels}) > 1:
        raise file.refuse("has labels of several types in its splits")
    columns[LABEL] = pa.concat_arrays(labels)
    if list(parts) != [""]:
        splits = [split for split, part in parts.items() for _ in range(len(part.labels))]
        columns["split"] = pa.array(splits, pa.string())
    notes = [note for part in parts.values() for note in part.notes]
    unused = [name for name in file.variables if name not in file.used]
    notes += [f"left out: {', '.join(unused[:MAX_SHOWN])}"] if unused else []
    facts = json.dumps({"kinds": kinds, TARGET: LABEL}).encode()
    table = pa.table(columns).replace_schema_metadata({FUSIONZOO: facts})
    return table, Provenance(reading=tuple(dict.fromkeys(notes)))


def _shape_words(value: Any) -> str:
    if isinstance(value, Unread):
        return f"({value.what})"
    if isinstance(value, list):
        return f"(cells of {', '.join(_shape_words(x) for x in value[:MAX_SHOWN])})"
    return f"({' x '.join(map(str, value.shape))})"


# ---- parts, views and labels


def _by_split(file: _File) -> dict[str, dict[str, str]]:
    """Return the names of variables by split and by name without the split; '' is no split."""
    whole = {name: name for name in file.variables}
    parts: dict[str, dict[str, str]] = {}
    for name in file.variables:
        if match := PART.fullmatch(name):
            split = SPLITS[match["split"].lower()]
            if match["base"] in parts.setdefault(split, {}):
                raise file.refuse(f"has two variables of {match['base']} for the split {split}")
            parts[split][match["base"]] = name
    if "train" not in parts:
        return {"": whole}
    return {x: parts[x] for x in ("train", "val", "test") if x in parts}


def _read_part(file: _File, split: str, names: Mapping[str, str]) -> _Part:
    """Read the views and labels of a split from the variables `names`, by name without it."""
    of_split = f" for the split {split}" if split else ""
    label = next((x for word in LABELS for x in names if _letters(x) == word), None)
    if label is None:
        raise file.refuse(f"has no labels{of_split}")
    given = {x: file.variables[name] for x, name in names.items() if x != label}
    # Labels written in two ways are no view, which would tell the target.
    views, used, is_named = _find_views({x: y for x, y in given.items() if not _is_label(x, y)})
    if not views:
        raise file.refuse(f"has no views{of_split}")
    labels, note = _read_labels(file, names[label], _sizes(views))
    count = len(labels)
    if not is_named:
        fits = {x: y for x, y in views.items() if count in y.shape[: 2 if y.ndim == 2 else 1]}
        if not fits:
            raise file.refuse(f"has {count:,} labels{of_split}, and no array of as many samples")
        used &= fits.keys()
        views = fits
    file.used |= {names[label], *(names[x] for x in used)}
    views, notes = _oriented(file, views, count, of_split)
    return _Part(views=views, labels=labels, notes=(*notes, *note))


def _is_label(name: str, value: Any) -> bool:
    """Whether a variable is called as labels are; Y may be a view beside a view X."""
    word = _letters(name)
    is_view = word == "y" and _are_matrices([value]) and not np.isin(value, (0, 1)).all()
    return word in LABELS and not (is_view and min(value.shape) > 1)


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _find_views(given: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], set[str], bool]:
    """Return the views, the variables that hold them, and whether their names say that they do."""
    cells = {x: y for x, y in given.items() if isinstance(y, list) and _are_matrices(y)}
    cells = {x: y for x, y in cells.items() if _letters(x) in VIEWS} or cells
    if len(cells) == 1:
        name, values = next(iter(cells.items()))
        return {f"view{n}": x for n, x in enumerate(values, start=1)}, {name}, True
    arrays = {
        x: y
        for x, y in given.items()
        if isinstance(y, np.ndarray) and y.dtype.kind in NUMBERS and y.ndim in (2, 3)
    }
    stems: dict[str, list[str]] = {}
    for name in arrays:
        if match := NUMBERED.fullmatch(name):
            stems.setdefault(match["stem"].lower(), []).append(name)
    numbered = max(stems.values(), key=len, default=[])
    if len(numbered) > 1:
        order = sorted(numbered, key=_number)
        return {x: arrays[x] for x in order}, {*order}, True
    # A row or column of numbers, such as indices, is no view unless it is named as one.
    wide = {x: y for x, y in arrays.items() if min(y.shape) > 1}
    named = {x: y for x, y in arrays.items() if _letters(x) in VIEWS}
    if named and len(wide) == len(named):
        return named, {*named}, True
    return wide, {*wide}, False


def _number(name: str) -> int:
    match = NUMBERED.fullmatch(name)
    return int(match["number"]) if match else 0


def _are_matrices(values: Sequence[Any]) -> bool:
    return bool(values) and all(
        isinstance(x, np.ndarray) and x.dtype.kind in NUMBERS and x.ndim == 2 and x.size > 1
        for x in values
    )


def _sizes(views: Mapping[str, np.ndarray]) -> set[int]:
    """Return the numbers that all arrays have as a side, or some: those of samples, perhaps."""
    sides = [{*x.shape[:2]} for x in views.values()]
    return set.intersection(*sides) or set.union(*sides)


def _oriented(
    file: _File, views: Mapping[str, np.ndarray], count: int, of_split: str
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return the views as (N, D), square ones as the others are, and notes of what was turned."""
    can_be = {
        x: (y.shape[0] == count, y.ndim == 2 and y.shape[1] == count) for x, y in views.items()
    }
    for name, fits in can_be.items():
        if not any(fits):
            raise file.refuse(
                f"has {count:,} labels{of_split}, which fit neither rows nor columns of {name}"
            )
    clear = {fits for fits in can_be.values() if fits[0] != fits[1]}
    by_columns = clear == {(False, True)}
    turned = [x for x, fits in can_be.items() if not fits[0] or (fits[1] and by_columns)]
    square = [x for x, fits in can_be.items() if all(fits)]
    oriented = {x: y.T if x in turned else y for x, y in views.items()}
    notes = [f"samples are the columns of {', '.join(turned)}"] if turned else []
    if square:
        reason = "as in the other views" if clear else "rows are samples"
        side = "columns" if by_columns else "rows"
        notes.append(
            f"{', '.join(square)}{of_split} is {count} x {count}: its {side} are samples ({reason})"
        )
    return oriented, notes


def _joined_views(
    file: _File, parts: Mapping[str, _Part]
) -> tuple[dict[str, pa.Array], dict[str, str]]:
    """Return a column of lists per view, over all splits, and the kinds of the views."""
    columns: dict[str, pa.Array] = {}
    kinds: dict[str, str] = {}
    first = next(iter(parts.values()))
    if any(part.views.keys() != first.views.keys() for part in parts.values()):
        raise file.refuse("has other views in another split")
    for name in first.views:
        arrays = [part.views[name] for part in parts.values()]
        if len({x.shape[1:] for x in arrays}) > 1:
            raise file.refuse(f"has the view {name} in several widths")
        values = np.concatenate(arrays)
        modality = name_modality(f"view{name}" if name.isdigit() else name)
        modality = f"my_{modality}" if fold(modality) in (*ROLES, "group") else modality
        with np.errstate(over="ignore", invalid="ignore"):
            numbers = np.ascontiguousarray(values, np.float32)
        if (np.isinf(numbers) & np.isfinite(values)).any():
            raise file.refuse(f"has numbers in {name} beyond those of float32")
        columns[modality] = _lists(numbers)
        kinds[modality] = "vector" if values.ndim == 2 else "sequence"
    return columns, kinds


def _lists(values: np.ndarray) -> pa.Array:
    """Return an array (N, D) or (N, T, D) as lists of numbers, or lists of such lists."""
    column = pa.array(values.reshape(-1))
    for depth in range(values.ndim - 1, 0, -1):
        count, width = math.prod(values.shape[:depth]), values.shape[depth]
        offsets = pa.array(np.arange(count + 1, dtype=np.int64) * width)
        column = pa.LargeListArray.from_arrays(offsets, column)
    return column


def _read_labels(file: _File, name: str, sizes: set[int]) -> tuple[pa.Array, tuple[str, ...]]:
    """Return the labels (N,) as whole numbers, numbers, text or lists, and notes of how."""
    value = file.variables[name]
    if isinstance(value, list):
        value = _labels_of_cells(file, name, value)
    if isinstance(value, Unread):
        raise file.refuse(f"has labels {name} that are not read")
    if value.dtype.kind == "U":
        return pa.array([str(x).strip() for x in value.ravel()], pa.string()), ()
    if value.ndim < 2 or min(value.shape) == 1:
        return _plain_labels(value.ravel(order="F")), ()
    is_binary = value.ndim == 2 and bool(np.isin(value, (0, 1)).all())
    if not is_binary:
        raise file.refuse(f"has labels {name} that are neither one a sample nor one-hot")
    start = file.first_class
    for rows in (value, value.T):
        if len(rows) in sizes and (rows.sum(axis=1) == 1).all():
            labels = rows.argmax(axis=1) + start
            return pa.array(labels, pa.int64()), (f"{name}: one-hot, classes from {start}",)
    rows = value if len(value) in sizes else value.T
    lists = [[str(x + start) for x in np.flatnonzero(row)] for row in rows]
    note = f"{name}: several labels a sample, numbered from {start}"
    return pa.array(lists, pa.list_(pa.string())), (note,)


def _labels_of_cells(file: _File, name: str, cells: Sequence[Any]) -> np.ndarray:
    """Return the labels in a cell array: a text a sample, or the same labels for each view."""
    if any(isinstance(x, Unread | list) for x in cells) or not cells:
        raise file.refuse(f"has labels {name} that are not read")
    if all(x.dtype.kind == "U" for x in cells):
        return np.array(["".join(x.ravel().tolist()) for x in cells])
    if all(x.size == 1 for x in cells):
        return np.concatenate([x.ravel() for x in cells])
    if any(x.size != cells[0].size or (x.ravel() != cells[0].ravel()).any() for x in cells):
        raise file.refuse(f"has labels {name} that differ from view to view")
    first: np.ndarray = cells[0]
    return first


def _plain_labels(values: np.ndarray) -> pa.Array:
    """Return whole numbers as such, others as float64; NaN is null."""
    if values.dtype.kind in "biu":
        return pa.array(values.astype(np.int64))
    known = np.isfinite(values)
    numbers = values[known]
    if (numbers == np.round(numbers)).all() and (np.abs(numbers) < MAX_WHOLE).all():
        whole = np.where(known, values, 0).astype(np.int64)
        return pa.array(whole, mask=~known)
    return pa.array(values.astype(np.float64), mask=~known)


# ---- a folder of CSV files


def _read_csv(path: Path) -> np.ndarray | Unread:
    """Return the numbers (N, D) of a file, with or without a header; what it is if it has text."""
    import pyarrow.csv as pv

    kinds = pv.ConvertOptions(null_values=["", "NA", "nan", "NaN"])
    for skipped in (0, 1):
        options = pv.ReadOptions(skip_rows=skipped, autogenerate_column_names=True)
        with explained(f"{path} cannot be read", pa.ArrowInvalid):
            table = pv.read_csv(path, read_options=options, convert_options=kinds)
        kinds_of_text = (pa.types.is_string, pa.types.is_binary)  # binary: text that is not UTF-8
        if not any(is_text(x.type) for x in table.columns for is_text in kinds_of_text):
            columns = [column.cast(pa.float64()).to_numpy() for column in table.columns]
            return np.stack(columns, axis=1)
    return Unread("text")


# ---- .npz


def _read_npz(path: Path) -> dict[str, Any]:
    """Return the arrays of an .npz file; pickles in it are never loaded."""
    variables: dict[str, Any] = {}
    for name in array_names(path):
        try:
            array = np.asarray(open_array(path, name, NUMBERS + WORDS))
            variables[name] = array.astype(str) if array.dtype.kind == "S" else array
        except FusionZooError as error:
            if "never loaded" not in str(error):
                raise
            variables[name] = Unread("Python objects, never loaded")
    return variables


# ---- .mat


def _read_mat(path: Path) -> dict[str, Any]:
    """Return the variables of a .mat file; nothing of MATLAB's objects and functions is read."""
    with path.open("rb") as file:
        head = file.read(16)
        if not head.startswith(HDF5_STARTS):
            _check_compressed(path, file, head)
    if head.startswith(HDF5_STARTS):
        return _read_hdf5(path)
    from scipy.io import loadmat

    with explained(f"{path} cannot be read as .mat"):
        stored = loadmat(path)
    return {name: _plain(value) for name, value in stored.items() if not name.startswith("__")}


def _plain(value: Any) -> Any:
    """Return a variable of scipy as an array, a list of those in its cells, or what it is."""
    if hasattr(value, "toarray"):
        check_expansion("a sparse matrix", value.nnz * 16, math.prod(value.shape) * 8)
        value = value.toarray()
    if not isinstance(value, np.ndarray) or value.dtype.names:
        return Unread("struct")
    if value.dtype == object:
        return [_plain(x) for x in value.ravel(order="F")]
    return value if value.dtype.kind in NUMBERS + "U" else Unread(str(value.dtype))


def _check_compressed(path: Path, file: BinaryIO, head: bytes) -> None:
    """Raise an error for a file whose elements would take far more memory than it has bytes."""
    if 0 in head[:4]:
        return  # version 4, which compresses nothing
    file.seek(MAT_HEADER - 2)
    order = "<" if file.read(2) == b"IM" else ">"
    size, needed = path.stat().st_size, 0
    while len(tag := file.read(8)) == 8:
        kind, length = struct.unpack(f"{order}II", tag)
        if kind != COMPRESSED:
            file.seek(length, 1)
            continue
        stream, end = zlib.decompressobj(), file.tell() + length
        while file.tell() < end and not stream.eof:
            rest = file.read(min(1 << 16, end - file.tell()))
            if not rest:
                break  # cut off, which scipy says
            while rest:
                needed += len(stream.decompress(rest, 1 << 20))
                rest = stream.unconsumed_tail
                check_expansion(str(path), size, needed)
        file.seek(end)


def _read_hdf5(path: Path) -> dict[str, Any]:
    """Return the variables of a file of MATLAB 7.3, which is HDF5 with transposed arrays."""
    try:
        h5py = hdf5()
    except FusionZooError as error:
        raise FusionZooError(f"{path} is of MATLAB 7.3: {error}, or save it as -v7") from error
    with explained(f"{path} cannot be read as .mat"), h5py.File(path, "r") as file:
        is_plain = {x: isinstance(file.get(x, getlink=True), h5py.HardLink) for x in file}
        names = [name for name in file if is_plain[name] and not name.startswith("#")]
        return {name: _read_object(path, file, file[name]) for name in names}


def _read_object(path: Path, file: Any, stored: Any, *, in_cell: bool = False) -> Any:
    """Return a dataset as an array in MATLAB's order of axes, a cell array as a list of those."""
    h5py = hdf5()
    if not isinstance(stored, h5py.Dataset):
        return _read_sparse(path, stored) if "MATLAB_sparse" in stored.attrs else Unread("struct")
    if is_stored_elsewhere(stored):
        raise FusionZooError(f"{path}: {stored.name} is stored in other files, which are not read")
    if stored.dtype == h5py.ref_dtype:
        if in_cell:
            return Unread("cells in cells")
        references = stored[()].T.ravel(order="F")
        return [_read_object(path, file, file[x], in_cell=True) for x in references if x]
    check_expansion(str(path), path.stat().st_size, stored.size * 8)
    if stored.attrs.get("MATLAB_empty"):
        return np.zeros((0, 0))
    if stored.dtype.kind not in NUMBERS:
        return Unread(str(stored.dtype))
    values = np.asarray(stored[()]).T
    if stored.attrs.get("MATLAB_class") in (b"char", "char"):
        return np.array(["".join(map(chr, row)) for row in np.atleast_2d(values)])
    return values


def _read_sparse(path: Path, group: Any) -> np.ndarray:
    """Return a sparse matrix of MATLAB 7.3, in compressed columns, as a dense one."""
    from scipy.sparse import csc_matrix

    starts = group["jc"][()]
    shape = int(group.attrs["MATLAB_sparse"]), len(starts) - 1
    check_expansion(str(path), path.stat().st_size, math.prod(shape) * 8)
    if "data" not in group:
        return np.zeros(shape)
    dense: np.ndarray = csc_matrix((group["data"][()], group["ir"][()], starts), shape).toarray()
    return dense
