"""This process under a launcher: signals, exit codes, a launcher that is gone."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

PERIOD = 1.0  # seconds between two looks at the launcher
INTERRUPTED = 130  # exit code after Ctrl-C, as shells have it
ENDS = ("SIGTERM", "SIGUSR1")  # Windows lacks the last
GRACE = 30.0  # seconds to save after SIGTERM, as torchrun gives


def exit_code(signals: list[int]) -> int:
    """Return `INTERRUPTED` after Ctrl-C, else 75, which sysexits.h reads as "try again"."""
    return INTERRUPTED if signals[:1] == [signal.SIGINT] else 75


@contextmanager
def catch_signals() -> Iterator[list[int]]:
    """Collect SIGINT, SIGTERM and SIGUSR1 instead of dying: the run saves after its step."""
    caught: list[int] = []
    with _handled(("SIGINT", *ENDS), lambda number, _: caught.append(number)):
        yield caught


@contextmanager
def stopping(goes_on: str) -> Iterator[None]:
    """Exit with 75 at SIGTERM or SIGUSR1 within the block, and say what `goes_on`.

    While epochs run, `catch_signals` replaces this by an exit after a whole step.
    """

    def stop(number: int, _: object) -> None:
        print(f"stopped: {goes_on}", file=sys.stderr)
        raise SystemExit(exit_code([number]))

    with _handled(ENDS, stop):
        yield


@contextmanager
def _handled(names: Sequence[str], handler: Callable[[int, Any], object]) -> Iterator[None]:
    """Handle these signals within the block, as far as the system has them."""
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, other in before.items():
            signal.signal(number, other)


def end_with_launcher() -> None:
    """Under torchrun or `--dist.nproc`: end this process once its launcher has ended.

    Processes have sessions of their own, so a launcher that is killed leaves them running. They
    then get the SIGTERM that it would have sent, and SIGKILL if they do not end in time.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:  # a shell that is logged out of ends no run
        return
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(PERIOD)
        # From every rank: the first one that notices stops the others before they have looked.
        rank = os.environ.get("RANK", "0")
        print(f"rank {rank}: the launcher (process {launcher}) is gone: stopping", file=sys.stderr)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="end_with_launcher", daemon=True).start()


def launched() -> bool:
    """Whether a launcher (torchrun, or `launch`) started this process."""
    return "WORLD_SIZE" in os.environ


def exit_process(code: int) -> NoReturn:
    """Exit; under torchrun, without interpreter teardown.

    During teardown a torch thread that is still running can abort a successful run ("terminate
    called without an active exception"). The process group is already destroyed and files are
    closed; exit handlers (loader processes, progress bars, loggers) run here.
    """
    if "WORLD_SIZE" not in os.environ:
        sys.exit(code)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
