"""Scores by group of samples: which group is worst, and whether that is more than chance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fusionzoo as fz
from fusionzoo.cli import main
from fusionzoo.errors import FusionZooError
from fusionzoo.evaluation.statistics import share_interval
from fusionzoo.evaluation.subgroups import compare_subgroups, group_names

COUNT = 120


def compared(
    scores: list[float], names: list[str | None], clusters: list[str] | None = None
) -> Any:
    alone = [f"{n}" for n in range(len(scores))]
    groups = group_names(names, "site")
    return compare_subgroups(np.array([scores], float), groups, clusters or alone)


def test_the_worst_group_is_told_apart_only_where_its_interval_says_so() -> None:
    names: list[str | None] = ["a"] * 100 + ["b"] * 100 + ["c"] * 5
    clear = compared([1.0] * 95 + [0.0] * 5 + [1.0] * 60 + [0.0] * 40 + [0.0] * 5, names)
    assert clear.worst.name == "b", "c has 5 samples"
    assert clear.worst.difference.mean == pytest.approx(0.6 - 95 / 105)
    assert clear.worst.difference.high < 0
    equal = compared([1.0, 0.0] * 50 + [1.0, 0.0] * 50 + [1.0] * 5, names)
    assert all(group.difference.low < 0 < group.difference.high for group in equal.groups[:2])


def test_intervals_are_over_samples_that_belong_together_also_where_all_are_right() -> None:
    scores = [float(n // 10 % 2) for n in range(COUNT)]  # ten of a patient, all right or all wrong
    names: list[str | None] = ["ab"[n // 60] for n in range(COUNT)]
    patients = [f"p{n // 10}" for n in range(COUNT)]
    alone, together = compared(scores, names), compared(scores, names, patients)
    for one, other in zip(alone.groups, together.groups, strict=True):
        assert one.score.mean == other.score.mean
        assert other.score.high - other.score.low > 2 * (one.score.high - one.score.low)
    scores = np.ones((3, 40))
    scores[0, 30] = 0
    names = np.array(["a"] * 20 + ["b"] * 20)
    right, other = compare_subgroups(scores, names, [f"p{n // 2}" for n in range(40)]).groups
    assert (right.score.low, right.score.high) == (pytest.approx(share_interval(1, 10)[0]), 1)
    assert right.difference.low < 0 < right.difference.high
    assert other.score.mean == pytest.approx(59 / 60)


@pytest.mark.slow
@pytest.mark.parametrize(("seeds", "spread"), [(1, 0.0), (3, 0.05), (5, 0.3)])
def test_equal_groups_are_rarely_told_apart(seeds: int, spread: float) -> None:
    """In some group of four, in under 8 % of data sets; `spread` is that of trainings."""
    draw, count, trials = np.random.default_rng(0), 400, 400
    keys, worse = [f"{n}" for n in range(count)], 0
    for _ in range(trials):
        names = draw.choice(["a", "b", "c", "d"], count, p=[0.5, 0.3, 0.15, 0.05])
        item = 1 + draw.normal(size=count)
        noise = draw.normal(scale=0.7, size=(seeds, count))
        right = item + draw.normal(scale=spread, size=(seeds, 1)) + noise > 0
        compared = compare_subgroups(right.astype(float), names, keys).groups
        worse += any(x.difference.high < 0 or x.difference.low > 0 for x in compared)
    assert worse / trials < 0.08


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> fz.Run:
    """A model of two vectors, of which site B's first is noise: its samples are often wrong."""
    draw, folder = np.random.default_rng(0), tmp_path_factory.mktemp("subgroups")
    rows = []
    for n in range(COUNT):
        site, label = "AB"[n % 2 == 0], int(draw.integers(2))
        shift = 3.0 * (2 * label - 1) * (site == "A")
        a, b = draw.normal([shift, 0, 0]), draw.normal(size=2)
        split = ["train", "test", "val"][n % 3]
        cells = {"a": a.tolist(), "b": b.tolist(), "site": site if n != 13 else None}
        rows.append(json.dumps({"id": f"s{n}", "split": split, "target": f"{label}", **cells}))
    path = folder / "data.jsonl"
    path.write_text("\n".join(rows))
    train = {"epochs": 6, "batch_size": 8, "num_workers": 0, "unimodal": False}
    settings = {"train": train, "optim": {"lr": 1e-2}, "log": "none"}
    data = {"root": str(path), "kinds": {"a": "vector", "b": "vector"}}
    return fz.train(data, fusion="concat", out=folder / "run", **settings)


def test_evaluate_prints_a_table_by_group_and_names_the_worst(
    run: fz.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "m.json"
    words = ["evaluate", str(run.folder), "--subgroups", "site", "--num_workers", "0"]
    assert main([*words, "--out", str(out)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "site: worst is 'B', below all others (intervals of differences" in printed
    found = json.loads(out.read_text())["subgroups"]["site"]
    sizes = {name: group["samples"] for name, group in found["groups"].items()}
    assert sizes == {"A": 19, "B": 20, "(missing)": 1}
    scores = [group["accuracy"] * group["samples"] for group in found["groups"].values()]
    accuracy = json.loads(out.read_text())["accuracy"]
    assert sum(scores) / 40 == pytest.approx(accuracy)
    assert found == fz.evaluate(run, subgroups=["site"], num_workers=0)["subgroups"]["site"]
    with pytest.raises(FusionZooError, match=r"no column 'sit'\. Did you mean 'site'"):
        fz.evaluate(run, subgroups="sit", num_workers=0)
