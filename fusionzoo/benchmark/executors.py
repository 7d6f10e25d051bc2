"""Executors of independent pieces of work: this process, or a pool of them."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from contextvars import ContextVar
from multiprocessing import active_children, current_process, get_context
from multiprocessing.context import BaseContext
from pickle import PicklingError
from typing import Any, TypeVar

import torch

from fusionzoo.config import BenchmarkConfig
from fusionzoo.config.flags import in_seconds
from fusionzoo.errors import FusionZooError, explained
from fusionzoo.ground.plugins import absolute, load_plugins
from fusionzoo.ground.progress import progress_bar
from fusionzoo.machine.devices import num_cores
from fusionzoo.machine.memory import keep_freed_memory

S = TypeVar("S")  # shared by all pieces; sent once to each process
P = TypeVar("P")  # a piece
R = TypeVar("R")  # its result
Function = Callable[[S, P], R]
SetUp = tuple[int, list[str]]  # of a process: its threads and plugins
# Imported once for all worker processes; OPTIONAL ones where this process has imported them.
HEAVY = ("torch", "timm", "sklearn.ensemble")
OPTIONAL = ("transformers", "torchaudio", "optuna")

_worker_state: dict[str, Any] = {}  # in a worker process: shared by all its pieces
# Of what this process does, in seconds of `time.monotonic`.
_deadline: ContextVar[float] = ContextVar("deadline", default=math.inf)


class OutOfTimeError(Exception):
    """The time for these pieces of work is over."""


def map_unordered(
    cfg: BenchmarkConfig,
    shared: S,
    pieces: Sequence[P],
    function: Function[S, P, R],
    label: str,
) -> Iterator[tuple[P, R]]:
    """Call `function(shared, piece)` for each piece; yield (piece, result) as they finish.

    When the time of a block of `time_limit` is over, pieces under way are dropped: OutOfTimeError.
    With `--jobs 1`, in this process alone, the one under way ends at its next `check_time`.
    """
    cores = num_cores()
    jobs = min(cfg.jobs or cores, max(len(pieces), 1))
    threads = max(1, cores // (cfg.jobs or cores))
    if not pieces:
        return
    set_up = (threads, absolute(cfg.plugins))
    if jobs > 1 or (cfg.jobs != 1 and _time_left() is not None):  # a process can be stopped
        results = _map_in_processes(shared, pieces, function, jobs, set_up)
    else:
        results = _map_here(shared, pieces, function)
    total = len(pieces)
    with progress_bar(total=total, desc=label, unit="job") as bar:
        for piece, result in results:
            bar.update()
            yield piece, result


def check_main_module() -> None:
    """Raise an error where a worker process, which imports the script again, runs it again."""
    if getattr(current_process(), "_inheriting", False):
        raise FusionZooError(
            'call fusionzoo.benchmark under `if __name__ == "__main__":`: its worker processes'
            " import this script"
        )


def set_up_process(threads: int, plugins: Sequence[str] = ()) -> None:
    """Set the number of threads and the allocator's policy of this process; import plugins."""
    torch.set_num_threads(threads)
    keep_freed_memory()
    load_plugins(plugins)


@contextmanager
def time_limit(limit: str | float | None) -> Iterator[None]:
    """Let the work in the block take so long, `20m` or seconds, and no longer: OutOfTimeError."""
    seconds = math.inf if limit is None else in_seconds(limit, "time_limit")
    token = _deadline.set(time.monotonic() + seconds)
    try:
        yield
    finally:
        _deadline.reset(token)


def check_time() -> None:
    """Raise OutOfTimeError after the time of the block of `time_limit`, if this stands in one."""
    if _time_left() == 0:
        raise OutOfTimeError


def _time_left() -> float | None:
    """Return the seconds that are left, at least 0; None where there is no limit."""
    deadline = _deadline.get()
    return None if deadline == math.inf else max(deadline - time.monotonic(), 0.0)


def _map_here(shared: S, pieces: Sequence[P], function: Function[S, P, R]) -> Iterator[tuple[P, R]]:
    for piece in pieces:
        check_time()
        yield piece, function(shared, piece)


def _map_in_processes(
    shared: S,
    pieces: Sequence[P],
    function: Function[S, P, R],
    jobs: int,
    set_up: SetUp,
) -> Iterator[tuple[P, R]]:
    others = set(active_children())
    arguments = (set_up, dict(os.environ), shared)
    pool = ProcessPoolExecutor(jobs, _process_context(), _set_up_worker, arguments)
    try:
        unsent = "the data set cannot be sent to other processes; --jobs 1 needs none"
        with explained(unsent, PicklingError, AttributeError, TypeError):  # a start pickles
            futures = {pool.submit(_call_with_shared, function, piece): piece for piece in pieces}
        for future in as_completed(futures, _time_left()):
            yield futures[future], future.result()
    except (TimeoutError, KeyboardInterrupt) as stop:
        for worker in set(active_children()) - others:
            worker.terminate()
        if isinstance(stop, KeyboardInterrupt):
            raise
        raise OutOfTimeError from None
    except BrokenProcessPool:
        raise FusionZooError(
            "a worker process died, perhaps for lack of memory: the same command continues where it"
            " stopped; --jobs 1 needs the least memory. A script that calls fusionzoo.benchmark"
            ' must do so under `if __name__ == "__main__":`, because worker processes import it'
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _process_context() -> BaseContext:
    """Return how worker processes start.

    On Linux they are forks of a server process that has imported the heavy packages and does
    nothing else (a fork of this process could inherit locks of its threads, and a GPU's state).
    Without it each process of each stage imports them anew, 8 s of CPU each.
    """
    if sys.platform != "linux":
        return get_context("spawn")
    context = get_context("forkserver")
    of_benchmark = [name for name in sys.modules if name.startswith(f"{__package__}.")]
    imported = [name for name in OPTIONAL if sys.modules.get(name)]  # None: it cannot be imported
    context.set_forkserver_preload([*HEAVY, *imported, *of_benchmark])
    return context


def start_server(cfg: BenchmarkConfig) -> None:
    """Start the server that worker processes are forks of, which imports packages meanwhile."""
    if sys.platform != "linux" or (cfg.jobs or num_cores()) == 1:
        return
    from multiprocessing import forkserver, resource_tracker

    _process_context()
    resource_tracker.ensure_running()  # else the server starts it, which unblocks the signal
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # for the server, too
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _set_up_worker(set_up: SetUp, environment: dict[str, str], shared: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # at a Ctrl-C the main process stops the workers
    os.environ.clear()  # that of the server process may be an earlier one
    os.environ.update(environment)
    set_up_process(*set_up)
    _worker_state["shared"] = shared


def _call_with_shared(function: Function[Any, P, R], piece: P) -> R:
    return function(_worker_state["shared"], piece)
