"""Files: the cache folder, atomic writes, locks."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

from fusionzoo.errors import FusionZooError, explained

ABANDONED = 600  # seconds without a write after which a part on another host is of a dead process
Process = tuple[str, int]  # host and number
MACHINE_PATH = re.compile(r"(file://)?([A-Za-z]:[\\/]|[\\/~]|\.\.[\\/])")  # how a path begins


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


def strict_json(text: str | bytes) -> Any:
    """Read JSON: a key that occurs twice in one object, NaN or infinity is a ValueError."""
    return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_number)


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a file that holds an object of JSON."""
    with explained(f"{path} cannot be read as JSON", OSError, ValueError, RecursionError):
        contents = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(contents, dict):
            raise ValueError("it must hold a JSON object")
    return contents


def _unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {repeated!r:.60} occurs twice in one object")
    return entries


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no number in JSON")


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def whole_lines(path: Path) -> list[str]:
    """Return the whole lines of a file; a kill may have cut the last one."""
    text = path.read_text() if path.is_file() else ""
    return [line for line in text.splitlines(keepends=True) if line.endswith("\n")]


@contextmanager
def replacing_tensors(path: Path) -> Iterator[Path]:
    """Do what `replacing` does; an error of safetensors, such as a full disk, is an OSError."""
    from safetensors import SafetensorError

    try:
        with replacing(path) as partial:
            yield partial
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; what is written there replaces `path` in the end. Its
    folder is made if it is not there.

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
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _new_part(path)
    try:
        partial.open("xb").close()
        yield partial
        with partial.open("r+b") as file:  # Windows flushes only what may be written
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


def this_process() -> Process:
    """Return the name of this host and the number of this process."""
    return socket.gethostname(), os.getpid()


@contextmanager
def locked(
    path: Path, patience: float, problem: str, advice: str, processes: Sequence[Process] = ()
) -> Iterator[None]:
    """Hold a lock for a block; `<path>.json` says who does: this process, or several of a run.

    After `patience` seconds raise an error: `problem`, who holds it, and `advice`. The system lets
    go when the process dies.
    """
    from filelock import FileLock, Timeout

    held, note = FileLock(path), path.with_name(f"{path.name}.json")
    try:
        held.acquire(patience, poll_interval=0.2)
    except Timeout:
        raise FusionZooError(f"{problem}{_holders(note)}, or {advice}") from None
    try:
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        about = {"since": since, "processes": [*(processes or [this_process()])]}
        note.write_text(json.dumps(about), encoding="utf-8")
        yield
    finally:
        note.unlink(missing_ok=True)
        held.release()


def _holders(note: Path) -> str:
    """Say who holds a lock, since when, and what ends them; or that it is not known."""
    try:
        about = json.loads(note.read_text(encoding="utf-8"))
        by_host: dict[str, list[str]] = {}
        for host, number in about["processes"]:
            by_host.setdefault(str(host), []).append(str(int(number)))
        since = str(about["since"])
    except (OSError, ValueError, TypeError, KeyError):
        return " (it does not say who it is): wait for it"
    who = "; ".join(f"on {host} {', '.join(x)}" for host, x in by_host.items())
    commands = "; ".join(f"`kill {' '.join(x)}` on {host}" for host, x in by_host.items())
    return f" since {since} (processes {who}): wait for it, end it by {commands}"


def is_running(process: int) -> bool | None:
    """Whether a process of this machine, by its number, has not ended; None: it is not known."""
    if os.name == "nt":  # where signal 0 is Ctrl-C
        return None
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


def write_files(folder: Path, contents: Mapping[str, str | bytes]) -> None:
    """Write files by name, texts as UTF-8: all, or after an error such as a full disk none."""
    with ExitStack() as stack:
        for name, content in contents.items():
            content = content if isinstance(content, bytes) else content.encode()
            stack.enter_context(replacing(folder / name)).write_bytes(content)


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON atomically."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


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
