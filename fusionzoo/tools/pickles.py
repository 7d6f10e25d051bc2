"""Convert pickles of features, as MMSA distributes them; nothing in one is imported or called."""

from __future__ import annotations

import math
import mmap
import pickle
import re
import reprlib
import shutil
import struct
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fusionzoo.cells import read_cell
from fusionzoo.datasets.tables.provenance import with_kinds
from fusionzoo.datasets.tables.splits import SPLITS
from fusionzoo.errors import FusionZooError, one_line

PLAIN = "biufSU"  # kinds of dtypes whose values are bytes of a fixed size
MAX_DIMS = 64  # of an array, as in NumPy
MAX_BITS = 1023  # of an integer, so that it fits into a float
# Bytes that calls may make: a pickle can name one value many times, and copy it each time.
MADE, MADE_PER_BYTE = 64 << 20, 16
short = reprlib.repr  # a few values and levels: nested pairs of one list have 2^depth
SPLIT_NAMES = {"train": "train", "training": "train", "test": "test", "testing": "test"}
ID_KEYS = ("id", "ids", "ID")
TOKENS = {"text_bert": "token ids of BERT, no features"}
EXPECTED = "{'train': {'id': [...], 'audio': array (N, T, D), 'labels': array (N,), ...}, ...}"
TARGETS = ("annotations", "classification_labels", "labels", "label", "regression_labels")
NonFinite = Literal["raise", "zero"]


class Refused(Exception):
    """A pickle asks for something else than arrays and containers."""


def check_keys(keys: Iterable[Any]) -> None:
    """Refuse keys that are neither numbers nor text: the hash of nested tuples can take years."""
    for key in keys:
        parts = key if isinstance(key, tuple) else (key,)
        if not all(part is None or isinstance(part, str | bytes | int | float) for part in parts):
            raise Refused(f"a key or an element of a set that is {short(key):.40}")


class DType:
    """A NumPy dtype as a pickle describes it: `f4` and, as its state, the byte order."""

    def __init__(self, name: Any, align: Any = False, copy: Any = False) -> None:
        if isinstance(name, bytes):
            name = name.decode("ascii", "replace")
        if not isinstance(name, str) or name.lstrip("<>=|")[:1] not in f"{PLAIN}O":
            raise Refused(f"an array of type {short(name):.40}")
        self.name, self.order = name, ""

    def set_state(self, state: Any) -> None:
        """Take the byte order; fields of a structured dtype are refused."""
        parts = list(state) if isinstance(state, tuple) else []
        if parts[2:5] != [None] * 3 or parts[1] not in ("<", ">", "|", "="):
            raise Refused(f"an array of a structured type {self.name!r:.40}")
        self.order = parts[1]

    @property
    def is_object(self) -> bool:
        """Whether the values are objects of Python."""
        return self.name.lstrip("<>=|").startswith("O")

    def numpy(self) -> np.dtype[Any]:
        """Return the dtype."""
        if self.is_object:
            return np.dtype(object)
        dtype = np.dtype(self.name)
        return dtype.newbyteorder(self.order) if self.order in ("<", ">") else dtype  # type: ignore[arg-type]


class Array:
    """An array as a pickle describes it: empty at first, its state follows."""

    value: np.ndarray

    def __init__(self, *_: Any) -> None:
        self.value = np.zeros(0)

    def set_state(self, state: Any) -> None:
        """Take (version, shape, dtype, is it in Fortran order, data)."""
        if not (isinstance(state, tuple) and len(state) in (4, 5)):
            raise Refused("an array of an unknown format")
        shape, dtype, fortran_order, data = state[-4:]
        self.value = _array(data, dtype, shape, "F" if fortran_order else "C")


