"""Errors that a user can cause, and checks of settings."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, TypeVar

LONGEST = 1000  # characters of another library's message
MAX_NAMES = 30  # listed in a message
MOST_NAMED = 10  # files with the same fault that a process names
_log = logging.getLogger("fusionzoo")
_warned: dict[str, set[str]] = {}
_name_of_bytes: ContextVar[Callable[[], str]] = ContextVar("name", default=lambda: "<bytes>")
P = ParamSpec("P")
R = TypeVar("R")
FLAG = re.compile(
    r"--(?P<key>[A-Za-z_]\w*(?:\.(?:[\w-]+|<\w+>))*)"
    r"(?: (?P<value>'[^']*'|-?[0-9][0-9.e-]*[0-9]|-?[0-9]|true|false|null|none|auto|,(?= )"
    r"|[A-Z]{2,}|\w+(?=$|[),:;]| (?:needs|takes)\b)))?"
)
SECTIONS = ("data", "train", "optim", "dist")  # settings in these need no section in Python
WORDS = {"true": "True", "false": "False", "null": "None"}
LACKING = (  # memory: what errors say that are not torch.OutOfMemoryError
    "can't allocate memory",
    "MPS backend out of memory",
    "CUDA error: out of memory",  # of the driver: no room for a context or a kernel
    "CUBLAS_STATUS_ALLOC_FAILED",  # of libraries, for their workspace
    "CUDNN_STATUS_ALLOC_FAILED",
)


class FusionZooError(ValueError):
    """An error that the user can fix: the message says what was found, expected, and to do.

    From a DataLoader worker the message is a whole traceback, which is reduced to its last message.
    """

    def __init__(self, message: str) -> None:
        if message.startswith("Caught FusionZooError in DataLoader worker"):
            message = message.rpartition("FusionZooError: ")[2].strip()
        super().__init__(message)


def one_line(error: BaseException) -> str:
    """Return the message of another library's exception on one line, cut where it is very long.

    >>> one_line(ValueError("no\\n  key"))
    'no key'
    """
    text = " ".join(str(error).split())  # zipfile's may quote half of the file
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


@contextmanager
def value_named(name: Callable[[], str]) -> Iterator[None]:
    """Let warnings call bytes without a file's name, `<bytes>`, by what `name` returns."""
    token = _name_of_bytes.set(name)
    try:
        yield
    finally:
        _name_of_bytes.reset(token)


def warn_of_file(name: str, fault: str) -> None:
    """Warn once of each file that has a fault and is read nevertheless, up to `MOST_NAMED`.

    Faults that differ by numbers only are the same.
    """
    name = name.replace("<bytes>", _name_of_bytes.get()())
    names = _warned.setdefault(re.sub(r"0x[0-9a-f]+|\d+", "0", fault), set())
    if name in names or len(names) == MOST_NAMED:
        return
    names.add(name)
    last = "; further files like it are not named" if len(names) == MOST_NAMED else ""
    _log.warning("%s: %s%s", name, fault, last)


def first_problem(error: Any) -> str:
    """Return the key that a `ValidationError` of pydantic names first, and what is wrong there."""
    first = error.errors()[0]
    reason = first["msg"]
    return f"{'.'.join(map(str, first['loc']))}: {reason[:1].lower()}{reason[1:]}"


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the nearest known word, or nothing.

    >>> did_you_mean("gmv", ["gmu", "lmf"])
    " Did you mean 'gmu'?"
    """
    nearest = difflib.get_close_matches(word, list(words), n=1, cutoff=0.5)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""


def check_known(name: str, known: Iterable[str], problem: str, listed: str = "It has") -> None:
    """Raise `problem`, the nearest of the known names and all of them, if `name` is none of them.

    >>> check_known("a", ["a", "b"], "the data has no modality 'a'")
    """
    names = list(known)
    if name not in names:
        raise FusionZooError(
            f"{problem}.{did_you_mean(name, names)} {listed}: {list_names(names)}."
        )


def list_names(names: Collection[str]) -> str:
    """Return names for a message, the first thirty of many.

    >>> list_names(["a", "b"])
    'a, b'
    """
    shown = ", ".join(name[:100] for name in [*names][:MAX_NAMES])
    return shown + (f" and {len(names) - MAX_NAMES:,} more" if len(names) > MAX_NAMES else "")


@contextmanager
def located(place: str | Callable[[], str]) -> Iterator[None]:
    """Put a value's place before a user's error in the block: `my.csv, row 7: ...`."""
    try:
        yield
    except FusionZooError as error:
        where = place if isinstance(place, str) else place()
        raise FusionZooError(f"{where}: {error}") from error


@contextmanager
def explained(problem: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn another library's error in the block, of these kinds or any, into one that says what
    the problem is."""
    kinds = kinds or (Exception,)
    try:
        yield
    except FusionZooError:
        raise
    except kinds as error:
        raise FusionZooError(f"{problem}: {one_line(error) or type(error).__name__}") from error


def check_choice(setting: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise an error if the value of a setting is not one of the choices."""
    if value not in choices:
        raise FusionZooError(f"{setting}={value!r} is neither {' nor '.join(map(repr, choices))}")


def check_number(setting: str, value: Any, low: float, below: float = float("inf")) -> None:
    """Refuse a value that is no number, less than `low`, or not less than `below`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value < below:
        limit = "" if below == float("inf") else f" and below {below:g}"
        raise FusionZooError(f"{setting}={value!r}; it must be a number of at least {low:g}{limit}")


def check_modality(setting: str, value: str | None, dims: Mapping[str, int]) -> str:
    """Return the modality that a setting names (None: the first); raise if there is no such one."""
    name = next(iter(dims)) if value is None else value
    check_known(name, dims, f"{setting}={name!r} is no modality", "There are")
    return name


def check_heads(dim: int, num_heads: int) -> None:
    """Raise an error if the number of heads does not divide the width."""
    if dim % num_heads:
        divisors = [n for n in range(1, dim + 1) if dim % n == 0 and n <= 2 * num_heads]
        raise FusionZooError(f"num_heads={num_heads} does not divide dim={dim}; {divisors} do")


def as_keywords(message: str) -> str:
    """Write the flags in a message as the keyword arguments of a function.

    >>> as_keywords("--data.decimal , reads it; --data.columns.text names one; --resume goes on")
    'decimal="," reads it; columns={"text": ...} names one; resume= goes on'
    """

    def keyword(match: re.Match[str]) -> str:
        if match["key"] == "help":
            return match[0]
        path, value = match["key"].split("."), match["value"]
        name, *below = path[1:] if path[0] in SECTIONS and len(path) > 1 else path
        if value is None:
            text = "..." if below else ""
        elif value in WORDS or value[0] == "'" or value[-1].isdigit() or value.isupper():
            text = WORDS.get(value, value)
        else:
            text = f'"{value}"'
        for key in reversed(below):
            text = f'{{"{key}": {text}}}'
        return f"{name}={text}"

    parts = message.split("`")  # every second one is a command
    parts[::2] = [FLAG.sub(keyword, part) for part in parts[::2]]
    return "`".join(parts)


def keyword_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Let errors of a function of the Python API name its keywords, not the command's flags."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except FusionZooError as error:
            message = as_keywords(str(error))
            if message == str(error):
                raise
            raise type(error)(message) from error

    return run


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an error is for lack of memory, on a GPU or in torch's allocator on the CPU."""
    import torch

    return isinstance(error, torch.OutOfMemoryError) or any(x in str(error) for x in LACKING)
