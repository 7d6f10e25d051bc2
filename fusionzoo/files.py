"""Files: the cache folder, atomic writes, digests, and cells of CSV tables."""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from decimal import Decimal
from numbers import Real
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any
from uuid import uuid4

from fusionzoo.errors import FusionZooError, one_line


def cache_root() -> Path:
    """Return where they are kept: $FUSIONZOO_CACHE, else ~/.cache/fusionzoo."""
    return Path(os.environ.get("FUSIONZOO_CACHE", "~/.cache/fusionzoo")).expanduser()


def make_cache_folder(folder: Path) -> Path:
    """Create a folder below the cache, or say which setting names another place."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from error
    return folder


def cannot_write(folder: Path, error: OSError) -> FusionZooError:
    """Say why the cache cannot be written: a full disk is another matter than a permission."""
    reason = (error.strerror or str(error)).lower()
    return FusionZooError(
        f"cannot write to the cache {folder}: {reason}; the environment variable FUSIONZOO_CACHE"
        " names a folder where there is room and permission"
    )


def whole_lines(path: Path) -> list[str]:
    """Return the whole lines of a file; a kill may have cut the last one."""
    text = path.read_text() if path.is_file() else ""
    return [line for line in text.splitlines(keepends=True) if line.endswith("\n")]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; what is written there replaces `path` in the end.

    A kill at any moment leaves the old file or the new one, never half of one: the new file is
    flushed to disk before it is renamed. After an error the temporary file is removed; what a kill
    leaves of it, the next write of `path` removes. The temporary file is a new one of a unique
    name, so no file of yours and no link that stands there is written to. Of a symbolic link at
    `path` the target is replaced. A device or named pipe is not replaced: what is written is copied
    to it.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        with TemporaryDirectory() as folder:
            yield Path(folder) / path.name
            _copy_into(Path(folder) / path.name, path)
        return
    path = Path(os.path.realpath(path))
    partial = _new_part(path)
    try:
        partial.open("xb").close()
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            # A full disk is found by a write, whose error names no file.
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder beside `path` that takes its place in the end; after an error it goes."""
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _new_part(path)
    partial.mkdir()
    try:
        yield partial
        shutil.rmtree(path, ignore_errors=True)
        partial.replace(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


ABANDONED = 600  # seconds without a write after which a part on another host is of a dead process


def _new_part(path: Path) -> Path:
    """Return a unique path beside `path`; remove the parts of it that killed processes left."""
    host = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:6]
    for part in path.parent.glob(f"{glob.escape(path.name)}.{'[0-9a-f]' * 6}-*.partial"):
        with suppress(OSError, ValueError):  # it went, or has another name
            of_host, process, _ = part.name.removeprefix(f"{path.name}.").split("-")
            lives = is_running(int(process)) if of_host == host else None
            if lives or (lives is None and time.time() - part.lstat().st_mtime < ABANDONED):
                continue
            if part.is_dir() and not part.is_symlink():
                shutil.rmtree(part, ignore_errors=True)
            else:
                part.unlink()
    return path.with_name(f"{path.name}.{host}-{os.getpid()}-{uuid4().hex[:8]}.partial")


def _copy_into(source: Path, device: Path) -> None:
    """Copy a file's bytes to a device or named pipe; an error names it."""
    try:
        with source.open("rb") as data, device.open("wb") as file:
            shutil.copyfileobj(data, file)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(device)) from None


Process = tuple[str, int]  # host and number


def this_process() -> Process:
    """Return the name of this host and the number of this process."""
    return socket.gethostname(), os.getpid()


def lock(
    file: IO[str], patience: float, problem: str, advice: str, processes: Sequence[Process] = ()
) -> None:
    """Lock an open file until it is closed, and note there who holds it: this process, or several.

    After `patience` seconds raise an error: `problem`, who holds it, and `advice`. The file is
    opened with `a+`, which leaves the note of others. The system lets go when the process dies;
    processes that it forked do not inherit the lock.
    """
    import fcntl  # which Windows lacks

    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise FusionZooError(f"{problem}{_holders(file)}, or {advice}") from None
        time.sleep(0.2)
    file.truncate(0)
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    json.dump({"since": since, "processes": [*(processes or [this_process()])]}, file)
    file.flush()