def _array(data: Any, dtype: Any, shape: Any, order: Any = "C") -> np.ndarray:
    """Return an array of data whose size is that of its shape."""
    is_shape = isinstance(shape, tuple) and len(shape) <= MAX_DIMS
    is_shape = is_shape and all(type(n) is int and n >= 0 for n in shape)
    if not (is_shape and isinstance(dtype, DType)):
        raise Refused("an array of an unknown format")
    count = math.prod(shape)
    if dtype.is_object:
        if not isinstance(data, list) or len(data) != count:
            raise Refused(f"an array of shape {short(shape)} with other data")
        objects = np.empty(count, dtype=object)
        for number, value in enumerate(data):
            objects[number] = plain(value)
        return objects.reshape(shape, order=order)
    if isinstance(data, str):  # of protocols 0 to 2, where bytes are written as Latin-1
        data = data.encode("latin-1")
    if not isinstance(data, bytes | bytearray) or len(data) != count * dtype.numpy().itemsize:
        raise Refused(f"an array of shape {short(shape)} and type {dtype.name} with other data")
    return np.frombuffer(data, dtype.numpy()).reshape(shape, order=order)


def _from_buffer(data: Any, dtype: Any, shape: Any, order: Any = "C") -> Array:
    if order not in ("C", "F"):
        raise Refused("an array of an unknown format")
    array = Array()
    array.value = _array(bytes(data), dtype, shape, order)
    return array


def _scalar(dtype: Any, data: Any = b"") -> Any:
    return _array(data, dtype, ()).item()


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise Refused("bytes of an unknown encoding")
    return text.encode("latin-1")


def _container(kind: Callable[..., Any], *types: type) -> Callable[..., Any]:
    """Return a function that makes a container of at most one other."""

    def make(*arguments: Any) -> Any:
        if len(arguments) > 1 or not all(isinstance(argument, types) for argument in arguments):
            raise Refused(f"a {kind.__name__} of other arguments")
        if kind is not list and kind is not tuple:
            for argument in arguments:
                check_keys(argument)
        return kind(*arguments)

    return make


NAMES: dict[tuple[str, str], Callable[..., Any]] = {
    **{
        (f"numpy.{core}.{module}", name): function
        for core in ("core", "_core")
        for module, name, function in (
            ("multiarray", "_reconstruct", Array),
            ("multiarray", "scalar", _scalar),
            ("numeric", "_frombuffer", _from_buffer),
        )
    },
    ("numpy", "ndarray"): Array,
    ("numpy", "dtype"): DType,
    ("_codecs", "encode"): _encode,
    ("collections", "OrderedDict"): _container(dict, list, dict),
    **{
        (module, kind.__name__): _container(kind, list, tuple, set, bytes)
        for module in ("builtins", "__builtin__")
        for kind in (set, frozenset, list, tuple, bytes, bytearray)
    },
}


class Unpickler(pickle._Unpickler):
    """Python's reader in pure Python, whose memory is bounded by the file, without its calls.

    The one in C takes up to 64 GiB if a pickle of a few bytes asks for it.
    """

    stack: list[Any]
    read: Callable[[int], bytes]
    append: Callable[[Any], None]
    made = 0  # bytes that calls have made
    limit = MADE
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        function = NAMES.get((module, name))
        if function is None:
            raise Refused(f"{module}.{name}"[:80])
        return function

    def persistent_load(self, pid: Any) -> Any:
        raise Refused("objects outside of the file")

    def load_build(self) -> None:
        """Set the state of an array or a dtype, of nothing else."""
        state = self.stack.pop()
        if not isinstance(self.stack[-1], Array | DType):
            raise Refused(f"the state of a {type(self.stack[-1]).__name__}")
        self.stack[-1].set_state(state)

        self._count(self.stack[-1])

    def load_reduce(self) -> None:
        """Call a function of `NAMES`."""
        super().load_reduce()  # type: ignore[misc]
        self._count(self.stack[-1])

    def _instantiate(self, klass: Any, args: Any) -> None:
        super()._instantiate(klass, args)  # type: ignore[misc]
        self._count(self.stack[-1])

    def _count(self, value: Any) -> None:
        """Add up what calls make, before it takes the machine's memory."""
        value = plain(value)
        self.made += value.nbytes if isinstance(value, np.ndarray) else sys.getsizeof(value)
        if self.made > self.limit:
            raise Refused(f"more than {self.limit:,} bytes, by copying what it holds")

    def load_bytearray8(self) -> None:
        """Read a bytearray; Python's own makes room for it before it looks at the file."""
        (length,) = struct.unpack("<Q", self.read(8))
        data = self.read(min(length, sys.maxsize))
        if len(data) < length:
            raise EOFError(f"the file ends within a bytearray of {length:,} bytes")
        self.append(bytearray(data))

    dispatch |= {
        pickle.BUILD[0]: load_build,
        pickle.REDUCE[0]: load_reduce,
        pickle.BYTEARRAY8[0]: load_bytearray8,
    }


