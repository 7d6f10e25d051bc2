"""Candidates compared by another figure than the objective's own: `--metric auroc`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

from fusionzoo.benchmark import api, schedule, store
from fusionzoo.benchmark.bench import metric_named, open_bench
from fusionzoo.config import BenchmarkConfig
from fusionzoo.errors import FusionZooError
from fusionzoo.evaluation.metrics import METRICS, metric
from helpers.setup_benchmark import small, vectors

ROWS = 120


def config(tmp_path: Path, **changes: Any) -> BenchmarkConfig:
    """Two classes, a vector that tells and one that tells less; a third of the samples lack it."""
    draw = np.random.default_rng(0)
    labels = np.arange(ROWS) % 2
    a, b = (labels[:, None] + draw.normal(size=(ROWS, 3)) * x for x in (1.5, 2.0))
    cells = {
        "a": a.tolist(),
        "b": [None if row % 3 == 0 else b[row].tolist() for row in range(ROWS)],
    }
    data = vectors(tmp_path / "data.jsonl", ["ill" if x else "well" for x in labels], cells)
    settings = {"corruptions": "none", "folds": 3, "epochs": 3, "fusions": "sum", "metric": "auroc"}
    return small(tmp_path / "out", data=data, **{**settings, **changes})


def test_the_table_has_the_mean_figure_of_the_folds_and_the_verdict_is_by_it(
    tmp_path: Path,
) -> None:
    cfg = config(tmp_path)
    report = api.run(cfg)
    bench, _ = open_bench(cfg)
    assert report.figures["metric"] == "auroc" and "AUROC" in report.verdict
    areas, sizes = [], []
    margins = torch.zeros(2, ROWS)
    for path in Path(cfg.out, "cells").glob("sum-f*.npz"):
        fold = bench.folds[int(path.name.split("-")[1][1:])]
        for result in store.load(path) or ():
            margin = result.logits[:, 1] - result.logits[:, 0]
            margins[result.seed, fold.test] = torch.from_numpy(margin)
            areas.append(roc_auc_score(bench.targets[fold.test], margin))
            sizes.append(len(fold.test))
            assert result.rows[0]["auroc"] == pytest.approx(areas[-1])
    line = next(x for x in report.figures["leaderboard"] if x["candidate"] == "sum")
    assert line["auroc"] == pytest.approx(np.average(areas, weights=sizes), abs=1e-6)
    assert line["low"] < line["auroc"] < line["high"]
    both = bench.present.all(1)
    among = [roc_auc_score(bench.targets[both], margin[both]) for margin in margins]
    two = next(x for x in report.figures["presence"] if x["present"] == "a+b")
    assert two["fusion by validation"] == pytest.approx(np.mean(among), abs=1e-6)
    job = schedule.first_job(bench, "sum", 0)
    other, _ = open_bench(config(tmp_path, metric=""))
    assert schedule.path_of(other, job) != schedule.path_of(bench, job)  # another epoch may be best


def test_a_metric_that_is_none_or_not_defined_on_a_fold_is_refused_before_anything_is_trained(
    tmp_path: Path,
) -> None:
    with pytest.raises(FusionZooError, match=r"--metric auroq: .* Did you mean 'auroc'\?"):
        api.run(config(tmp_path, metric="auroq"))
    for name in ("test", "val"):
        lines = [f"s{row},{('train', 'val', 'test')[row % 3]}" for row in range(ROWS)]
        lines = [x for x in lines if not (x.endswith(name) and int(x[1:].split(",")[0]) % 2)]
        splits = tmp_path / f"{name}.csv"
        splits.write_text("\n".join(["id,split", *lines]))
        words = f"--metric auroc is not defined on the {name.replace('val', 'validation')} samples"
        with pytest.raises(FusionZooError, match=f"{words} of split 0: AUROC, for example"):
            api.run(config(tmp_path, splits=str(splits), folds=None))
    assert not list(tmp_path.glob("out/cells/*"))


@pytest.mark.usefixtures("forget_plugins")
def test_a_plug_ins_metric_that_returns_no_tensor_compares_in_its_direction(
    tmp_path: Path,
) -> None:
    @metric("classification", higher=False)
    def missed(logits: Tensor, target: Tensor) -> float:
        return (logits.argmax(-1) != target)[target == 1].double().mean().item()

    assert not METRICS["classification.missed"].has_slope
    cfg = config(tmp_path, metric="missed", seeds=1, baselines="linear")
    report = api.run(cfg)
    lines = report.figures["leaderboard"]
    assert [x["missed"] for x in lines] == sorted(x["missed"] for x in lines)
    assert all(x["score"] == -x["missed"] and x["low"] <= x["missed"] <= x["high"] for x in lines)
    assert not metric_named("missed").higher
    summed = next(x for x in lines if x["candidate"] == "sum")
    assert summed["missed"] == pytest.approx(1 - summed["sensitivity"], abs=0.05)  # pooled, that