def _holders(file: IO[str]) -> str:
    """Say who holds a lock, since when, and what ends them; or that it is not known."""
    file.seek(0)
    try:
        note = json.loads(file.read())
        by_host: dict[str, list[str]] = {}
        for host, number in note["processes"]:
            by_host.setdefault(str(host), []).append(str(int(number)))
        since = str(note["since"])
    except (ValueError, TypeError, KeyError):
        return " (it does not say who it is): wait for it"
    who = "; ".join(f"on {host} {', '.join(x)}" for host, x in by_host.items())
    commands = "; ".join(f"`kill {' '.join(x)}` on {host}" for host, x in by_host.items())
    return f" since {since} (processes {who}): wait for it, end it by {commands}"


def is_running(process: int) -> bool:
    """Whether a process of this machine, by its number, has not ended."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is another user's
        return True
    return True


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, as UTF-8."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON atomically."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


MACHINE_PATH = re.compile(r"(file://)?([A-Za-z]:[\\/]|[\\/~]|\.\.[\\/])")  # how a path begins


def without_folders(text: str) -> str:
    """Return the last part of a path that only this machine has, also behind an encoder's prefix.

    >>> [without_folders(x) for x in ("/home/me/a.csv", "hf//home/me/bert", "timm/resnet18", "~/a")]
    ['a.csv', 'hf/bert', 'timm/resnet18', 'a']
    """
    prefix, slash, rest = text.partition("/")
    for start, path in (("", text), (prefix + slash, rest)):
        if MACHINE_PATH.match(path):
            return start + re.split(r"[\\/]", path.rstrip("\\/"))[-1]
    return text


NAME = "digests.json"
ALGORITHM = "sha256"
REQUIRED = ("config.json", "model.safetensors")  # files of every model folder
OPTIONAL = ("trained_on.safetensors", "calibration.json")
_log = logging.getLogger("fusionzoo")


def write_digests(folder: Path, files: list[Path]) -> None:
    """Write the digests of a folder's `files`."""
    digests = {path.relative_to(folder).as_posix(): _digest(path) for path in sorted(files)}
    write_json(folder / NAME, {"algorithm": ALGORITHM, "files": digests})


def check_digests(folder: Path, modalities: list[str]) -> None:
    """Raise an error that names a file which was changed, removed or added since it was saved.

    Files may be added at the top, such as a README, but not in the folders of `modalities`, whose
    files encoders read. A folder of an earlier version has no digests, which is logged.
    """
    path = folder / NAME
    if not path.is_file():
        _log.warning(
            "%s has no %s (saved by an earlier version): whether its files were changed is not"
            " checked",
            *(folder, NAME),
        )
        return
    digests = _read(path)
    for name in REQUIRED:
        if name not in digests:
            raise FusionZooError(
                f"{path} has no digest of {name}: copy the folder again, or remove {path} if you"
                " changed it yourself"
            )
    check_listed(folder, digests)
    for file in _files_below(folder, modalities):
        if file.relative_to(folder).as_posix() not in digests:
            raise FusionZooError(
                f"{file} was added since the model was saved: remove it, or remove {path} if you"
                " added it yourself"
            )


def check_listed(folder: Path, digests: Mapping[str, str] | None = None) -> None:
    """Raise an error that names a file of a folder's `digests.json` that was changed or removed."""
    path = folder / NAME
    for name, digest in (_read(path) if digests is None else digests).items():
        file = folder / name
        if not file.is_file():
            raise FusionZooError(f"{file} is missing: {path} lists it; copy the whole folder again")
        if _digest(file) != digest:
            raise FusionZooError(
                f"{file} was changed since the model was saved: copy the folder again, or remove"
                f" {path} if you changed it yourself"
            )


