"""Executors of independent pieces of work: in-process, process pool, Ray."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import current_process, get_context
from pickle import PicklingError
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from fusionzoo.config import BenchmarkConfig
from fusionzoo.distributed import keep_freed_memory
from fusionzoo.errors import FusionZooError
from fusionzoo.plugins import absolute, load_plugins

S = TypeVar("S")  # shared by all pieces; sent once to each process
P = TypeVar("P")  # a piece
R = TypeVar("R")  # its result
Function = Callable[[S, P], R]
SetUp = tuple[int, list[str]]  # of a process: its threads and plugins

_worker_state: dict[str, Any] = {}  # in a worker process: shared by all its pieces


def map_unordered(
    cfg: BenchmarkConfig, shared: S, pieces: Sequence[P], function: Function[S, P, R], label: str
) -> Iterator[tuple[P, R]]:
    """Call `function(shared, piece)` for each piece; yield (piece, result) as they finish."""
    cores = len(os.sched_getaffinity(0))
    jobs = min(cfg.jobs or cores, max(len(pieces), 1))
    threads = max(1, cores // (cfg.jobs or cores))
    if not pieces:
        return
    bar = tqdm(total=len(pieces), desc=label, unit="job", dynamic_ncols=True, smoothing=0.05)
    set_up = (threads, absolute(cfg.plugins))
    if cfg.engine == "ray":
        results = _map_on_ray(shared, pieces, function, set_up)
    elif jobs > 1:
        results = _map_in_processes(shared, pieces, function, jobs, set_up)
    else:
        results = ((piece, function(shared, piece)) for piece in pieces)
    for piece, result in results:
        bar.update()
        yield piece, result
    bar.close()


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


def _map_in_processes(
    shared: S, pieces: Sequence[P], function: Function[S, P, R], jobs: int, set_up: SetUp
) -> Iterator[tuple[P, R]]:
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), _set_up_worker, (set_up, shared))
    try:
        futures = _submit(pool, function, pieces)
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool:
        raise FusionZooError(
            "a worker process died, perhaps for lack of memory: the same command continues where it"
            " stopped; --jobs 1 needs the least memory. A script that calls fusionzoo.benchmark"
            ' must do so under `if __name__ == "__main__":`, because worker processes import it'
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _submit(
    pool: ProcessPoolExecutor, function: Function[S, P, R], pieces: Sequence[P]
) -> dict[Future[R], P]:
    try:
        return {pool.submit(_call_with_shared, function, piece): piece for piece in pieces}
    except (PicklingError, AttributeError, TypeError) as error:  # starting a process pickles
        raise FusionZooError(
            f"the data set cannot be sent to other processes ({error}): --jobs 1 needs none"
        ) from error


def _set_up_worker(set_up: SetUp, shared: Any) -> None:
    set_up_process(*set_up)
    _worker_state["shared"] = shared


def _call_with_shared(function: Function[Any, P, R], piece: P) -> R:
    return function(_worker_state["shared"], piece)


def _map_on_ray(
    shared: S, pieces: Sequence[P], function: Function[S, P, R], set_up: SetUp
) -> Iterator[tuple[P, R]]:
    """Run on the Ray cluster of $RAY_ADDRESS, else on a local one.

    All machines must share the folder `out` and the cache.
    """
    try:
        import ray
    except ImportError:
        raise FusionZooError("--engine ray needs Ray: pip install 'fusionzoo[ray]'") from None
    if not ray.is_initialized():
        ray.init(log_to_driver=False, include_dashboard=False)

    def set_up_and_call(shared: S, piece: P) -> R:
        set_up_process(*set_up)
        return function(shared, piece)

    call = ray.remote(num_cpus=set_up[0])(set_up_and_call)
    shared_reference = ray.put(shared)
    pending = {call.remote(shared_reference, piece): piece for piece in pieces}
    try:
        while pending:
            (finished, *_), _ = ray.wait(list(pending), num_returns=1)
            yield pending.pop(finished), ray.get(finished)
    finally:
        ray.shutdown()
