"""End the processes that a test started and did not end, so that none outlives it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

VARIABLE = "FUSIONZOO_TEST"  # inherited by every program that a test starts, however indirectly
SHARED = (b"resource_tracker", b"forkserver")  # serve the tests that follow as well
STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.system"}
_started: list[str] = []  # such events, so that /proc is searched only after them


def _note(event: str, _: object) -> None:
    if event in STARTS:
        _started.append(event)


sys.addaudithook(_note)


@contextmanager
def ended_with(test: str) -> Iterator[None]:
    """Kill programs that are started inside the block and still run at its end.

    Forked workers, whose environment is their parent's, are left to multiprocessing.
    """
    label = f"{os.getpid()} {test}"
    _started.clear()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(VARIABLE, label)
            yield
    finally:
        for pid in _started_with(f"{VARIABLE}={label}".encode()) if _started else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _started_with(variable: bytes) -> list[int]:
    """Find processes by a variable of their environment; none where there is no /proc."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is somebody else's
            if variable in (folder / "environ").read_bytes().split(b"\0"):
                command = (folder / "cmdline").read_bytes()
                if not any(name in command for name in SHARED):
                    pids.append(int(folder.name))
    return pids
