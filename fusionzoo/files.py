"""Files: the cache folder, atomic writes, and lines that a kill may have cut."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any
from uuid import uuid4

from .errors import FusionZooError


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
def replacing(path: Path, *, many_writers: bool = False) -> Iterator[Path]:
    """Yield a temporary path beside `path`; what is written there replaces `path` in the end.

    A kill at any moment leaves the old file or the new one, never half of one: the new file is
    flushed to disk before it is renamed. After an error the temporary file is removed. Give
    `many_writers` where several processes may write the same path at once. Of a symbolic link the
    target is replaced. A device or named pipe is not replaced: what is written is copied to it.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        with TemporaryDirectory() as folder:
            yield Path(folder) / path.name
            _copy_into(Path(folder) / path.name, path)
        return
    path = Path(os.path.realpath(path))
    unique = f".{uuid4().hex[:8]}" if many_writers else ""
    partial = path.with_name(f"{path.stem}{unique}.partial")
    try:
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