def _files_below(folder: Path, modalities: list[str]) -> list[Path]:
    return [
        path
        for name in modalities
        for path in sorted((folder / name).rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    ]


def files_of_model(folder: Path, modalities: list[str]) -> list[Path]:
    """Return the files of a model folder of which digests are written."""
    optional = [path for path in (folder / name for name in OPTIONAL) if path.is_file()]
    return [*(folder / name for name in REQUIRED), *optional, *_files_below(folder, modalities)]


def listed_files(folder: Path) -> list[str]:
    """Return the names of the files that a folder's digests list."""
    return list(_read(folder / NAME))


def _read(path: Path) -> dict[str, str]:
    """Read the digests; each name must lead to a file below the folder."""
    try:
        contents: Any = json.loads(path.read_text(encoding="utf-8"))
        files = contents["files"]
        if contents["algorithm"] != ALGORITHM:
            raise ValueError(f"algorithm {contents['algorithm']!r}; {ALGORITHM} is known")
        if not all(isinstance(digest, str) and _is_below(name) for name, digest in files.items()):
            raise ValueError("it must map the names of files in the folder to digests")
        return dict(files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FusionZooError(f"{path} cannot be read: {one_line(error)}") from None


def _is_below(name: str) -> bool:
    """Return whether a name leads down from a folder.

    >>> _is_below("text/tokenizer.json"), _is_below("../secret"), _is_below("/etc/passwd")
    (True, False, False)
    """
    return "\0" not in name and not Path(name).is_absolute() and ".." not in Path(name).parts


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, ALGORITHM).hexdigest()


Cell = float | str | None  # None: empty
NUMBER = r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # first characters of cells that run as formulas
_number, _whole = re.compile(NUMBER), re.compile(r"(-?[0-9]+)\.0+")


def read_cell(value: Any) -> Cell:
    """Return a number, or text without spaces around it; None for an empty text and for NaN.

    >>> [read_cell(x) for x in (3, " red ", "", float("nan"), True)]
    [3.0, 'red', None, None, 'true']
    """
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        value = value.item()  # a scalar of NumPy or torch
    if value is None or isinstance(value, str):
        return (value or "").strip() or None
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, Real | Decimal):
        raise FusionZooError(f"a {type(value).__name__} is neither a number nor text")
    number = float(value)
    return None if number != number else number


def read_cells(value: Any) -> dict[str, Cell] | None:
    """Return the cells of a sample by column; None if all of them are empty.

    >>> read_cells({"age": "31", "colour": None})
    {'age': '31', 'colour': None}
    """
    if not isinstance(value, Mapping):
        raise FusionZooError(
            f"a {type(value).__name__} is no row of a table: give the cells by column, such as"
            " {'age': 31, 'colour': None}"
        )
    cells = {}
    for name, cell in value.items():
        try:
            cells[str(name)] = read_cell(cell)
        except FusionZooError as error:
            raise FusionZooError(f"column {name!r}: {error}") from error
    return None if all(cell is None for cell in cells.values()) else cells


def is_number(cell: float | str) -> bool:
    """Return whether a cell holds a number, with a decimal point if any.

    >>> [is_number(x) for x in (2.0, "-1.5e3", "12,5", "n/a")]
    [True, True, False, False]
    """
    return not isinstance(cell, str) or _number.fullmatch(cell) is not None


def category_of(cell: float | str) -> str:
    """Return the category that a cell names: the number 3, `3` and `3.0` are one.

    >>> [category_of(x) for x in (3.0, "3.0", "03", "True", "red")]
    ['3', '3', '03', 'true', 'red']
    """
    if not isinstance(cell, str):
        number = float(cell)
        return str(int(number)) if number.is_integer() else repr(number)
    whole = _whole.fullmatch(cell)
    if whole:
        return whole[1]
    return cell.lower() if cell.lower() in ("true", "false") else cell


def without_formulas(cell: str) -> str:
    """Return a cell that spreadsheet programs take for text: `'=1` for `=1`.

    >>> [without_formulas(x) for x in ("=1+1", "-2+A1", "-2.5", "a=b", "-", "")]
    ["'=1+1", "'-2+A1", '-2.5', 'a=b', '-', '']
    """
    is_formula = cell.startswith(FORMULA) and len(cell) > 1 and not is_number(cell)
    return f"'{cell}" if is_formula else cell


def fold(name: str) -> str:
    """Return the name of a column without spaces around it and in lower case."""
    return name.strip().casefold()
