"""perf/linear_skip.py compares fusions with and without the option, on the same folds."""

from __future__ import annotations

import csv
import importlib
import sys
from pathlib import Path

import pytest

from fusionzoo import list_fusions

PERF = Path(__file__).parents[2] / "perf"
RECIPE = """
data: {name: interactions, task: redundant, samples: 90, noise: 3.0}
encoders: {a: {name: vector/identity}, b: {name: vector/identity}}
fusion: {dim: 8}
folds: 3
epochs: 1
"""


def test_every_fusion_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PERF))
    assert sorted(importlib.import_module("linear_skip").in_order()) == list_fusions()


@pytest.mark.slow
def test_a_second_start_writes_the_same_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(PERF))
    script = importlib.import_module("linear_skip")
    (tmp_path / "configs" / "benchmarks").mkdir(parents=True)
    (tmp_path / "configs" / "benchmarks" / "small.yaml").write_text(RECIPE)
    monkeypatch.setattr(script, "ROOT", tmp_path)
    out = tmp_path / "linear_skip.csv"
    words = ["--data", "small", "--only", "lmf", "--jobs", "1"]
    words += ["--runs", str(tmp_path / "runs"), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["linear_skip.py", *words])
    script.main()
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert [(row["data"], row["fusion"]) for row in rows] == [("small", "lmf")]
    for row in rows:
        gain = 100 * (float(row["with"]) - float(row["without"]))
        assert float(row["difference"]) == pytest.approx(gain, abs=0.02)
        assert float(row["low"]) <= gain + 0.02
        assert gain - 0.02 <= float(row["high"])
        assert (row["samples"], row["folds"], row["modalities"]) == ("90", "3", "a+b")
    with out.open("a") as file:  # a line of another run stays
        file.write("small,mlb,early,0.5,0.5,0,0,0,0.5,a+b,90,3\n")
    first, cells = out.read_text(), sorted((tmp_path / "runs").rglob("*.npz"))
    stamps = [path.stat().st_mtime_ns for path in cells]
    script.main()
    assert sorted(out.read_text().splitlines()) == sorted(first.splitlines())
    assert [path.stat().st_mtime_ns for path in cells] == stamps
