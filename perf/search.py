"""Measure exact search: `python perf/search.py` writes results/search_exact.csv.

CPU of `Searcher`, whose vectors and columns are in memory, against NumPy's exact search (products,
argpartition, and a sort of k) of the same vectors in the same process, in turns: the median and the
quartiles of the ratio over rounds. `hits` is `search` by one vector, which also reads the cells of
the hits; `rows` is `nearest`. Vectors are random; the ranks of both are compared before.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from _timing import cpu_seconds, ratio

import fusionzoo as fz

OUT = Path(__file__).parents[1] / "results" / "search_exact.csv"
ROWS, DIM, K, BATCH = (20_000, 200_000), 128, 10, 32
COLUMNS = ("vectors", "threads", "queries", "answer", "ours_ms", "numpy_ms", "ratio")
COLUMNS += ("quartile_low", "quartile_high")


def main() -> None:
    """Measure in one process with one thread and in one with as many as the libraries take."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", choices=("1", "default"), help="measure here, print the table")
    parsed = parser.parse_args()
    if parsed.threads:
        csv.DictWriter(sys.stdout, COLUMNS).writerows(measured(parsed.threads, parsed.rounds))
        return
    lines = [",".join(COLUMNS)]
    for threads in ("1", "default"):
        limit = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"} if threads == "1" else {}
        command = [sys.executable, __file__, "--rounds", str(parsed.rounds), "--threads", threads]
        done = subprocess.run(command, env=os.environ | limit, stdout=-1, text=True, check=True)
        lines += done.stdout.splitlines()
    OUT.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


def measured(threads: str, rounds: int) -> list[dict[str, Any]]:
    """Return the lines of the table."""
    lines, queries = [], drawn(BATCH, seed=1)
    for rows in ROWS:
        vectors = drawn(rows, seed=0)
        with tempfile.TemporaryDirectory() as folder:
            searcher = fz.Searcher(written(vectors, Path(folder) / "e.parquet"))
            for count, answer in ((1, "hits"), (1, "rows"), (BATCH, "rows")):
                asked = queries[:count]
                theirs = partial(bare, vectors, asked)
                ours = partial(searcher.nearest, torch.from_numpy(asked), "fused", K)
                assert (ours()[1].numpy() == theirs()).all()
                if answer == "hits":
                    ours = partial(searcher.search, vector=asked[0], k=K)
                clock = cpu_seconds if threads == "1" else settled
                facts = ratio(ours, theirs, rounds, clock)
                times = {"ours_ms": facts.pop("ours_s"), "numpy_ms": facts.pop("bare_s")}
                line = {name: f"{1000 * seconds:.3g}" for name, seconds in times.items()}
                about = {"vectors": f"{rows} x {DIM}", "threads": threads, "queries": count}
                lines.append({**about, "answer": answer, **line, **facts})
    return lines


def settled() -> float:
    """Return CPU seconds, once the libraries' threads no longer spin: who woke them pays for it."""
    time.sleep(0.05)
    return cpu_seconds()


def bare(vectors: Any, queries: Any) -> Any:
    """Return the rows of the K nearest of each query, (Q, K), by NumPy alone."""
    scores = queries @ vectors.T
    best = np.argpartition(-scores, K, axis=1)[:, :K]
    order = np.argsort(-np.take_along_axis(scores, best, 1), axis=1)
    return np.take_along_axis(best, order, 1)


def drawn(rows: int, seed: int) -> Any:
    """Return random vectors of length 1."""
    vectors = np.random.default_rng(seed).standard_normal((rows, DIM)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def written(vectors: Any, path: Path) -> Path:
    """Write a file of embeddings with a few columns, in row groups as `fusionzoo embed` does."""
    rows = len(vectors)
    lists = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), DIM)
    columns = {"id": [f"s{row}" for row in range(rows)], "split": ["train"] * rows, "fused": lists}
    pq.write_table(pa.table(columns), path, row_group_size=8192)
    return path


if __name__ == "__main__":
    main()
