"""Stop a run after a whole step when a signal asks for it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


def exit_code(signals: list[int]) -> int:
    """Return 130 after Ctrl-C, as shells do, else 75, which sysexits.h reads as "try again"."""
    return 130 if signals[:1] == [signal.SIGINT] else 75


@contextmanager
def catch_signals() -> Iterator[list[int]]:
    """Collect what asks a run to stop, so that it ends after a whole step, with a checkpoint."""
    caught: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: caught.append(number))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    }
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
