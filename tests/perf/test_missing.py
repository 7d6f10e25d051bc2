"""perf/missing.py trains with and without modality dropout, and goes on where it ended."""

from __future__ import annotations

import csv
import importlib
import sys
from pathlib import Path

import pytest

PERF = Path(__file__).parents[2] / "perf"


def test_a_second_start_writes_the_table_without_training_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(PERF))
    missing = importlib.import_module("missing")
    runs, out = tmp_path / "runs.jsonl", tmp_path / "missing.csv"
    flags = {"samples": 180, "epochs": 4, "seeds": 1, "jobs": 1, "runs": runs, "out": out}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    monkeypatch.setattr(sys, "argv", ["missing.py", *words, "--only", "late_mean", "dynmm"])
    missing.main()
    first = out.read_text()
    rows = list(csv.DictReader(first.splitlines()))
    assert [(row["fusion"], row["training"]) for row in rows] == [
        (name, way) for name in ("late_mean", "dynmm") for way in ("complete", "modality_dropout")
    ]
    assert rows[0]["complete"] != rows[1]["complete"]  # dropout changed what was learned
    for row in rows:
        subsets = [float(row[name]) for name in missing.PROPER]
        assert float(row["incomplete"]) == pytest.approx(sum(subsets) / 6, abs=1e-4)
        assert float(row["worst"]) == min(subsets) == float(row[row["worst_subset"]])
    out.unlink()
    monkeypatch.setattr(missing, "accuracies", None)
    missing.main()
    assert out.read_text() == first


def test_only_seeds_that_are_finished_for_every_fusion_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(PERF))
    missing = importlib.import_module("missing")
    names = ["+".join(x) for x in missing.SUBSETS]
    figures = {seed: dict.fromkeys(names, 0.5 + 0.1 * seed) for seed in range(2)}
    pairs = [(name, way) for name in ("gmu", "sum") for way in missing.WAYS]
    results = {(*pair, seed): figures[seed] for pair in pairs for seed in range(2)}
    del results["sum", "complete", 1]
    lines = list(missing.table(results, ["gmu", "sum"], 20))
    assert [line[3] for line in lines] == [1] * 4 and {line[5] for line in lines} == {"0.5000"}
