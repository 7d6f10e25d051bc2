"""Read pickles without running them: arrays of NumPy and built-in containers, nothing else."""

from __future__ import annotations

import math
import mmap
import pickle
import reprlib
import struct
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fusionzoo.errors import explained

PLAIN = "biufSU"  # kinds of dtypes whose values are bytes of a fixed size
MAX_DIMS = 64  # of an array, as in NumPy
MAX_BITS = 1023  # of an integer, so that it fits into a float
# Bytes that calls may make: a pickle can name one value many times, and copy it each time.
MADE, MADE_PER_BYTE = 64 << 20, 16
short = reprlib.repr  # a few values and levels: nested pairs of one list have 2^depth


class ForbiddenPickle(Exception):
    """A pickle asks for something else than arrays and containers."""


def check_keys(keys: Iterable[Any]) -> None:
    """Refuse keys that are neither numbers nor text: the hash of nested tuples can take years."""
    for key in keys:
        parts = key if isinstance(key, tuple) else (key,)
        if not all(part is None or isinstance(part, str | bytes | int | float) for part in parts):
            raise ForbiddenPickle(f"a key or an element of a set that is {short(key):.40}")


class DType:
    """A NumPy dtype as a pickle describes it: `f4` and, as its state, the byte order."""

    def __init__(self, name: Any, align: Any = False, copy: Any = False) -> None:
        if isinstance(name, bytes):
            name = name.decode("ascii", "replace")
        if not isinstance(name, str) or name.lstrip("<>=|")[:1] not in f"{PLAIN}O":
            raise ForbiddenPickle(f"an array of type {short(name):.40}")
        self.name, self.order = name, ""

    def set_state(self, state: Any) -> None:
        """Take the byte order; fields of a structured dtype are refused."""
        parts = list(state) if isinstance(state, tuple) else []
        if parts[2:5] != [None] * 3 or parts[1] not in ("<", ">", "|", "="):
            raise ForbiddenPickle(f"an array of a structured type {self.name!r:.40}")
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
            raise ForbiddenPickle("an array of an unknown format")
        shape, dtype, fortran_order, data = state[-4:]
        self.value = _array(data, dtype, shape, "F" if fortran_order else "C")


def _array(data: Any, dtype: Any, shape: Any, order: Any = "C") -> np.ndarray:
    """Return an array of data whose size is that of its shape."""
    is_shape = isinstance(shape, tuple) and len(shape) <= MAX_DIMS
    is_shape = is_shape and all(type(n) is int and n >= 0 for n in shape)
    if not (is_shape and isinstance(dtype, DType)):
        raise ForbiddenPickle("an array of an unknown format")
    count = math.prod(shape)
    if dtype.is_object:
        if not isinstance(data, list) or len(data) != count:
            raise ForbiddenPickle(f"an array of shape {short(shape)} with other data")
        objects = np.empty(count, dtype=object)
        for number, value in enumerate(data):
            objects[number] = plain(value)
        return objects.reshape(shape, order=order)
    if isinstance(data, str):  # of protocols 0 to 2, where bytes are written as Latin-1
        data = data.encode("latin-1")
    if not isinstance(data, bytes | bytearray) or len(data) != count * dtype.numpy().itemsize:
        raise ForbiddenPickle(
            f"an array of shape {short(shape)} and type {dtype.name} with other data"
        )
    return np.frombuffer(data, dtype.numpy()).reshape(shape, order=order)


def _from_buffer(data: Any, dtype: Any, shape: Any, order: Any = "C") -> Array:
    if order not in ("C", "F"):
        raise ForbiddenPickle("an array of an unknown format")
    array = Array()
    array.value = _array(bytes(data), dtype, shape, order)
    return array


def _scalar(dtype: Any, data: Any = b"") -> Any:
    return _array(data, dtype, ()).item()


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise ForbiddenPickle("bytes of an unknown encoding")
    return text.encode("latin-1")


def _container(kind: Callable[..., Any], *types: type) -> Callable[..., Any]:
    """Return a function that makes a container of at most one other."""

    def make(*arguments: Any) -> Any:
        if len(arguments) > 1 or not all(isinstance(argument, types) for argument in arguments):
            raise ForbiddenPickle(f"a {kind.__name__} of other arguments")
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
            raise ForbiddenPickle(f"{module}.{name}"[:80])
        return function

    def persistent_load(self, pid: Any) -> Any:
        raise ForbiddenPickle("objects outside of the file")

    def load_build(self) -> None:
        """Set the state of an array or a dtype, of nothing else."""
        state = self.stack.pop()
        if not isinstance(self.stack[-1], Array | DType):
            raise ForbiddenPickle(f"the state of a {type(self.stack[-1]).__name__}")
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
            raise ForbiddenPickle(f"more than {self.limit:,} bytes, by copying what it holds")

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
            raise ForbiddenPickle(f"an integer of {bits:,} bits")

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
    limits = "only arrays of NumPy and built-in containers are read, and nothing of it was run"
    with (
        explained(f"{path} is no pickle that can be read"),
        explained(f"{path}: {limits}; it asks for", ForbiddenPickle),
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        reader = Unpickler(data, encoding="latin-1")
        reader.limit = MADE + MADE_PER_BYTE * len(data)
        return plain(reader.load())
