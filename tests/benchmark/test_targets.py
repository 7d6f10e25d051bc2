"""Numbers, levels and several labels: their figure, baselines, verdict, and missing labels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fusionzoo.benchmark import api
from fusionzoo.benchmark.bench import fold_labels, open_bench
from fusionzoo.benchmark.candidates import list_candidates
from fusionzoo.config import BenchmarkConfig, from_tree
from fusionzoo.errors import FusionZooError
from fusionzoo.targets import AnyOf, Level, Number, OneOf, Target
from fusionzoo.training.multitask import Tasks
from fusionzoo.training.tasks import OBJECTIVES

ROWS = 150


def table(path: Path, kind: str, unlabelled: int = 0) -> dict[str, Any]:
    """A manifest with two vectors, a and b, whose sum and difference determine the target."""
    a, b = np.random.default_rng(0).standard_normal((2, ROWS, 3))
    total, difference = a[:, 0] + b[:, 0], a[:, 1] - b[:, 1]
    cells = {
        "regression": [f"{30 + 5 * x:.4f}" for x in total],
        "ordinal": [str(int(x)) for x in np.digitize(total, (-1, 1))],
        "multilabel": [
            ";".join(name for name, x in (("sum", s), ("gap", d)) if x > 0) or ";"
            for s, d in zip(total, difference, strict=True)
        ],
    }[kind]
    lines = [
        {"id": f"s{row}", "target": "" if row < unlabelled else cells[row]}
        | {"a": a[row].tolist(), "b": b[row].tolist()}
        for row in range(ROWS)
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return {"name": "manifest", "root": str(path), "kinds": {"a": "vector", "b": "vector"}}


def config(tmp_path: Path, kind: str, unlabelled: int = 0, **changes: Any) -> BenchmarkConfig:
    data = table(tmp_path / "data.jsonl", kind, unlabelled)
    tree = {
        "data": data,
        "encoders": {name: {"name": "vector/identity"} for name in "ab"},
        "objective": {"name": kind},
        "fusions": "sum",
        "fusion": {"dim": 8},
        "baselines": "alone,linear",
        "folds": 3,
        "seeds": 2,
        "tune": 0,
        "epochs": 60,
        "batch_size": 16,
        "optim": {"lr": 1e-2},
        "corruptions": False,
        "jobs": 1,
        "out": str(tmp_path / "out"),
    }
    return from_tree(BenchmarkConfig, {**tree, **changes})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "metric", "baseline"),
    [
        ("regression", "mae", "ridge regression on everything"),
        ("ordinal", "mae", "logistic regression on everything"),
        ("multilabel", "sample_f1", "logistic regression on everything"),
    ],
)
def test_every_kind_of_target_has_its_figure_baselines_and_verdict(
    kind: str, metric: str, baseline: str, tmp_path: Path
) -> None:
    changes = {"corruptions": "sample", "baselines": "alone,linear,trees,kernels"}
    report = api.run(config(tmp_path, kind, unlabelled=6, **changes))
    assert report.failed == {}
    lines = {line["candidate"]: line for line in report.figures["leaderboard"]}
    prior, linear, fused = (lines[x] for x in ("frequencies of the labels", baseline, "sum"))
    assert report.figures["metric"] == metric
    assert report.figures["data"]["test"] == ROWS - 6  # a sample without a label is not tested
    scores = [prior["score"], lines["alone:a"]["score"], fused["score"]]
    assert scores == sorted(scores) and linear["score"] > lines["alone:a"]["score"]
    for name in ("boosted trees on everything", "kernel sum on everything"):
        assert lines[name]["score"] > lines["alone:a"]["score"]
    assert (lines["sum"][metric] > 0) and (abs(fused["score"]) == pytest.approx(fused[metric]))
    assert fused["low"] < fused[metric] < fused["high"]
    area = fused["missing_area"]  # in the unit of the figure: errors above 0
    assert 0 < fused["missing_area_low"] < area < fused["missing_area_high"]
    assert (area > fused[metric]) == (metric == "mae")  # worse than with all modalities
    assert report.verdict.startswith("Fusion helps: ")
    assert ("MAE" in report.verdict) == (metric == "mae")
    assert "no sign of a leak" in report.figures["controls"]["words"]
    text = (tmp_path / "out" / "table.md").read_text()
    assert "ECE" not in text and baseline in text


def test_folds_of_numbers_have_all_sizes_of_them(tmp_path: Path) -> None:
    bench, _ = open_bench(config(tmp_path, "regression"))
    assert isinstance(bench.scheme, tuple)
    means = [bench.targets[fold.test].mean().item() for fold in bench.folds]
    assert max(means) - min(means) < 0.2  # of a standard deviation


def test_fusions_of_class_probabilities_are_left_out_or_an_error(tmp_path: Path) -> None:
    cfg = config(tmp_path, "regression", fusions="late")
    bench, _ = open_bench(cfg)
    names, notes = list_candidates(cfg, bench)
    assert "tmc" not in names and "late_weighted" in names
    assert "tmc" in notes[0]
    named = config(tmp_path, "regression", fusions="sum,tmc")
    with pytest.raises(FusionZooError, match="'tmc' joins the probabilities of classes"):
        list_candidates(named, bench)


def tasks(kind: str, target: Target) -> Tasks:
    return Tasks([OBJECTIVES.create(kind, target, torch.zeros(0, target.columns))])


def test_scores_average_to_the_metric_that_training_reports() -> None:
    draw = torch.Generator().manual_seed(0)
    cases = {
        "regression": (Number("y", mean=3.0, deviation=2.0), torch.randn(20, 1, generator=draw)),
        "ordinal": (Level("y", classes=("1", "2", "5")), torch.randint(3, (20, 1)).float()),
        "multilabel": (AnyOf("y", classes=("a", "b")), torch.randint(2, (20, 2)).float()),
    }
    for kind, (target, labels) in cases.items():
        both = tasks(kind, target)
        logits = torch.randn(20, target.width, generator=draw)
        metric = both.metric
        score = both.scores(logits, labels).mean().item()
        assert metric.shown(score) == pytest.approx(both.metrics(logits, labels)[metric.name])


def test_several_labels_are_stratified_by_the_rarest() -> None:
    both = tasks("multilabel", AnyOf("y", classes=("common", "rare")))
    labels = torch.tensor([[1.0, 0], [1, 0], [1, 1], [0, 0], [torch.nan, torch.nan]])
    assert fold_labels(both, labels).tolist() == [1, 1, 0, 2, -1]


def test_a_sample_with_a_label_of_any_target_is_tested() -> None:
    kinds = {"classification": OneOf("y", classes=("a", "b")), "regression": Number("z")}
    both = Tasks([OBJECTIVES.create(name, x, torch.zeros(0, 1)) for name, x in kinds.items()])
    labels = torch.tensor([[1.0, 0.5], [torch.nan, 0.5], [torch.nan, torch.nan], [0, torch.nan]])
    assert fold_labels(both, labels).tolist() == [1, 2, -1, 0]


def test_a_missing_class_is_neither_validated_nor_tested() -> None:
    both = tasks("classification", OneOf("y", classes=("a", "b")))
    assert fold_labels(both, torch.tensor([[1.0], [torch.nan], [0.0]])).tolist() == [1, -1, 0]
