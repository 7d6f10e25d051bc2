"""Measure `pid` in its three modes on gates whose parts are known: `python perf/pid.py`.

4,000 noisy vectors of a gate's two bits in five folds, planted by tests/helpers/gates.py. Writes
results/pid.csv: parts in bits, the largest error of a part, seconds. About two minutes on one
core.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from pathlib import Path

import numpy as np

from fusionzoo.evaluation.pid_probes import decompose_data

ROOT = Path(__file__).parents[1]
MODES = ("cvx", "batch", "sample")


def measure(gate: str, mode: str, samples: int) -> dict[str, str]:
    """Return a row of the table."""
    from helpers.gates import GATES, planted

    setup = planted(gate, samples)
    start = time.process_time()
    (pair,) = decompose_data(setup, mode, [str(row) for row in range(samples)])
    seconds = time.process_time() - start
    error = np.abs(np.subtract(pair.parts, GATES[gate][1])).max()
    parts = {name: f"{round(value, 3) + 0.0:.3f}" for name, value in pair.parts._asdict().items()}
    figures = {"error": f"{error:.3f}", "seconds": f"{seconds:.1f}"}
    return {"gate": gate, "mode": mode, "samples": str(samples), **parts, **figures}


def main() -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    from helpers.gates import GATES

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--out", default=str(ROOT / "results" / "pid.csv"))
    flags = parser.parse_args()
    rows = []
    for gate in GATES:
        for mode in MODES:
            rows.append(measure(gate, mode, flags.samples))
            print(*rows[-1].values(), flush=True)
    with Path(flags.out).open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"wrote {flags.out}")


if __name__ == "__main__":
    main()
