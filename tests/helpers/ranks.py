"""The ranks of a distributed test: forks of one process that has imported torch and fusionzoo.

A rank that starts as a new process takes five seconds, nearly all of them for imports.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Mapping
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from typing import Any

PRELOADED = ["torch", "torchvision", "fusionzoo.api", "fusionzoo.training.build", "pytest"]


def run(file: str, size: int, *words: object, timeout: float = 300) -> None:
    """Run `python FILE RANK WORDS` as `size` processes, which must succeed."""
    context = get_context("forkserver" if sys.platform == "linux" else "spawn")
    context.set_forkserver_preload(PRELOADED)
    errors = context.SimpleQueue()
    processes: list[Any] = []
    for rank in range(size):
        arguments = (file, [str(rank), *map(str, words)], dict(os.environ), errors)
        processes.append(context.Process(target=_run, args=arguments))
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout)
        codes = [process.exitcode for process in processes]
        said = [] if errors.empty() else [errors.get()]  # the others wait for the first
        assert codes == [0] * size, "\n".join([f"exit codes {codes}", *said])
    finally:
        for process in processes:
            process.kill()


def _run(
    file: str, words: list[str], environment: Mapping[str, str], errors: SimpleQueue[str]
) -> None:
    os.environ.clear()  # the server has that of the test which started it
    os.environ.update(environment)
    sys.argv = [file, *words]
    try:
        runpy.run_path(file, run_name="__main__")
    except Exception:
        errors.put(f"rank {words[0]}: {traceback.format_exc()}")
        raise
