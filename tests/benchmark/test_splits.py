"""Benchmarks over random splits and over lists of splits, and those without single modalities."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch

import fusionzoo as fz
from fusionzoo.benchmark import api
from fusionzoo.benchmark.bench import Fold, open_bench
from fusionzoo.benchmark.candidates import LOGISTIC, list_candidates
from fusionzoo.benchmark.report.page import Report
from fusionzoo.benchmark.report.results import Summary
from fusionzoo.datasets.opening.spec import DataSpec
from fusionzoo.errors import FusionZooError
from fusionzoo.evaluation import statistics
from helpers.planted import candidate, summary
from helpers.setup_benchmark import small

COUNT = 60
QUICK: dict[str, Any] = {
    **{"fusions": "sum", "seeds": 1, "epochs": 1, "controls": False, "corruptions": "none"},
    "baselines": "none",
}


def table(**columns: list[str]) -> pd.DataFrame:
    """Two vectors, two classes, and columns of splits."""
    draw = np.random.default_rng(0)
    labels = np.arange(COUNT) % 2
    vectors = {name: (draw.normal(size=(COUNT, 3)) + labels[:, None]).tolist() for name in "ab"}
    ids = [f"s{row}" for row in range(COUNT)]
    return pd.DataFrame({"id": ids, "y": [f"c{x}" for x in labels], **vectors, **columns})


def words(first: int, last: int, val: int = 0) -> list[str]:
    """Test the rows from `first` to `last`, validate on `val` others, train on the rest."""
    splits = ["test" if first <= row < last else "train" for row in range(COUNT)]
    for row in [row for row, x in enumerate(splits) if x == "train"][:val]:
        splits[row] = "valid"
    return splits


def benchmark(data: Any, out: Path, **settings: Any) -> Report:
    base = {"tune": 0, "jobs": 1, "fusion": {"dim": 8}}
    return fz.benchmark(opened(data), target="y", out=out, **{**base, **QUICK, **settings})


def opened(data: pd.DataFrame) -> dict[str, Any]:
    return {"name": "manifest", "root": data, "kinds": dict.fromkeys("ab", "vector")}


def full_rows(report: Report) -> list[dict[str, Any]]:
    rows = pq.read_table(report.folder / "results.parquet").to_pylist()
    return [row for row in rows if row["candidate"] == "sum" and row["subset"] == "a+b"]


def test_columns_of_splits_are_the_folds_and_no_inputs(tmp_path: Path) -> None:
    data = table(fold_1=words(0, 20, 10), fold_2=words(10, 40))
    report = benchmark(data, tmp_path, splits=["fold_1", "fold_2"])
    assert report.figures["data"]["modalities"] == {"a": "vector", "b": "vector"}
    assert [row["samples"] for row in full_rows(report)] == [20, 30]
    assert report.figures["protocol"] == (
        "2 splits as listed in fold_1, fold_2, a tenth of train held out for validation in 1 of"
        " them; mean ± standard deviation over them"
    )
    assert (report.figures["data"]["test"], report.figures["data"]["tested_samples"]) == (50, 40)
    behind = " ".join(report.figures["behind"])
    assert "50 tests of 40 samples; the interval counts a sample once" in behind
    accuracies = [row["accuracy"] for row in full_rows(report)]
    line = {x["candidate"]: x for x in report.figures["leaderboard"]}["sum"]
    assert line["mean_over_splits"] == pytest.approx(np.mean(accuracies))
    assert line["sd_over_splits"] == pytest.approx(np.std(accuracies, ddof=1))
    assert "over splits" in (tmp_path / "table.md").read_text()


def test_files_of_splits_are_the_folds_and_may_leave_samples_out(tmp_path: Path) -> None:
    files = []
    for number, splits in enumerate((words(0, 20, 10), words(10, 40, 5))):
        files.append(str(tmp_path / f"split{number}.csv"))
        rows = [(f"s{row}", split) for row, split in enumerate(splits) if row < 50]
        with open(files[-1], "w", newline="") as file:
            csv.writer(file).writerows([("id", "split"), *rows])
    dataset = fz.create_dataset(opened(table()), target="y")
    bench, _ = open_bench(
        small(tmp_path, folds=None, splits=",".join(files), **QUICK), DataSpec(dataset=dataset)
    )
    sizes = [[len(x) for x in vars(fold).values()] for fold in bench.folds]
    assert sizes == [[20, 10, 20], [15, 5, 30]]
    assert bench.folds[1].test.tolist() == [*range(10, 40)]
    assert bench.test_share == pytest.approx((20 / 50 + 30 / 50) / 2)


def test_random_splits_are_of_seed_after_seed_and_more_of_them_go_on(tmp_path: Path) -> None:
    settings = {"shares": (0.8, 0, 0.2), "seed": 3}
    report = benchmark(table(), tmp_path, repeats=2, **settings)
    assert report.figures["protocol"] == (
        "2 random splits of 80 % train, 20 % test (seeds 3 to 4), a tenth of train held out for"
        " validation; mean ± standard deviation over them"
    )
    data = fz.create_dataset(opened(table()), target="y")
    bench, _ = open_bench(
        small(tmp_path, folds=None, repeats=2, seed=3, **QUICK), DataSpec(dataset=data)
    )
    for seed, fold in zip((3, 4), bench.folds, strict=True):
        order = np.random.RandomState(seed).permutation(COUNT)
        assert fold.test.tolist() == sorted(order[int(0.85 * COUNT) :].tolist())
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").glob("*.npz")}
    benchmark(table(), tmp_path, repeats=3, **settings)
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").glob("*.npz")}
    assert len(after) == len(files) + 1 and files.items() <= after.items()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"folds": 5, "repeats": 3}, "folds.* and .*repeats.* both say how to split"),
        ({"val_share": 0.1, "repeats": 2}, "val_share.* and .*repeats.* both say how to split"),
        ({"random_splits": 0, "splits": "fold_1"}, "random_splits.* both say how to split"),
        ({"splits": "fold_2"}, "no column 'fold_2' for .*splits.*Did you mean 'fold_1'"),
        ({"splits": "fold1.csv"}, "fold1.csv"),
        ({"splits": "only_train"}, "only_train: no sample is in test; there are train"),
    ],
)
def test_splits_that_cannot_be_used_are_named(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    data = table(fold_1=words(0, 20), only_train=["train"] * COUNT)
    with pytest.raises(FusionZooError, match=message):
        benchmark(data, tmp_path, **settings)


def test_a_sample_that_is_tested_twice_counts_once_in_the_interval() -> None:
    once = summary([candidate("gmu", [0.8, 0.7]), candidate("alone:audio", [0.6, 0.6])])
    scores = once.candidate("gmu").scores
    test = once.bench.folds[0].test
    split = Fold(torch.arange(3 * len(test)), test[:0], test)
    cfg = small(Path("nowhere"), folds=None, splits="x,y")
    bench = replace(once.bench, cfg=cfg, folds=(split, split))
    twice = Summary(bench, once.target.repeat(2), [], {}, {})
    doubled = twice.interval(np.concatenate([scores, scores], 1))
    expected, _ = statistics.crossed(scores, 0.25)
    assert [*doubled] == pytest.approx([*expected])
    assert twice.first_tests.tolist() == [True] * len(test) + [False] * len(test)


def test_without_singles_the_verdict_says_that_nothing_is_compared(tmp_path: Path) -> None:
    changes = {**QUICK, "data": {"name": "interactions", "task": "and", "samples": 80}}
    report = api.run(small(tmp_path / "none", **changes))
    names = {line["candidate"] for line in report.figures["leaderboard"]}
    assert names == {"sum", "majority class"}
    assert "--baselines none), so there is none to compare fusion with" in report.verdict
    assert report.figures["leader"] == "sum" and "gain" not in report.figures
    rows = pq.read_table(report.folder / "results.parquet").to_pylist()
    broken = {x["subset"] for x in rows if x["corruption"] == "pairing"}
    assert broken == {"a+b, a of another sample", "a+b, b of another sample"}
    bench, _ = open_bench(small(tmp_path, **{**changes, "baselines": "linear"}))
    names, _ = list_candidates(bench.cfg, bench)
    assert names == ["sum", "linear probe of a", "linear probe of b", LOGISTIC]