def _checking_keys(load: Callable[[Unpickler], None], step: int) -> Callable[[Unpickler], None]:
    """Check what an opcode hashes, every `step`-th value behind the mark or the top two."""

    def checked(reader: Unpickler) -> None:
        check_keys(reader.stack[::step] if step else reader.stack[-2:-1])
        load(reader)

    return checked


def _checking_size(load: Callable[[Unpickler], None]) -> Callable[[Unpickler], None]:
    """Refuse an integer that is too large for a float, as no feature or label has one."""

    def checked(reader: Unpickler) -> None:
        load(reader)
        bits = int(reader.stack[-1]).bit_length()
        if bits > MAX_BITS:
            raise Refused(f"an integer of {bits:,} bits")

    return checked


for _opcode, _step in (
    (pickle.SETITEM, 0),
    (pickle.SETITEMS, 2),
    (pickle.DICT, 2),
    (pickle.ADDITEMS, 1),
    (pickle.FROZENSET, 1),
):
    _load = Unpickler.dispatch[_opcode[0]]
    Unpickler.dispatch[_opcode[0]] = _checking_keys(_load, _step)
for _opcode in (pickle.INT, pickle.LONG, pickle.LONG1, pickle.LONG4):
    Unpickler.dispatch[_opcode[0]] = _checking_size(Unpickler.dispatch[_opcode[0]])


def plain(value: Any) -> Any:
    """Return an array that was read as NumPy's; other values stay."""
    return value.value if isinstance(value, Array) else value


