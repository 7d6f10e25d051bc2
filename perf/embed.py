"""Measure extraction of embeddings: rate against its parts, sorting by length, memory, scaling.

`python perf/embed.py --part rate`: rows per second of embed.py with one worker, against a bare loop
of the same encoders over batches that are already decoded, and against the loader alone; bar: 0.95
of the slower of the two. Also against batches in the table's order. On machines that do other work
at the same time only CPU time tells: `cpu_ratio` is what the slower of encoders and decoding takes,
by the busier process of the extraction: this one, or the worker.
`python perf/embed.py --part memory --rows 1000000`: memory of processes that embed 10,000 and more
text rows: after opening the table, and its peak while the rows are embedded; what the table takes.
`python perf/embed.py --part scaling`: CPU time per row of the whole command on a small and a large
table; bar: at most 1.2 times.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _memory import forget_peak, memory_kib
from _timing import compare
from embed_kills import write_table

import fusionzoo as fz
from fusionzoo import create_dataset, create_model
from fusionzoo.config import EmbedConfig
from fusionzoo.embeddings import extract as extraction
from fusionzoo.embeddings.extract import Extraction, compute, extract
from fusionzoo.embeddings.parts import Parts
from fusionzoo.scripts.embed import main as embed

SMALL, LARGE, ROUNDS = 5_000, 50_000, 5
CHARS = {"name": "chars", "dim": 128, "num_layers": 4, "num_heads": 4}
TINY = {"name": "chars", "dim": 8, "num_layers": 1, "num_heads": 1, "max_length": 16}


def quietly(args: list[str]) -> None:
    """Run embed.py without its output."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert embed(args) == 0


class Times(NamedTuple):
    """Seconds of a run."""

    wall: float
    main: float  # CPU of this process
    worker: float  # CPU of the processes that it started


def time_once(run: Callable[[], Any]) -> Times:
    """Measure a run, whose workers have ended when it returns."""

    def now() -> Times:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return Times(
            time.perf_counter(), time.process_time(), children.ru_utime + children.ru_stime
        )

    start = now()
    run()
    gc.collect()  # a loader's worker ends with its iterator
    return Times(*(b - a for a, b in zip(start, now(), strict=True)))


def measure_rate(rows: int) -> dict[str, float]:
    """Compare rows per second of extraction, of its forward passes and of its loader."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_table(folder / "t.csv", rows)
        dataset = create_dataset(str(folder / "t.csv"))
        model = create_model("gmu", {"text": CHARS}, classes=["a", "b"], dim=64).eval()
        cfg = EmbedConfig(out=str(folder / "e.parquet"), row_group=256)
        job = Extraction.of(cfg, {}, model, dataset, num_workers=1)
        numbers = job.plan.longest_first(range(job.plan.num_parts))
        in_process = replace(job, num_workers=0)
        batches = [batch for _, batch in extraction._batches(in_process, numbers)]

        def forward() -> None:
            for batch in batches:
                compute(model, batch, job.wanted)

        def write(job: Extraction) -> None:
            parts = Parts(folder / "e.parquet")
            with parts.claimed(job.key, overwrite=True):
                extract(job, parts, numbers)
                parts.remove()

        runs: dict[str, Callable[[], Any]] = {
            "forward": forward,
            "decoding": lambda: [0 for _ in extraction._batches(in_process, numbers)],
            "loader": lambda: [0 for _ in extraction._batches(job, numbers)],
            "extract": lambda: write(job),
            "unsorted": lambda: write(job.unbucketed()),
        }
        # In turns, so that a change of the machine's load meets all of them.
        rounds = [{part: time_once(run) for part, run in runs.items()} for _ in range(ROUNDS)]
    wall = {part: min(times[part].wall for times in rounds) for part in runs}
    main = {part: min(times[part].main for times in rounds) for part in runs}
    worker = min(times["extract"].worker for times in rounds)
    busier = compare(
        [max(times["forward"].main, times["decoding"].main) for times in rounds],
        [max(times["extract"].main, times["extract"].worker) for times in rounds],
    )
    rates = {f"{part}_rows_per_s": round(rows / wall[part]) for part in runs}
    figures = {
        "ratio": max(wall["forward"], wall["loader"]) / wall["extract"],
        "cpu_ratio": busier["ratio"],
        "cpu_ratio_quartile_low": busier["quartile_low"],
        "cpu_ratio_quartile_high": busier["quartile_high"],
        "forward_cpu_s": main["forward"],
        "decoding_cpu_s": main["decoding"],
        "extract_cpu_s": main["extract"],
        "worker_cpu_s": worker,
        "sorting": main["unsorted"] / main["extract"],
    }
    return {**rates, **{name: round(x, 3) for name, x in figures.items()}}


def peak_memory(rows: int) -> dict[str, float]:
    """Embed rows in a new process; return its peak memory and that after opening the table."""
    command = [sys.executable, __file__, "--part", "peak", "--rows", str(rows)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def embed_and_report(rows: int) -> dict[str, float]:
    """Embed `rows` short texts in this process, after some others; return MiB."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = create_model("gmu", {"text": TINY}, classes=["a", "b"], dim=8)

        def embed_table(table: str) -> int:
            options = {"split": "all", "batch_size": 512, "num_workers": 0}
            out, silent = folder / f"{table}.parquet", io.StringIO()
            with contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent):
                fz.embed(model, dataset, out=str(out), **options)
            peak = memory_kib("VmHWM") >> 10
            assert len(fz.read_embeddings(out).ids) == len(dataset)
            return peak

        write_table(folder / "t.csv", 1000)
        dataset = create_dataset(str(folder / "t.csv"))
        embed_table("first")  # loads all libraries
        write_table(folder / "t.csv", rows)
        dataset = create_dataset(str(folder / "t.csv"))
        opened = memory_kib("VmRSS") >> 10
        forget_peak()
        peak = embed_table("all")
        return {"opened": opened, "peak": peak, "table": dataset.table.nbytes >> 20}


def measure_scaling() -> dict[str, float]:
    """Compare the CPU time per row on a small and a large table, after a warm-up."""

    def seconds_per_row(rows: int) -> float:
        data = ["--data.name", "interactions", "--data.samples", str(rows), "--split", "all"]
        out = ["--model", str(path), "--out", str(path / "e.parquet"), "--batch_size", "64"]
        start = time.process_time()
        quietly([*data, *out, "--num_workers", "0"])
        return (time.process_time() - start) / rows

    with tempfile.TemporaryDirectory() as folder:
        data = create_dataset("interactions", samples=60)
        model = create_model("sum", data.default_encoders, classes=data.classes, dim=16)
        path = model.save(folder)
        seconds_per_row(640)
        small, large = seconds_per_row(SMALL), seconds_per_row(LARGE)
    figures = {"small_us": round(1e6 * small, 1), "large_us": round(1e6 * large, 1)}
    return {"small_rows": SMALL, "large_rows": LARGE, **figures, "ratio": round(large / small, 2)}


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", choices=("rate", "memory", "scaling", "peak"), default="scaling")
    parser.add_argument("--rows", type=int, default=20_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    figures: dict[str, Any]
    if options.part == "rate":
        figures = {"rows": options.rows, **measure_rate(options.rows)}
    elif options.part == "memory":
        sizes = (10_000, options.rows)
        figures = {f"{rows}_rows_mib": peak_memory(rows) for rows in sizes}
    elif options.part == "peak":
        figures = embed_and_report(options.rows)
    else:
        figures = measure_scaling()
    print(json.dumps({"benchmark": "embed", "part": options.part, **figures}))


if __name__ == "__main__":
    main()
