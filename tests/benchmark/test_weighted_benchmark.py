"""A benchmark of samples with weights: training, scores, intervals, tests and fitted models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from sklearn.metrics import f1_score

import fusionzoo as fz
from fusionzoo.benchmark.report.leaderboard import leaderboard
from fusionzoo.benchmark.report.results import Summary
from fusionzoo.errors import FusionZooError
from fusionzoo.evaluation.statistics import compare
from fusionzoo.training.fitted.components import Tabular, Trees
from fusionzoo.training.fitted.kernels import KernelSum
from fusionzoo.training.fitted.linear import Linear
from fusionzoo.training.fitted.method import Inputs, Method
from helpers.planted import ITEMS, TARGET, candidate, summary

ROWS = 120


# ---- the summary


def test_scores_intervals_and_gains_are_those_of_the_weighted_mean() -> None:
    names = [candidate("alone:image", [0.6, 0.62]), candidate("gmu", [0.7, 0.72], shift=30)]
    plain = summary(names)
    weights = torch.arange(ITEMS) // 5 % 4 + 0.0  # a quarter counts nothing
    bench = replace(plain.bench, weights=weights, weighted_by="w")
    whole = Summary(bench, plain.target, plain.candidates, plain.controls, {})
    whole.leaderboard = leaderboard(whole)
    for results in names:
        wanted = np.average(results.scores.mean(0), weights=weights)
        line = whole.line(results.name)
        assert line["accuracy"] == pytest.approx(wanted)
        assert line["low"] < wanted < line["high"] and "weight" not in line
        settings: dict[str, Any] = {"average": "macro", "sample_weight": weights}
        f1 = [f1_score(TARGET, x.argmax(-1), **settings) for x in results.logits]
        assert line["macro_f1"] == pytest.approx(np.mean(f1))
    gain = whole.compare(names[1], names[0])
    difference = (names[1].scores - names[0].scores).mean(0)
    assert gain.difference == pytest.approx(np.average(difference, weights=weights))
    assert np.isnan(gain.mcnemar_p) and gain.low < gain.difference < gain.high
    some = np.arange(ITEMS) < 80
    part = whole.compare(names[1], names[0], some)
    assert part.difference == pytest.approx(np.average(difference[some], weights=weights[some]))
    assert whole.mean(names[0].scores[:, :40], slice(0, 40)) == pytest.approx(
        np.average(names[0].scores[:, :40].mean(0), weights=weights[:40])
    )


def test_equal_weights_compare_as_none() -> None:
    a, b = np.random.default_rng(0).integers(0, 2, (2, 3, 50)).astype(float)
    found = compare(a, b, weights=np.full(50, 3.0))
    assert found == pytest.approx(compare(a, b)._replace(mcnemar_p=np.nan), nan_ok=True)


# ---- fitted models


@pytest.mark.parametrize(
    ("method", "setting"),
    [
        (Linear(), {"penalty": 1.0}),
        (Trees(), {"rate": 0.1, "leaves": 8}),
        (KernelSum(), {"gamma": 1.0, "penalty": 1.0}),
    ],
)
def test_a_fitted_model_learns_by_the_weights(method: Method, setting: dict[str, float]) -> None:
    draw = np.random.default_rng(0)
    labels = np.arange(200) % 2
    x = draw.normal(size=(200, 3)) + 0.5 * labels[:, None]
    there = np.ones((200, 1), bool)
    heavy = np.where(labels == 1, 1.8, 0.2)  # of mean 1
    answers = []
    for weights in (None, np.ones(200), heavy):
        inputs = Inputs((x,), there, weights)
        classes, shares = method.shares(inputs, labels, inputs, setting)
        answers.append(shares[:, 1].mean())
        numbers = method.numbers(inputs, x[:, :1] + labels[:, None], inputs, {**setting})
        assert classes.tolist() == [0, 1] and np.isfinite(numbers).all()
    plain, equal, weighted = answers
    assert equal == pytest.approx(plain, abs=1e-3)
    assert weighted > plain + 0.1


# ---- a whole benchmark

SETTINGS: dict[str, Any] = {
    "columns": {"first": "age", "second": "size"},
    "kinds": {"first": "tabular", "second": "tabular"},
    "encoders": {x: {"name": "tabular/mlp", "dim": 8} for x in ("first", "second")},
    "fusions": ["mean"],
    **{"seeds": 1, "epochs": 2, "tune": 2, "encoder_epochs": 1, "folds": 0, "jobs": 1},
    **{"corruptions": "none", "device": "cpu"},
}


def write_table(path: Path, weights: Sequence[float]) -> None:
    draw = np.random.default_rng(0)
    lines = ["id,split,target,age,size,w"]
    for row in range(ROWS):
        label, split = "aab"[row % 3], ("train", "train", "val", "test")[row // 3 % 4]
        a, b = draw.normal(size=2) + (label == "b")
        lines.append(f"r{row},{split},{label},{a:.4f},{b:.4f},{weights[row]}")
    path.write_text("\n".join(lines) + "\n")


def test_a_benchmark_is_weighted_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heavy = [5 if row % 3 == 2 else 1 for row in range(ROWS)]  # b outweighs a
    write_table(tmp_path / "a.csv", heavy)
    path = str(tmp_path / "a.csv")
    report = fz.benchmark(path, weight_column="w", out=str(tmp_path / "out"), **SETTINGS)
    assert "Test samples, weighted by w" in capsys.readouterr().out
    figures = json.loads((tmp_path / "out/summary.json").read_text())
    lines = {line["candidate"]: line for line in figures["leaderboard"]}
    assert figures["weighted_by"] == "w"
    assert lines["majority class"]["accuracy"] == pytest.approx(5 / 7)  # that of b
    assert any(note.startswith("Samples are weighted by w") for note in figures["notes"])
    assert "takes no weights" in str(figures["not_run"])
    assert {"linear probe of first", "boosted trees on everything"} <= lines.keys()
    assert "weighted by w" in (report.folder / "index.html").read_text()


def test_encoders_that_are_trained_learn_by_the_weights(tmp_path: Path) -> None:
    """Weights that differ in training alone change the model; equal ones are as none."""
    learned = [row // 3 % 4 < 2 for row in range(ROWS)]
    heavy = [9 if x and row % 3 == 2 else 1 for row, x in enumerate(learned)]
    losses = []
    for name, cells, column in (("a", heavy, "w"), ("b", [1] * ROWS, "w"), ("c", heavy, None)):
        write_table(tmp_path / f"{name}.csv", cells)
        settings = {**SETTINGS, "mode": "finetune", "tune": 0, "baselines": "none"}
        out = str(tmp_path / name)
        fz.benchmark(str(tmp_path / f"{name}.csv"), weight_column=column, out=out, **settings)
        rows = pq.read_table(Path(out) / "results.parquet").to_pylist()
        losses.append([row["nll"] for row in rows])
    weighted, alike, without = losses
    assert alike == pytest.approx(without, rel=1e-9)  # of a weighted mean, to rounding
    assert weighted != pytest.approx(without, rel=1e-3)


def test_weights_that_leave_nothing_to_test_are_refused(tmp_path: Path) -> None:
    write_table(tmp_path / "a.csv", [int(row // 3 % 4 != 3) for row in range(ROWS)])
    path, out = str(tmp_path / "a.csv"), str(tmp_path / "out")
    with pytest.raises(FusionZooError, match=r"fold 0: all weights of its test samples are 0"):
        fz.benchmark(path, weight_column="w", out=out, **SETTINGS)
    assert not Tabular.weighs_rows