def read_pickle(path: Path) -> Any:
    """Read a pickle; its arrays are `Array` inside of containers, see `plain`."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            reader = Unpickler(data, encoding="latin-1")
            reader.limit = MADE + MADE_PER_BYTE * len(data)
            return plain(reader.load())
    except Refused as error:
        raise FusionZooError(
            f"{path} asks for {one_line(error)}: only arrays of NumPy and built-in containers are"
            " read, and nothing of the file was run"
        ) from None
    except OSError as error:
        raise FusionZooError(f"{path} cannot be opened: {error.strerror}") from error
    except Exception as error:
        raise FusionZooError(f"{path} is no pickle that can be read: {one_line(error)}") from error


SPLIT_NAMES |= dict.fromkeys(("val", "valid", "validation", "dev"), "val")


@dataclass(frozen=True)
class PickledSamples:
    """The values of each key, a part for each split, and the number of samples in each split."""

    parts: Mapping[str, Sequence[Any]]  # key -> by split, arrays (N, ...) or lists of N values
    counts: Mapping[str, int]  # split -> samples; a single "" if there are no splits

    @property
    def keys(self) -> list[str]:
        """The keys of features, labels and texts: not those of ids and lengths."""
        return [key for key in self.parts if key not in ID_KEYS and not self._is_lengths(key)]

    def _is_lengths(self, key: str) -> bool:
        return key.endswith("_lengths") and key.removesuffix("_lengths") in self.parts

    @property
    def splits(self) -> list[str]:
        """The split of each sample."""
        return [split for split, count in self.counts.items() for _ in range(count)]

    @property
    def ids(self) -> list[str]:
        """The id of each sample: split and number if there are no ids."""
        key = next((key for key in ID_KEYS if key in self.parts), None)
        if key is None:
            counts = self.counts.items()
            return [f"{split or 'sample'}-{n}" for split, count in counts for n in range(count)]
        cells = [read_cell(_single(value)) for part in self.parts[key] for value in list(part)]
        return [f"{cell:.17g}" if isinstance(cell, float) else str(cell or "") for cell in cells]

    def values(self, key: str) -> list[np.ndarray] | pa.Array | str:
        """Return the features of each sample, (D,) or (T, D), or their labels or texts as a column;
        or the reason why there are neither."""
        if key in TOKENS:
            return TOKENS[key]
        rows: list[Any] = []
        for part, (split, count) in zip(self.parts[key], self.counts.items(), strict=True):
            is_scalar = isinstance(part, np.ndarray) and not part.ndim
            if is_scalar or not isinstance(part, list | tuple | np.ndarray):
                return "one value for all samples"
            if len(part) != count:
                return f"{len(part):,} values of {count:,} samples ({split or 'all'})"
            rows += [plain(value) for value in part]
        if all(np.size(row) == 1 for row in rows if isinstance(row, np.ndarray)):
            return _column(rows)
        if not all(isinstance(row, np.ndarray) and row.dtype.kind in "biuf" for row in rows):
            return "neither features nor one value per sample"
        return self._features(key, rows)

    def _features(self, key: str, rows: Sequence[np.ndarray]) -> list[np.ndarray] | str:
        shapes = {(row.ndim, row.shape[-1]) for row in rows if row.size}
        if len(shapes) != 1 or next(iter(shapes))[0] not in (1, 2):
            return f"values of {len(shapes)} shapes, such as {rows[0].shape}"
        lengths = [step for part in self.parts.get(f"{key}_lengths", ()) for step in part]
        if not lengths:
            return list(rows)
        steps = [read_cell(_single(step)) for step in lengths]
        if len(steps) != len(rows) or not all(isinstance(step, float) for step in steps):
            return f"{len(steps):,} lengths of {len(rows):,} samples"
        return [row[: int(step or 0)] for row, step in zip(rows, steps, strict=True)]


def read_samples(path: Path) -> PickledSamples:
    """Read a pickle that maps splits to keys to values, or keys to values.

    Samples may be tuples, too, as the CMU-MultimodalSDK's users store them: `_by_key`.
    """
    data = read_pickle(path)
    if _are_tuples(data):
        data = _by_key(data, path)
    elif isinstance(data, dict) and any(map(_are_tuples, data.values())):
        data = {
            name: _by_key(part, path) if _are_tuples(part) else part for name, part in data.items()
        }
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise FusionZooError(f"{path} holds a {type(data).__name__}; expected a dict, {EXPECTED}")
    splits = _splits(data, path)
    keys = dict.fromkeys(key for values in splits.values() for key in values)
    for key in keys:
        lacking = [split for split, values in splits.items() if key not in values]
        if lacking or not isinstance(key, str):
            raise FusionZooError(f"{path}: split {''.join(lacking[:1])!r} has no key {key!r}")
    counts = {split: _count(values, path, split) for split, values in splits.items()}
    parts = {key: [plain(values[key]) for values in splits.values()] for key in keys}
    return PickledSamples(parts, counts)


def _are_tuples(part: Any) -> bool:
    """Whether a split is a list of samples ((words, vision, audio, ...), label, ...)."""
    first = part[0] if isinstance(part, list) and part else None
    if not isinstance(first, tuple) or len(first) not in (2, 3):
        return False
    return isinstance(first[0], tuple) and len(first[0]) in (3, 4)


def _by_key(samples: Sequence[Any], path: Path) -> dict[str, Any]:
    """Return by key the samples ((words, vision, audio[, words]), label[, id]) of a split.

    `text` is the words joined, or the features of words; numbers of a vocabulary are left out. Of
    several labels (sentiment and emotions of MOSEI) the others are `labels_2`, `labels_3`, ...
    """
    values: dict[str, list[Any]] = {}
    for number, sample in enumerate(samples, start=1):
        if not _are_tuples([sample]):
            raise FusionZooError(
                f"{path}: sample {number} is no ((words, vision, audio), label, id) as the first"
            )
        (words, vision, audio, *more), label, *ids = sample
        row = {"vision": vision, "audio": audio, **({"id": ids[0]} if ids else {})}
        for text in (*more, words):
            cells = plain(text)
            if isinstance(cells, np.ndarray) and cells.dtype.kind == "f":
                row["text"] = text
            elif isinstance(cells, list | np.ndarray) and all(isinstance(x, str) for x in cells):
                row["text"] = " ".join(map(str, cells))
                break
        labels = plain(label)
        labels = labels.ravel().tolist() if isinstance(labels, np.ndarray) else [labels]
        for place, x in enumerate(labels, start=1):
            row["labels" if place == 1 else f"labels_{place}"] = x
        for name, value in row.items():
            values.setdefault(name, []).append(value)
    return values


def _splits(data: Mapping[str, Any], path: Path) -> dict[str, dict[str, Any]]:
    """Return the splits under our names; a single "" if there are none."""
    names = {key: SPLIT_NAMES.get(key.lower()) for key in data}
    if not any(isinstance(data[key], dict) for key, name in names.items() if name):
        return {"": dict(data)}
    splits = {
        name: data[key] for key, name in names.items() if name and isinstance(data[key], dict)
    }
    if len(splits) < len(data):
        raise FusionZooError(
            f"{path}: its keys {', '.join(map(repr, data))} are not one each of the splits"
            f" {', '.join(SPLITS)}"
        )
    return splits


def _count(values: Mapping[str, Any], path: Path, split: str) -> int:
    """Return the number of samples: that of the ids, else the most frequent length."""
    sizes = {
        key: len(plain(value))
        for key, value in values.items()
        if isinstance(value, list | tuple) or (isinstance(value, Array) and value.value.ndim)
    }
    if not sizes:
        raise FusionZooError(
            f"{path}: split {split!r} holds no arrays or lists; expected {EXPECTED}"
        )
    lengths = [sizes[key] for key in ID_KEYS if key in sizes]
    return lengths[0] if lengths else Counter(sizes.values()).most_common(1)[0][0]


def _column(rows: Sequence[Any]) -> pa.Array | str:
    """Return one number or text per sample as a column, or the reason why that is impossible."""
    try:
        cells = [read_cell(_single(row)) for row in rows]
    except FusionZooError as error:
        return str(error)
    if any(isinstance(cell, str) for cell in cells):
        return pa.array([f"{x:g}" if isinstance(x, float) else x for x in cells], pa.string())
    return pa.array(cells, pa.float64())


def _single(value: Any) -> Any:
    """Return the only element of an array; other values stay."""
    value = plain(value)
    return value.item() if isinstance(value, np.ndarray) and value.size == 1 else value


@dataclass(frozen=True)
class Converted:
    """The manifest that was written, and lines that say what is in it."""

    manifest: Path
    notes: list[str]


def convert_pickle(source: Path, out: Path, *, nonfinite: NonFinite = "raise") -> Converted:
    """Convert the pickle `source` to `out/manifest.parquet` and a .npy file of each feature.

    Features that are not finite are an error or, with `nonfinite="zero"`, become zeros.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FusionZooError(f"{out} exists and is not an empty folder: name another one")
    partial = out.resolve().with_name(f"{out.resolve().name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        notes = _write(source, partial, nonfinite)
        if out.exists():
            out.rmdir()
        partial.rename(out)
    except OSError as error:
        raise FusionZooError(f"{out} cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Converted(out / "manifest.parquet", notes)


def _write(source: Path, folder: Path, nonfinite: NonFinite) -> list[str]:
    """Write manifest and features; return lines that say what they hold."""
    samples = read_samples(source)
    columns: dict[str, Any] = {"id": pa.array(samples.ids, pa.string())}
    if any(samples.splits):
        columns["split"] = pa.array(samples.splits)
    kinds, notes = {}, []
    for key in samples.keys:
        name, values = _column_name(key, {*columns, "split", "target"}), samples.values(key)
        if isinstance(values, str):
            notes.append(f"left out: {key!r}, {values}")
        elif isinstance(values, list):
            columns[name], note = _write_features(
                values, folder / f"{name}.npy", nonfinite, f"{source}, {key!r}"
            )
            kinds[name] = "vector" if values[0].ndim == 1 else "sequence"
            notes.append(f"{kinds[name]}: {name}, {note}")
        else:
            columns[name] = values
    if not kinds:
        raise FusionZooError(f"{source} holds no features: arrays (N, D) or (N, T, D) per split")
    labels = [name for name in TARGETS if name in columns]
    if labels:
        columns["target"] = columns[labels[0]]
    notes.append(_about_columns(columns, kinds, labels))
    table = pa.table(columns)
    table = table.replace_schema_metadata(with_kinds(table.schema, kinds).metadata)
    pq.write_table(table, folder / "manifest.parquet", write_page_checksum=True)
    return notes


def _about_columns(columns: dict[str, Any], kinds: Collection[str], labels: list[str]) -> str:
    """Say which columns there are besides the features, and how to learn others."""
    others = [name for name in columns if name not in (*kinds, "id", "split", "target")]
    target = f"target: {labels[0]}" if labels else "no target is known"
    choice = f" (--data.columns.target chooses among {', '.join(others)})" if others else ""
    return f"{target}{choice}"


def _write_features(
    values: Sequence[np.ndarray], path: Path, nonfinite: NonFinite, where: str
) -> tuple[pa.Array, str]:
    """Write features one behind the other; return each sample's cell, and a note.

    A sequence without steps is missing: its cell is null.
    """
    width, is_vector = next(row.shape[-1] for row in values if row.size), values[0].ndim == 1
    steps = [1 if is_vector else len(row) for row in values]
    array = np.lib.format.open_memmap(path, "w+", np.float32, (sum(steps), width))
    cells: list[str | None] = []
    start = replaced = 0
    for number, (row, count) in enumerate(zip(values, steps, strict=True)):
        numbers = row.astype(np.float32)
        wrong = ~np.isfinite(numbers)
        if wrong.any():
            if nonfinite == "raise":
                raise FusionZooError(
                    f"{where}, sample {number + 1}: {int(wrong.sum()):,} of {row.size:,} values"
                    " are not finite: --nonfinite zero puts zeros in their place"
                )
            numbers[wrong], replaced = 0, replaced + 1
        array[start : start + count] = numbers
        rows = start if is_vector else f"{start}:{start + count}"
        cells.append(f"{path.name}[{rows}]" if row.size else None)
        start += count
    array.flush()
    missing = f", {cells.count(None):,} of them missing" * (None in cells)
    zeros = f", with zeros for values that are not finite in {replaced:,}" * (replaced > 0)
    return pa.array(cells, pa.string()), f"{len(cells):,} samples, width {width}{missing}{zeros}"


def _column_name(key: str, taken: Collection[str]) -> str:
    """Return a key as the name of a column and of a file: letters, digits, `_` and `-`."""
    name = re.sub(r"[^A-Za-z0-9_-]", "_", key)[:60] or "values"
    while name.lower() in (other.lower() for other in taken):
        name += "_"
    return name
