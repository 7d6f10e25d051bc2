"""Measure a table of 1,000,000 rows: `python perf/rows.py` writes results/rows.csv.

The table has ids, splits, targets, a short text and a vector of 8 numbers. Each part runs in a
process of its own; CPU seconds include the workers' where there are some. Bars: opening takes less
than 3 s of CPU and 400 MiB beyond what opening a small table takes (imports); the first batch after
resuming in mid-epoch comes within 1 s of CPU; the memory of two workers and of the main process
grows by less than 20 MiB in the second half of an epoch (in the first, pages shared with the main
process become their own); and the last batches that embed.py writes take at most 1.2 times the CPU
of the first (the median of a hundred; the first are computed once more right after the last, as
CPU seconds of the same work vary by a third within minutes on a shared machine). `--share 16` stops
the epoch and the embedding after a sixteenth of the rows of the same table; the figures' names say
so.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
from _memory import memory_kib

from fusionzoo import create_dataset, create_model
from fusionzoo.config import EmbedConfig, RunConfig, from_tree
from fusionzoo.datasets.summary import data_summary
from fusionzoo.distributed import World
from fusionzoo.embeddings.extract import InPieces
from fusionzoo.scripts.embed import embed
from fusionzoo.training.loaders import build_loader, chunks

OUT = Path(__file__).parents[1] / "results" / "rows.csv"
ROWS, BATCH = 1_000_000, 256
COLUMNS = ("part", "figure", "value", "unit", "bar", "met")
MODEL = {
    "text": {"name": "chars", "dim": 8, "num_layers": 1, "num_heads": 1, "max_length": 64},
    "vector": {"name": "vector/identity", "in_dim": 8},
}
Row = tuple[str, str, float, str, float | None]


def write_tables(folder: Path, rows: int) -> None:
    """Write data.parquet, and data.csv without the vectors, and a small table."""
    draw = np.random.default_rng(0)
    columns: dict[str, Any] = {
        "id": [f"s{row:07d}" for row in range(rows)],
        "split": draw.choice(["train", "val", "test"], rows, p=[0.8, 0.1, 0.1]),
        "target": draw.choice(["a", "b", "c"], rows),
        "text": [f"a text of some words about the thing {row:07d}" for row in range(rows)],
    }
    table = pa.table(columns)
    numbers = pa.array(draw.standard_normal(rows * 8).astype(np.float32))
    vectors = pa.FixedSizeListArray.from_arrays(numbers, 8)
    pq.write_table(table.append_column("vector", vectors), folder / "data.parquet")
    pa_csv.write_csv(table, folder / "data.csv")
    pa_csv.write_csv(table.slice(0, 100), folder / "small.csv")


def measure_opening(folder: Path, share: int) -> list[Row]:
    """Open both tables, in CPU seconds and MiB; list the data summary, which is printed then."""
    create_dataset("manifest", root=str(folder / "small.csv"))
    rows: list[Row] = []
    for name in ("data.parquet", "data.csv"):
        memory, start = memory_kib("VmHWM") / 1024, time.process_time()
        dataset = create_dataset("manifest", root=str(folder / name))
        opened = time.process_time() - start
        data_summary(dataset)
        rows.append((f"open {name}", "opening", opened, "s of CPU", 3.0))
        rows.append(
            (f"open {name}", "data summary", time.process_time() - start - opened, "s", None)
        )
        if name == "data.parquet":  # the peak of a process can only grow: of the first alone
            rows.append(
                (f"open {name}", "memory", memory_kib("VmHWM") / 1024 - memory, "MiB", 400.0)
            )
        del dataset
    return rows


def _loader(folder: Path, workers: int, share: int = 1, **train: Any) -> Any:
    dataset = create_dataset("manifest", root=str(folder / "data.parquet")).split("train")
    model = create_model("concat", MODEL, 3, classes=list("abc"))
    settings = {"batch_size": BATCH, "num_workers": workers, **train}
    cfg = from_tree(RunConfig, {"train": settings})
    return build_loader(dataset, model.collate(), cfg, World(size=share), "train")


def measure_resuming(folder: Path, share: int) -> list[Row]:
    """Measure the CPU seconds until the first batch in the middle of the second epoch."""
    rows: list[Row] = []
    for group_by in ("", "length"):
        loader = _loader(folder, 0, **({"group_by": group_by} if group_by else {}))
        start = time.process_time()
        next(chunks(loader, 1, 1, skip=len(loader) // 2))
        name = "resume in mid-epoch" + (", batches by length" if group_by else "")
        rows.append((name, "first batch", time.process_time() - start, "s of CPU", 1.0))
    return rows


def measure_memory(folder: Path, share: int) -> list[Row]:
    """Measure the memory that processes do not share, over an epoch with two workers."""
    loader = _loader(folder, 2, share)
    num_batches, before, grown = len(loader), {}, 0.0
    for number, _ in enumerate(chunks(loader, 1, 0)):
        if number == num_batches // 2:
            before = _memory(loader)
        if number == num_batches - 20:  # while the workers are alive
            after = _memory(loader)
            grown = max(after[name] - before[name] for name in before)
            shown = ", ".join(f"{name} {before[name]:.0f} -> {after[name]:.0f}" for name in before)
            print(f"MiB: {shown}", file=sys.stderr)
    return [(f"epoch with 2 workers{_shown(share)}", "growth of a process", grown, "MiB", 20.0)]


def _memory(loader: Any) -> dict[str, float]:
    """Return the MiB of the main process and each worker, libraries aside; shared pages in part."""
    pids = {"main": "self"}
    workers = loader._iterator._workers
    pids |= {f"worker {i}": str(worker.pid) for i, worker in enumerate(workers)}
    return {name: _proportional(pid) for name, pid in pids.items()}


def _proportional(pid: str) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss_Anon:")) / 1024


def measure_embedding(folder: Path, share: int) -> list[Row]:
    """Compare the CPU time of the last hundred batches that embed.py writes with the first's."""
    model = create_model("concat", MODEL, 3, classes=list("abc")).save(folder / "model")
    settings = {"name": "manifest", "root": str(folder / "data.parquet")}
    paths = {"model": str(model), "out": str(folder / "embeddings.parquet"), "split": "all"}
    sizes = {"batch_size": BATCH, "num_workers": 0}
    times: list[float] = []
    compute = InPieces.__call__

    def timed(self: InPieces, batch: Any) -> Any:
        times.append(time.process_time())
        return compute(self, batch)

    InPieces.__call__ = timed  # type: ignore[method-assign]
    dataset = create_dataset("manifest", root=settings["root"])
    cfg = from_tree(EmbedConfig, {**paths, **sizes, "data": settings})
    embed(cfg, World(), dataset=dataset.subset(range(len(dataset) // share)))
    batches = [1e3 * (b - a) for a, b in pairwise(times)]
    first, last = (statistics.median(part) for part in (batches[:100], batches[-101:-1]))
    times.clear()
    embed(cfg, World(), dataset=dataset.subset(range(101 * BATCH)))
    again = statistics.median(1e3 * (b - a) for a, b in pairwise(times[:101]))
    name = f"embed.py{_shown(share)}"
    return [
        (name, "first 100 batches", first, "ms of CPU per batch", None),
        (name, "last 100 batches", last, "ms of CPU per batch", None),
        (name, "first 100 batches, again after the last", again, "ms of CPU per batch", None),
        (name, "last / first again", last / again, "", 1.2),
    ]


def _shown(share: int) -> str:
    return f" (a share of 1 / {share} of the rows)" if share > 1 else ""


PARTS: dict[str, Callable[[Path, int], list[Row]]] = {
    "opening": measure_opening,
    "resuming": measure_resuming,
    "memory": measure_memory,
    "embedding": measure_embedding,
}


def main() -> int:
    """Run each part in a process of its own and write the table; return 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=list(PARTS))
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--share", type=int, default=1)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    if options.part:
        print("\n" + json.dumps(PARTS[options.part](options.folder, options.share)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        write_tables(Path(folder), options.rows)
        rows = [row for part in PARTS for row in _run(part, Path(folder), options.share)]
    missed = False
    with options.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for part, figure, value, unit, bar in rows:
            met = "" if bar is None else "yes" if value < bar else "no"
            missed |= met == "no"
            writer.writerow((part, figure, f"{value:.3g}", unit, bar or "", met))
            print(f"{part}: {figure} {value:.3g} {unit} {met and f'(bar {bar:g}: {met})'}")
    return 1 if missed else 0


def _run(part: str, folder: Path, share: int) -> list[Row]:
    command = [sys.executable, __file__, "--part", part, "--folder", str(folder)]
    command += ["--share", str(share)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    rows: list[Row] = [tuple(row) for row in json.loads(done.stdout.splitlines()[-1])]
    return rows


if __name__ == "__main__":
    sys.exit(main())
