"""Search 1,000,000 x 256 vectors on one core: `python perf/search.py` writes results/search.csv.

The vectors are planted: 10,000 centres and noise of the same length, as embeddings of many kinds of
things are; `--spread` draws them without any structure instead, for which an index cannot know
where neighbours are (no bar). Queries are further draws of the same kind, not rows of the file.
Bars: less than 1 s a query exactly, less than 100 ms with the index, whose recall@10 against the
exact search is at least 0.95. CPU seconds of one thread, which other processes do not add to; the
elapsed ones, and the machine's load, stand beside them.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from fusionzoo.tools.search.index import build_index, import_faiss
from fusionzoo.tools.search.search import Searcher
from fusionzoo.tools.search.vectors import nearest, open_vectors

OUT = Path(__file__).parents[1] / "results" / "search.csv"
ROWS, DIM, CENTRES, QUERIES, K = 1_000_000, 256, 10_000, 50, 10
COLUMNS = ("vectors", "figure", "value", "unit", "bar", "met", "load")
PART = 50_000


def draw(rows: int, seed: int, spread: bool) -> np.ndarray:
    """Draw unit vectors, (rows, DIM)."""
    rng = np.random.default_rng(seed)
    vectors = rng.standard_normal((rows, DIM), np.float32)
    if not spread:
        centres = np.random.default_rng(0).standard_normal((CENTRES, DIM), np.float32)
        vectors += centres[rng.integers(0, CENTRES, rows)]
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def write_file(path: Path, rows: int, spread: bool) -> None:
    """Write a file of embeddings in parts."""
    kind = pa.list_(pa.float32(), DIM)
    schema = pa.schema([("id", pa.string()), ("fused", kind)], {"fusionzoo": json.dumps({})})
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        for start in range(0, rows, PART):
            count = min(PART, rows - start)
            flat = pa.array(draw(count, 1 + start, spread).ravel())
            ids = pa.array([f"s{row:08d}" for row in range(start, start + count)])
            vectors = pa.FixedSizeListArray.from_arrays(flat, DIM)
            writer.write_table(pa.Table.from_arrays([ids, vectors], schema=schema))


def timed(work: Callable[[torch.Tensor], object], queries: torch.Tensor) -> tuple[float, float]:
    """Return the median CPU and elapsed seconds of a query, after a first one."""
    work(queries[:1])
    cpu, elapsed = [], []
    for query in queries:
        start, start_cpu = time.perf_counter(), time.process_time()
        work(query[None])
        cpu.append(time.process_time() - start_cpu)
        elapsed.append(time.perf_counter() - start)
    return statistics.median(cpu), statistics.median(elapsed)


def measure(rows: int, spread: bool, folder: Path) -> list[tuple[str, float, str, float | None]]:
    """Return figures, values, units and bars."""
    torch.set_num_threads(1)
    import_faiss().omp_set_num_threads(1)
    path, figures = folder / "e.parquet", []
    write_file(path, rows, spread)
    file, queries = open_vectors(path), torch.from_numpy(draw(QUERIES, 0, spread))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    nearest(file.blocks("fused"), queries[:1], K)
    figures.append(("exact, file read for the query: CPU", time.process_time() - start, "s", None))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    figures.append(("exact, file read for the query: memory", grown, "MiB", None))
    start = time.process_time()
    index = build_index(file, "fused")
    figures.append(("index: building, CPU", time.process_time() - start, "s", None))
    cpu, elapsed = timed(lambda query: index.search(query, K), queries)
    bar = None if spread else 0.1
    figures += [("index: a query, CPU", cpu, "s", bar), ("index: a query", elapsed, "s", None)]
    _, true = index.exact(queries, K)
    _, found = index.search(queries, K)
    recall = (found[:, :, None] == true[:, None]).any(1).double().mean().item()
    figures.append(("index: recall@10", recall, "", None if spread else 0.95))
    figures.append(("index: cells visited", index.about.visited / index.about.cells, "share", None))
    searcher = Searcher(path, method="exact")
    cpu, elapsed = timed(lambda query: searcher.nearest(query, "fused", K), queries[:10])
    figures += [("exact, in memory: a query, CPU", cpu, "s", 1.0)]
    return [*figures, ("exact, in memory: a query", elapsed, "s", None)]


def main() -> None:
    """Measure and write results/search.csv; `--spread` adds to it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--spread", action="store_true", help="vectors without structure")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(args.rows, args.spread, Path(folder))
    name = f"{args.rows:,} x {DIM}, {'spread' if args.spread else f'{CENTRES:,} centres'}"
    load = f"{os.getloadavg()[1]:.0f} on {os.cpu_count()} cores"
    lines = []
    for figure, value, unit, bar in figures:
        good = bar is None or (value >= bar if "recall" in figure else value < bar)
        met = "" if bar is None else "yes" if good else "no"
        lines.append((name, figure, f"{value:.4g}", unit, "" if bar is None else bar, met, load))
    kept = []
    if args.out.is_file():
        with args.out.open(newline="", encoding="utf-8") as file:
            kept = [tuple(row) for row in list(csv.reader(file))[1:] if row[0] != name]
    with args.out.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *kept, *lines])
    for line in lines:
        print(*line, sep=" | ")


if __name__ == "__main__":
    main()
