"""What refit and the fitted rows cost: `python perf/refit.py --config FILE --fusions sum,mbt`.

Runs `benchmark.py` with these flags in one process, and splits the CPU time of its jobs into
training, refit, linear probes of single modalities, the other fitted rows, and the rest (encoders
that learn from a fold, features, metrics, damaged samples). Give it a new --out: what is stored
already costs nothing.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from fusionzoo.benchmark import jobs
from fusionzoo.benchmark.candidates import PROBE, parse
from fusionzoo.cli import main as run_command

TRAINING, REFIT, PROBES = "training", "refit", "linear probes"
spent: defaultdict[str, float] = defaultdict(float)  # part -> seconds of CPU time


def main() -> None:
    """Run the benchmark, then print the parts of its CPU time."""
    torch.set_num_threads(1)
    jobs.train = timed(lambda *_: TRAINING, jobs.train)
    jobs.tested_weights = timed(lambda *_: REFIT, jobs.tested_weights)
    jobs.run_fitted = timed(lambda bench, job: fitted_part(job.candidate), jobs.run_fitted)
    start = time.process_time()
    run_command(["benchmark", *sys.argv[1:], "--jobs", "1"])
    total = time.process_time() - start
    spent["the rest"] = total - sum(spent.values())
    added = spent[REFIT] + spent[PROBES]
    for part, seconds in spent.items():
        print(f"{part:24} {seconds:8.1f} s  {seconds / total:6.1%}")
    print(
        f"refit and probes add {added / (total - added):.1%} to the {total - added:.0f} s without"
    )


def fitted_part(candidate: str) -> str:
    """Return the part that a fitted row belongs to."""
    base = parse(candidate).base
    return PROBES if base.startswith(PROBE) else base


def timed(part_of: Callable[..., str], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, its CPU time added to a part."""

    def call(*arguments: Any) -> Any:
        start = time.process_time()
        try:
            return function(*arguments)
        finally:
            spent[part_of(*arguments)] += time.process_time() - start

    return call


if __name__ == "__main__":
    main()
