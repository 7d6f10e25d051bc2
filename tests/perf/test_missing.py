"""perf/missing.py trains with and without modality dropout, and goes on where it ended."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

PERF = Path(__file__).parents[2] / "perf"


@pytest.mark.nightly
def test_a_second_start_writes_the_table_without_training_again(tmp_path: Path) -> None:
    runs, out = tmp_path / "runs.jsonl", tmp_path / "missing.csv"
    flags = {"samples": 180, "epochs": 4, "seeds": 1, "jobs": 1, "runs": runs, "out": out}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, str(PERF / "missing.py"), *words, "--only", "late_mean", "dynmm"]
    subprocess.run(command, check=True)
    first, trained = out.read_text(), runs.read_text()
    rows = list(csv.DictReader(first.splitlines()))
    assert [(row["fusion"], row["training"]) for row in rows] == [
        (name, way) for name in ("late_mean", "dynmm") for way in ("complete", "modality_dropout")
    ]
    assert rows[0]["complete"] != rows[1]["complete"]  # dropout changed what was learned
    for row in rows:
        assert float(row["worst"]) == float(row[row["worst_subset"]]) <= float(row["incomplete"])
    out.unlink()
    subprocess.run(command, check=True)
    assert out.read_text() == first
    assert runs.read_text() == trained
