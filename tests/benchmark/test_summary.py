"""What a summary makes of the jobs' results: figures over folds, baselines."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import one_hot

from fusionzoo.benchmark import api, schedule
from fusionzoo.benchmark.bench import open_bench
from fusionzoo.benchmark.prepare import prepare
from fusionzoo.benchmark.report import results
from fusionzoo.benchmark.report.page import Report
from fusionzoo.benchmark.report.summary import summarise
from fusionzoo.targets import AnyOf, Level, Number, OneOf, Target, mean_prediction
from helpers.setup_benchmark import small, vectors


def report_of(tmp_path: Path, **changes: Any) -> Report:
    return api.run(small(tmp_path, controls=False, corruptions=False, fusions="sum", **changes))


def lines_of(report: Report) -> dict[str, dict[str, Any]]:
    return {line["candidate"]: line for line in report.figures["leaderboard"]}


def test_equal_predictions_have_equal_figures_whether_candidate_or_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = torch.Generator().manual_seed(0)
    labels = torch.tensor([0] * 60 + [1] * 40 + [2] * 10)  # a rare class: F1 by fold is rough
    values = [torch.randn(110, 3, generator=draw) + labels[:, None] for _ in "ab"]
    named = {name: x.tolist() for name, x in zip("ab", values, strict=True)}
    data = vectors(tmp_path / "data.jsonl", [f"c{x}" for x in labels.tolist()], named)

    def head_of_a(candidates: list[Any], _: int) -> Any:
        return {x.name: x for x in candidates}.get("alone:a", candidates[0])

    monkeypatch.setattr(results, "best_on_validation", head_of_a)
    lines = lines_of(report_of(tmp_path, data=data, folds=3, seeds=2))
    baseline, candidate = lines["single by validation"], lines["alone:a"]
    assert len(baseline) > 10
    for key in set(baseline) - {"candidate", "family", "kind"}:
        assert baseline[key] == pytest.approx(candidate[key], nan_ok=True), key


def test_untuned_and_tuned_are_figures_of_the_same_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def same(bench: Any, job: Any) -> Any:  # tuning that changes the training, not its result
        return schedule.TunedSettings({**job.settings}, {"epochs": bench.cfg.epochs}), None

    monkeypatch.setattr(schedule, "tune", same)
    monkeypatch.setattr(schedule, "chosen_settings", lambda *job: same(*job)[0])
    report = report_of(tmp_path, tune=2, seeds=3, epochs=1, data={"noise": 2.0})
    for name in ("sum", "alone:a", "alone:b"):
        line = lines_of(report)[name]
        assert line["untuned"] == pytest.approx(line["accuracy"], abs=1e-6)
        assert 0 < line["accuracy"] < 1


def test_the_ensemble_of_seeds_averages_probabilities_at_the_cost_of_all_seeds(
    tmp_path: Path,
) -> None:
    lines = lines_of(report_of(tmp_path, seeds=3, folds=3, epochs=2))
    line, fusion = lines["ensemble of seeds"], lines["sum"]  # the only fusion, in every fold
    assert (line["kind"], line["seeds"]) == ("chosen", 1)
    assert line["nll"] < fusion["nll"]  # the mean of probabilities: by Jensen's inequality
    assert line["brier"] < fusion["brier"]
    assert "gain_difference" not in line
    table = csv.DictReader((tmp_path / "costs.csv").read_text().splitlines())
    costs = {row["candidate"]: row for row in table}
    for key, times in (("parameters", 3), ("macs", 3), ("samples_per_second", 1 / 3)):
        ratio = float(costs["ensemble of seeds"][key]) / float(costs["sum"][key])
        assert ratio == pytest.approx(times, rel=1e-4)


@pytest.mark.parametrize(
    ("target", "logits", "expected"),
    [  # expected: the probabilities (of levels: above each) or numbers
        (OneOf("y", classes=("a", "b")), [[0.0, math.log(3)], [0.0, -100.0]], [0.625, 0.375]),
        (AnyOf("y", classes=("a", "b")), [[0.0, 100.0], [math.log(3), -100.0]], [0.625, 0.5]),
        (Number("y"), [[1.0], [4.0]], [2.5]),
        (Level("y", classes=("1", "2", "5")), [[0.0, 0.0], [100.0, 100.0]], [0.75, 0.625]),
    ],
)
def test_the_mean_prediction_is_that_of_probabilities_levels_or_numbers(
    target: Target, logits: list[list[float]], expected: list[float]
) -> None:
    mean = mean_prediction([target], torch.tensor(logits)[:, None])
    shown = {
        "classification": mean.softmax(-1),
        "multilabel": mean.sigmoid(),
        "regression": mean,
        "ordinal": Level.above(mean),
    }[target.standard_kind()]
    assert shown[0].tolist() == pytest.approx(expected, abs=1e-6)


def incomplete_data(path: Path, kind: str) -> dict[str, Any]:
    """Four classes, two vectors, each missing in a quarter of the samples, never both.

    `coverage`: b is a with noise, so no fusion of both knows more than a. `fusion`: a tells one bit
    of the class, b the other.
    """
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(400) % 4
    a, b = torch.randn(2, 400, 4, generator=draw)
    a += 2.0 * one_hot(labels if kind == "coverage" else labels // 2, 4)
    b = a + 0.5 * b if kind == "coverage" else b + 2.0 * one_hot(labels % 2, 4)
    values: dict[str, list[list[float] | None]] = {"a": a.tolist(), "b": b.tolist()}
    for number, row in enumerate(torch.randperm(400, generator=draw)[:200].tolist()):
        values["ab"[number % 2]][row] = None
    return vectors(path, [f"c{x}" for x in labels.tolist()], values)


@pytest.mark.parametrize("kind", ["coverage", "fusion"])
def test_the_verdict_tells_coverage_from_fusion_where_modalities_are_missing(
    kind: str, tmp_path: Path
) -> None:
    data = incomplete_data(tmp_path / "data.jsonl", kind)
    report = report_of(tmp_path, data=data, folds=3, epochs=30, optim={"lr": 1e-2})
    content, lines = report.figures, lines_of(report)
    patterns = {line["present"]: line["samples"] for line in content["presence"]}
    assert patterns == {"a+b": 200, "a": 100, "b": 100}
    cascade, best = lines["best single that is present"], lines[content["best_single_row"]]
    gain = content["coverage"]["difference"]
    assert gain == pytest.approx(cascade["accuracy"] - best["accuracy"])
    assert content["fusion_of_several"]["samples"] == 200
    assert "`best single that is present`, which fuses nothing" in " ".join(content["behind"])
    assert "By the modalities that a sample has" in (tmp_path / "index.html").read_text()
    if kind == "coverage":
        assert report.verdict.startswith("Coverage helps, fusion ")
        assert content["coverage"]["low"] > 0.05
        assert content["gain"]["low"] > 0  # against one modality the fusion would seem to help
    else:
        assert report.verdict.startswith("Fusion helps: ")
        assert content["fusion_of_several"]["low"] > 0.05


def test_samples_are_answered_by_the_best_single_that_they_have(tmp_path: Path) -> None:
    """The cascade, the mean and the product, against the predictions that they are made of."""
    data = incomplete_data(tmp_path / "data.jsonl", "fusion")
    bench, dataset = open_bench(
        small(tmp_path, data=data, folds=3, controls=False, corruptions=False, fusions="sum")
    )
    bench = prepare(bench, dataset, tokens=False)
    names = ["linear probe of a", "linear probe of b", "sum"]
    *_, stage = schedule.run_stages(bench, names)
    whole = summarise(bench, stage.results)
    a, b = (whole.candidate(x) for x in names[:2])
    there = whole.present
    cascade = whole.candidate("best single that is present").scores
    first = [a.validation[x][2] >= b.validation[x][2] for x in range(3)]
    for part, a_first in zip(whole.fold_slices, first, strict=True):
        expected = np.where(there[part, 0], a.scores[:, part], b.scores[:, part])
        if not a_first:
            expected = np.where(there[part, 1], b.scores[:, part], a.scores[:, part])
        np.testing.assert_array_equal(cascade[:, part], expected)
    for name in ("mean", "product"):
        logits = whole.candidate(f"{name} of singles that are present").logits.softmax(-1)
        only_a = torch.from_numpy(there[:, 0] & ~there[:, 1])
        torch.testing.assert_close(logits[:, only_a], a.logits[:, only_a].softmax(-1))
        both = torch.from_numpy(there.all(1))
        shares = torch.stack([x.logits[:, both].softmax(-1) for x in (a, b)])
        mean = shares.mean(0) if name == "mean" else shares.log().mean(0).softmax(-1)
        torch.testing.assert_close(logits[:, both], mean)


def test_complete_samples_need_no_cascade_and_one_seed_makes_no_ensemble(tmp_path: Path) -> None:
    report = report_of(tmp_path, seeds=1, epochs=1)
    assert not {"best single that is present", "ensemble of seeds"} & lines_of(report).keys()
    assert "presence" not in report.figures and "coverage" not in report.figures


# ---- the checklist


STAMPS = Path(__file__).parents[2] / "results" / "benchmark" / "stamps_seven"


def figures(**changes: Any) -> dict[str, Any]:
    """Return the figures of a tuned benchmark with three seeds on incomplete data, changed."""
    return {**Report.read(STAMPS).figures, **changes}


def answers(of: dict[str, Any]) -> dict[str, tuple[bool, str]]:
    lines = Report(STAMPS, of).checklist
    return {line.question: (line.met, line.evidence) for line in lines}


def test_a_tuned_benchmark_with_seeds_and_controls_meets_what_it_can() -> None:
    found = answers(figures(not_run={}))
    assert {question for question, (met, _) in found.items() if not met} == {
        "Were duplicates between splits looked for?",
        "More than one data set?",
    }
    assert found["Is the gain tested?"][1].startswith("+5.6 (95 % interval +1.8 to +9.3)")
    assert "`kernel sum on everything`" in found["Are there simple rivals on all features?"][1]
    assert "audio 3.1 %" in found["Are gains by coverage and by fusion told apart?"][1]


@pytest.mark.parametrize(
    ("changes", "question", "evidence"),
    [
        ({"tuning_trials": 0}, "Are single modalities tuned as fusions are?", "default settings"),
        ({"seeds": 1}, "Several seeds?", "1: too few"),
        ({"gain": None}, "Is the gain tested?", "no single modality"),
        ({"chosen_by_fold": []}, "Is the fusion chosen without test data?", "no fusion"),
        ({"controls": {}}, "Does training on shuffled labels stay at chance?", "--controls true"),
        ({"coverage": None}, "Are gains by coverage and by fusion told apart?", "missing: text"),
        ({"failed": {"mbt": "no memory"}}, "Is everything reported that was tried?", "`mbt`"),
        ({"stopped": "2 of 9 left"}, "Is everything reported that was tried?", "2 of 9 left"),
    ],
)
def test_what_a_run_lacks_is_a_no_with_its_reason(
    changes: dict[str, Any], question: str, evidence: str
) -> None:
    met, said = answers(figures(**changes))[question]
    assert not met
    assert evidence in said


def test_a_candidate_with_fewer_seeds_or_without_tuning_is_named() -> None:
    changed = figures()
    first = next(x for x in changed["leaderboard"] if x["kind"] == "fusion")
    first |= {"seeds": 1, "tuned_settings": ""}
    found = answers(changed)
    said = f"not tuned yet: `{first['candidate']}`"
    assert found["Are single modalities tuned as fusions are?"] == (False, said)
    assert "1 or 3 seeds" in found["Has every candidate the same budget?"][1]
