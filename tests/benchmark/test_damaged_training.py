"""Training samples that lose a part of a modality, and the area under the curve of lost parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fusionzoo.benchmark import api, candidates, jobs, schedule, store
from fusionzoo.benchmark.bench import Bench, Job, damaged_rows, open_bench
from fusionzoo.benchmark.feeds import SEVERITY, ProbeFeed, damaged_modalities, replace_rows
from fusionzoo.benchmark.prepare import prepare
from fusionzoo.benchmark.report.results import lost_area
from fusionzoo.datasets import PairedDataset
from fusionzoo.evaluation.robustness import CORRUPTIONS, LOST_PART, corrupt
from fusionzoo.features.cache import feature_cache
from fusionzoo.html.template import breakable
from fusionzoo.structures import Features, seed_of
from helpers import planted
from helpers.setup_benchmark import small

RATES = [0, 0.2, 0.4]


def opened(tmp_path: Path, **changes: Any) -> tuple[Bench, PairedDataset]:
    settings = {"controls": False, "corruptions": False, "damaged_train": RATES, **changes}
    bench, dataset = open_bench(small(tmp_path, **settings))
    return prepare(bench, dataset, tokens=False), dataset


def job(bench: Bench, name: str) -> Job:
    return Job(name, 0, (0,), False, candidates.settings_of(bench.cfg, name), {})


def damaged_value(dataset: PairedDataset, row: int, name: str) -> torch.Tensor:
    """The value of a vector modality as training on damage reads it."""
    sample = dataset[row]
    assert sample is not None
    seed = seed_of(sample.id, "dropout", SEVERITY)
    return corrupt(sample.values[name], "vector", "dropout", SEVERITY, seed)


def test_every_kind_has_a_corruption_that_takes_a_part() -> None:
    assert set(LOST_PART) == set(CORRUPTIONS)
    assert all(LOST_PART[kind] in corruptions for kind, corruptions in CORRUPTIONS.items())


def test_rows_of_both_rates_and_training_strategies_combine(tmp_path: Path) -> None:
    changes = {"missing_train": [0, 0.3], "damaged_train": [0.1], "balance": "none,mla"}
    bench, _ = opened(tmp_path, fusions="sum", **changes)
    names, _ = candidates.list_candidates(bench.cfg, bench)
    endings = ("", ", 10 % damaged", ", 30 % missing", ", 30 % missing, 10 % damaged")
    expected = {f"{base}{end}" for base in ("sum", "sum + mla", "alone:a") for end in endings}
    assert expected <= set(names)
    assert len(names) == len(set(names)) == 4 * 4 + 3  # a linear model of a, b, everything


@pytest.mark.parametrize("folds", [0, 4])
def test_the_drawn_modalities_are_the_same_for_all_and_about_the_share(
    folds: int, tmp_path: Path
) -> None:
    bench, _ = opened(tmp_path, folds=folds, data={"missing": 0.2})
    fold = bench.folds[0]
    learned = torch.cat([fold.train, fold.val])
    damaged = damaged_modalities(bench, job(bench, "gmu, 40 % damaged"))
    assert damaged is not None
    assert damaged[learned][bench.present[learned]].double().mean() == pytest.approx(0.4, abs=0.06)
    assert not damaged[~bench.present].any()
    assert not damaged[fold.test].any()
    balanced = damaged_modalities(bench, job(bench, "sum + mla, 30 % missing, 40 % damaged"))
    assert balanced is not None and torch.equal(balanced, damaged)
    single = damaged_modalities(bench, job(bench, "alone:b, 40 % damaged"))
    assert single is not None and torch.equal(single[:, 0], damaged[:, 1])
    fewer = damaged_modalities(bench, job(bench, "gmu, 20 % damaged"))
    assert fewer is not None and 0 < fewer.sum() < damaged.sum()
    assert (damaged | fewer).equal(damaged)
    assert damaged_modalities(bench, job(bench, "gmu, 40 % missing")) is None


def test_a_probe_reads_the_features_of_damaged_samples_in_training_only(tmp_path: Path) -> None:
    bench, dataset = opened(tmp_path, standardise=False)
    name, fold = "gmu, 40 % damaged", bench.folds[0]
    damaged = damaged_modalities(bench, job(bench, name))
    assert damaged is not None
    every = torch.arange(len(dataset))
    (whole,) = ProbeFeed(bench, job(bench, "gmu"))([every], 0)
    (changed,) = ProbeFeed(bench, job(bench, name))([every], 0)
    for column, modality in enumerate("ab"):
        rows = damaged[:, column]
        assert torch.equal(changed[modality].pooled[~rows], whole[modality].pooled[~rows])
        assert torch.equal(changed[modality].pooled[fold.test], whole[modality].pooled[fold.test])
        for row in rows.nonzero()[:5, 0].tolist():
            expected = damaged_value(dataset, row, modality)
            assert not torch.equal(expected, whole[modality].pooled[row])
            torch.testing.assert_close(changed[modality].pooled[row], expected)
            torch.testing.assert_close(changed[modality].tokens[row, 0], expected)


def test_end_to_end_training_reads_samples_through_the_corruption(tmp_path: Path) -> None:
    encoders = {m: {"name": "vector/mlp", "dim": 8, "hidden": 8} for m in "ab"}
    bench, dataset = opened(tmp_path, mode="finetune", encoders=encoders)
    damaged_job = job(bench, "sum, 40 % damaged")
    damaged = damaged_modalities(bench, damaged_job)
    assert damaged is not None
    _, feed = jobs.build(bench, damaged_job)
    rows = torch.tensor([damaged[:, 0].nonzero()[0, 0], bench.folds[0].test[0]])
    (batch,) = feed([rows], 0)
    (inputs,) = batch.inputs["a"].values()
    torch.testing.assert_close(inputs[0], damaged_value(dataset, int(rows[0]), "a"))
    sample = dataset[int(rows[1])]
    assert sample is not None
    torch.testing.assert_close(inputs[1], sample.values["a"])


def test_without_damage_in_training_nothing_else_is_encoded_or_run_again(tmp_path: Path) -> None:
    bench, _ = opened(tmp_path, damaged_train=[0])
    entries = len(list(feature_cache().entries()))
    assert bench.damaged_train == ({},)
    other, _ = opened(tmp_path)
    assert len(list(feature_cache().entries())) == entries + 2
    (plain, *_) = schedule.list_jobs(bench, ["sum"])
    assert schedule.path_of(bench, plain) == schedule.path_of(other, plain)


def test_rows_of_tokens_are_replaced_and_padded_to_the_longer_ones() -> None:
    features = Features(torch.ones(2, 3, 2, 4), torch.ones(2, 3, 2).bool(), torch.ones(2, 3, 4))
    rows = torch.tensor([[True, False, False], [False, False, True]])
    tokens = torch.full((2, 5, 4), 7.0)
    mask = torch.ones(2, 5, dtype=torch.bool)
    out = replace_rows(features, rows, Features(tokens, mask, torch.full((2, 4), 7.0)))
    assert torch.equal(out.mask.sum(-1), torch.where(rows, 5, 2))
    assert torch.equal(out.tokens.sum((-1, -2)), torch.where(rows, 140.0, 8.0))
    assert torch.equal(out.pooled[..., 0], torch.where(rows, 7.0, 1.0))
    short = Features(tokens[:, :1], mask[:, :1], torch.full((2, 4), 7.0))
    assert torch.equal(replace_rows(features, rows, short).mask.sum(-1), torch.where(rows, 1, 2))


def test_digits_trained_on_damage_differ_and_are_run_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {"name": "digits", "samples": 150, "modalities": "image,text"}
    settings = {"fusions": "mbt", "seeds": 1, "epochs": 2, "encoder_epochs": 1, "folds": 0}
    settings |= {"tune": 0, "controls": False, "jobs": 1, "corruptions": False}
    settings |= {"analyses": False}
    settings |= {"damaged_train": [0, 0.5], "data": data, "out": str(tmp_path)}
    report = api.benchmark(**settings)
    assert report.failed == {}
    lines = {line["candidate"]: line for line in report.figures["leaderboard"]}
    for name in ("mbt", "alone:image", "alone:text"):
        assert lines[f"{name}, 50 % damaged"]["kind"] == "incomplete"
        assert lines[f"{name}, 50 % damaged"]["nll"] != lines[name]["nll"]
    page = report.page.read_text(encoding="utf-8")
    assert "Trained with missing or damaged modalities" in page
    assert "lost parts</th>" not in page  # nothing was tested damaged

    def refuse(*arguments: object) -> None:
        raise AssertionError("a finished trial is run again")

    monkeypatch.setattr(jobs, "run_job", refuse)
    assert api.benchmark(**settings).figures["leaderboard"] == report.figures["leaderboard"]


def test_the_area_of_lost_parts_is_that_of_its_curves(tmp_path: Path) -> None:
    changes = {"balance": "none,modality_dropout", "damaged_train": [0, 0.5]}
    cfg = small(tmp_path, controls=False, fusions="sum", **changes)
    report = api.run(cfg)
    (row, *_) = [x for x in report.figures["leaderboard"] if x["candidate"] == "sum"]
    bench, _ = open_bench(cfg)
    paths = store.folder_of(str(tmp_path)).glob("sum-f0-*.npz")
    seed_results = [result for path in paths for result in store.load(path) or ()]
    assert len(seed_results) == 2
    curves = []
    for result in seed_results:
        of = {(x["modality"], x["corruption"], x["severity"]): x["score"] for x in result.rows}
        start = of["", "undamaged", 0]
        for modality in "ab":
            one, three, five = (of[modality, "dropout", s] for s in (1, 3, 5))
            curves.append((start + one) / 2 + (one + three) + (three + five))
        assert result.lost_scores is not None
        assert result.lost_scores.shape == (7, len(damaged_rows(bench, bench.folds[0])))
    assert row["lost_area"] == pytest.approx(np.mean(curves) / 5, abs=1e-6)
    assert row["lost_area_low"] < row["lost_area"] < row["lost_area_high"]
    table = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert f"{row['lost_area']:.3f} ({row['lost_area_low']:.3f} to" in table
    text = report.page.read_text(encoding="utf-8")
    section = text[text.index("<h2>Trained with missing") :]
    section = section[: section.index("</table>")]
    assert "change of lost parts</th>" in section
    for name in ("sum", "sum, 50 % damaged", "sum + modality_dropout"):
        assert f"<td>{breakable(name)}</td>" in section


def test_a_modality_that_a_strategy_does_not_see_leaves_its_score_as_it_is() -> None:
    candidate = planted.candidate("alone:image", [0.5])
    assert lost_area(candidate, ["image", "audio"]) is None
    candidate.lost_conditions = [("", "undamaged", 0), ("image", "occlusion", 1)]
    candidate.lost_conditions.append(("image", "occlusion", 5))
    candidate.lost_scores = np.array([[[1.0, 0.0], [0.5, 0.0], [0.0, 1.0]]])
    areas = lost_area(candidate, ["image", "audio"])
    assert areas is not None
    image = [(0.75 * 1 + 0.25 * 4) / 5, (0.0 + 0.5 * 4) / 5]
    np.testing.assert_allclose(areas, [[(image[0] + 1.0) / 2, (image[1] + 0.0) / 2]])


def test_trials_of_earlier_versions_are_read_without_scores_of_lost_parts(tmp_path: Path) -> None:
    cfg = small(tmp_path, controls=False, fusions="sum", seeds=1)
    api.run(cfg)
    for path in store.folder_of(str(tmp_path)).glob("*.npz"):
        with np.load(path) as arrays:
            old = {name: x for name, x in arrays.items() if not name.startswith("lost")}
        np.savez_compressed(path, allow_pickle=False, **old)
    report = api.run(cfg)
    assert all("lost_area" not in line for line in report.figures["leaderboard"])
    assert "lost_area" not in json.dumps(report.figures)
