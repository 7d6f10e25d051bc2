"""What works off independent pieces: this process, several, or a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import TypeVar

import torch
from tqdm import tqdm

from fusionzoo.config import BenchmarkConfig
from fusionzoo.distributed.malloc import keep_freed_memory
from fusionzoo.errors import FusionZooError
from fusionzoo.plugins import absolute, load_plugins

S = TypeVar("S")  # what every piece reads
T = TypeVar("T")  # a piece
R = TypeVar("R")  # what comes of it
Call = Callable[[S, T], R]
Setup = tuple[int, list[str]]  # of a process: its threads and plugins


def work(
    cfg: BenchmarkConfig, shared: S, todo: Sequence[T], function: Call[S, T, R], label: str
) -> Iterator[tuple[T, R]]:
    """Call `function(shared, piece)` for each piece; yield results as they come."""
    cores = len(os.sched_getaffinity(0))
    jobs = min(cfg.jobs or cores, max(len(todo), 1))
    threads = max(1, cores // (cfg.jobs or cores))
    if not todo:
        return
    bar = tqdm(total=len(todo), desc=label, unit="unit", dynamic_ncols=True, smoothing=0.05)
    plugins = absolute(cfg.plugins)
    if cfg.engine == "ray":
        results = _ray(shared, todo, function, (threads, plugins))
    elif jobs > 1:
        results = _processes(shared, todo, function, jobs, (threads, plugins))
    else:
        results = ((piece, function(shared, piece)) for piece in todo)
    for piece, result in results:
        bar.update()
        yield piece, result
    bar.close()


def _processes(
    shared: S, todo: Sequence[T], function: Call[S, T, R], jobs: int, setup: Setup
) -> Iterator[tuple[T, R]]:
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), begin, setup)
    try:
        futures = {pool.submit(function, shared, piece): piece for piece in todo}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool:
        raise FusionZooError(
            "a worker process died, perhaps for want of memory: the same command goes on where it"
            " stopped; --jobs 1 needs the least memory"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _ray(
    shared: S, todo: Sequence[T], function: Call[S, T, R], setup: Setup
) -> Iterator[tuple[T, R]]:
    """Run on the Ray cluster of $RAY_ADDRESS, else on a local one; `out` and the cache are folders
    that all machines share."""
    try:
        import ray
    except ImportError:
        raise FusionZooError("--engine ray needs Ray: pip install 'fusionzoo[ray]'") from None
    if not ray.is_initialized():
        ray.init(log_to_driver=False, include_dashboard=False)

    def begin_and_call(shared: S, piece: T) -> R:
        begin(*setup)
        return function(shared, piece)

    call = ray.remote(num_cpus=setup[0])(begin_and_call)
    kept = ray.put(shared)
    waiting = {call.remote(kept, piece): piece for piece in todo}
    try:
        while waiting:
            (done, *_), _ = ray.wait(list(waiting), num_returns=1)
            yield waiting.pop(done), ray.get(done)
    finally:
        ray.shutdown()


def begin(threads: int, plugins: Sequence[str] = ()) -> None:
    """Set a process up."""
    torch.set_num_threads(threads)
    keep_freed_memory()
    load_plugins(plugins)
