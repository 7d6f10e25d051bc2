"""Read pickles of NumPy arrays and built-in containers; nothing in a pickle is imported or called.

A pickle is a program: it names functions, which Python's own reader imports and calls. Here the few
names that NumPy writes stand for functions of this module, any other name ends the reading.
"""

from __future__ import annotations

import math
import mmap
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fusionzoo.errors import FusionZooError, one_line

PLAIN = "biufSU"  # kinds of dtypes whose values are bytes of a fixed size


class Refused(Exception):
    """A pickle asks for something else than arrays and containers."""


class DType:
    """A NumPy dtype as a pickle describes it: `f4` and, as its state, the byte order."""

    def __init__(self, name: Any, align: Any = False, copy: Any = False) -> None:
        if isinstance(name, bytes):
            name = name.decode("ascii", "replace")
        if not isinstance(name, str) or name.lstrip("<>=|")[:1] not in f"{PLAIN}O":
            raise Refused(f"an array of type {name!r:.40}")
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
    is_shape = isinstance(shape, tuple) and all(type(n) is int and n >= 0 for n in shape)
    if not (is_shape and isinstance(dtype, DType)):
        raise Refused("an array of an unknown format")
    count = math.prod(shape)
    if dtype.is_object:
        if not isinstance(data, list) or len(data) != count:
            raise Refused(f"an array of shape {shape} with other data")
        objects = np.empty(count, dtype=object)
        for number, value in enumerate(data):
            objects[number] = plain(value)
        return objects.reshape(shape, order=order)
    if isinstance(data, str):  # of protocols 0 to 2, where bytes are written as Latin-1
        data = data.encode("latin-1")
    if not isinstance(data, bytes | bytearray) or len(data) != count * dtype.numpy().itemsize:
        raise Refused(f"an array of shape {shape} and type {dtype.name} with other data")
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

    dispatch[pickle.BUILD[0]] = load_build


def plain(value: Any) -> Any:
    """Return an array that was read as NumPy's; other values stay."""
    return value.value if isinstance(value, Array) else value


def read_pickle(path: Path) -> Any:
    """Read a pickle; its arrays are `Array` inside of containers, see `plain`."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return plain(Unpickler(data, encoding="latin-1").load())
    except Refused as error:
        raise FusionZooError(
            f"{path} asks for {error}: only arrays of NumPy and built-in containers are read, and"
            " nothing of the file was run"
        ) from None
    except OSError as error:
        raise FusionZooError(f"{path} cannot be opened: {error.strerror}") from error
    except Exception as error:
        raise FusionZooError(f"{path} is no pickle that can be read: {one_line(error)}") from error
