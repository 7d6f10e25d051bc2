"""The whole benchmark: its results, its errors, and that no trial is lost or run twice."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from multiprocessing import active_children, forkserver
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss

import fusionzoo
from fusionzoo.benchmark import api, candidates, examine, executors, jobs, prepare, schedule, store
from fusionzoo.benchmark import bench as setup
from fusionzoo.benchmark.report import combine, page
from fusionzoo.config import BenchmarkConfig, from_tree
from fusionzoo.datasets import PairedDataset
from fusionzoo.errors import FusionZooError
from fusionzoo.features import cache
from fusionzoo.features.encode import key_of
from fusionzoo.fusion import list_fusions
from fusionzoo.scripts.benchmark import main
from helpers.setup_benchmark import SMALL, small, wait

ROOT = Path(fusionzoo.__file__).parents[1]
TABLES = ("results.parquet", "summary.json", "table.md", "table.tex")


def run(cfg: BenchmarkConfig) -> dict[str, Any]:
    """Run a benchmark and return the contents of its summary.json."""
    api.run(cfg)
    summary: dict[str, Any] = json.loads((Path(cfg.out) / "summary.json").read_text())
    return summary


def line_of(summary: dict[str, Any], name: str) -> dict[str, Any]:
    return next(line for line in summary["leaderboard"] if line["candidate"] == name)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSIONZOO_CACHE", str(out / "cache"))
        run(small(out, seeds=3, fusions="sum,gmu,mbt", epochs=6))
    return out


def test_the_report_is_complete(report: Path) -> None:
    summary = json.loads((report / "summary.json").read_text())
    names = {line["candidate"] for line in summary["leaderboard"]}
    assert {"sum", "gmu", "mbt", "alone:a", "alone:b", "majority class"} <= names
    assert summary["verdict"].startswith("Fusion ")
    rows = pq.read_table(report / "results.parquet").to_pylist()
    for candidate in ("sum", "gmu", "mbt"):
        selected = [row for row in rows if row["candidate"] == candidate]
        assert {row["seed"] for row in selected} == {0, 1, 2}
        broken = {f"a+b, {name} of another sample" for name in "ab"}
        assert {row["subset"] for row in selected} == {"none", "a", "b", "a+b", *broken}
        assert {x["subset"] for x in selected if x["corruption"] == "pairing"} == broken
        damage = {"undamaged", "jitter", "dropout"}
        assert {row["corruption"] for row in selected} == {"", "pairing", *damage}
        assert {row["severity"] for row in selected} == {0, 1, 3, 5}
    assert (report / "table.md").read_text().startswith(summary["verdict"])
    assert r"\begin{tabular}" in (report / "table.tex").read_text()


def test_shapley_values_sum_to_the_gain_of_all_modalities(report: Path) -> None:
    summary = json.loads((report / "summary.json").read_text())
    rows = pq.read_table(report / "results.parquet").to_pylist()
    for name, values in summary["shapley"].items():
        clean = [r for r in rows if r["candidate"] == name and not r["corruption"]]
        full = [r["accuracy"] for r in clean if r["subset"] == "a+b"]
        none = [r["accuracy"] for r in clean if r["subset"] == "none"]
        gain = sum(full) / len(full) - sum(none) / len(none)
        assert sum(values.values()) == pytest.approx(gain)


def test_every_candidate_answers_the_same_where_nothing_is_present(report: Path) -> None:
    rows = pq.read_table(report / "results.parquet").to_pylist()
    wanted = {row["nll"] for row in rows if row["candidate"] == "majority class"}
    answers = [row["nll"] for row in rows if row["subset"] == "none"]
    assert len(answers) == 3 * 5 and len(wanted) == 1
    assert answers == pytest.approx([*wanted] * len(answers))


def test_the_accuracy_is_the_mean_over_the_rows_of_the_seeds(report: Path) -> None:
    summary = json.loads((report / "summary.json").read_text())
    rows = pq.read_table(report / "results.parquet").to_pylist()
    for name in ("sum", "mbt"):
        found = [r for r in rows if (r["candidate"], r["subset"]) == (name, "a+b")]
        accuracies = [r["accuracy"] for r in found if not r["corruption"]]
        assert line_of(summary, name)["accuracy"] == pytest.approx(sum(accuracies) / 3)


def test_shuffled_labels_fall_to_chance(report: Path) -> None:
    controls = json.loads((report / "summary.json").read_text())["controls"]
    assert set(controls["labels_shuffled"]) == {"sum", "gmu", "mbt", "alone:a", "alone:b"}
    assert not controls["above_chance"]


def test_a_second_run_trains_nothing_and_writes_the_same_tables(
    report: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {name: (report / name).read_bytes() for name in TABLES}
    monkeypatch.setenv("FUSIONZOO_CACHE", str(report / "cache"))
    monkeypatch.setattr(jobs, "run_job", lambda *_: pytest.fail("a finished trial was run again"))
    run(small(report, seeds=3, fusions="sum,gmu,mbt", epochs=6))
    assert before == {name: (report / name).read_bytes() for name in TABLES}


def test_more_candidates_reuse_finished_trials(
    report: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSIONZOO_CACHE", str(report / "cache"))
    ran: list[str] = []
    before = jobs.run_job
    noted = lambda bench, job, *rest: ran.append(job.candidate) or before(bench, job, *rest)  # noqa: E731
    monkeypatch.setattr(jobs, "run_job", noted)
    run(small(report, seeds=3, fusions="sum,gmu,mbt,max", epochs=6))
    assert set(ran) == {"max"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"settings": {"gnu": {}}}, "--settings.gnu: unknown fusion.*gmu"),
        (
            {"fusions": "missing_tokens", "settings": {"missing_tokens": {"num_layerz": 1}}},
            "'concat_transformer' has no setting 'num_layerz'.*num_layers",
        ),
        ({"fusion": {"dmi": 8}}, "--fusion.dmi"),
        ({"data": {"modalities": "a"}}, "one modality: there is nothing to fuse"),
        ({"encoders": {"c": {"name": "vector/identity"}}}, "no modality 'c'"),
    ],
)
def test_a_wrong_setting_is_one_clear_error(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(FusionZooError, match=message):
        api.run(small(tmp_path, **changes))


def test_a_linear_skip_is_a_setting_of_all_fusions_and_not_of_single_modalities(
    tmp_path: Path,
) -> None:
    cfg = small(tmp_path, fusions="all", fusion={"linear_skip": True})
    for name in list_fusions():
        assert candidates.settings_of(cfg, name)["linear_skip"] is True
    assert "linear_skip" not in candidates.settings_of(cfg, "alone:a")
    only = small(tmp_path, settings={"gmu": {"linear_skip": True}})
    assert candidates.settings_of(only, "gmu") == {"dim": 16, "linear_skip": True}
    assert candidates.settings_of(only, "sum") == {"dim": 16}


def manifest(folder: Path, rows: list[str]) -> dict[str, Any]:
    path = folder / "table.csv"
    path.write_text("\n".join(["id,split,target,text,more", *rows]) + "\n")
    columns = {"columns": {"more": "more"}, "kinds": {"more": "text"}}
    return {"name": "manifest", "root": str(path), **columns}


def test_a_recipe_may_have_settings_of_modalities_that_are_left_out() -> None:
    data = {"name": "interactions", "samples": 100, "num_modalities": 3, "modalities": "a,b"}
    encoders = {"a": {"dim": 24}, "c": {"name": "vector/mlp", "dim": 16}}
    cfg = from_tree(BenchmarkConfig, {"data": data, "encoders": encoders})
    bench, dataset = setup.open_bench(cfg)
    assert bench.notes == ("Settings left out by --data.modalities: --encoders.c.",)
    built = prepare.build_encoders(bench.cfg, dataset)
    assert {name: encoder.dim for name, encoder in built.items()} == {"a": 24, "b": 32}


def test_an_empty_test_split_and_a_class_that_training_lacks_are_named(tmp_path: Path) -> None:
    data = manifest(tmp_path, ["1,train,x,a,b", "2,train,y,a,b", "3,val,x,a,b"])
    with pytest.raises(FusionZooError, match=r"split 'test' is empty.*train \(2\), val \(1\)"):
        api.run(small(tmp_path, data=data, encoders={}))
    data = manifest(tmp_path, ["1,train,x,a,b", "2,val,x,a,b", "3,test,z,a,b"])
    with pytest.raises(FusionZooError, match="'z', which no sample of split 'train' has"):
        api.run(small(tmp_path, data=data, encoders={}))


def test_a_candidate_that_fails_is_reported_and_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = jobs.run_job

    def fail(
        bench: setup.Bench, job: setup.Job, trained: jobs.TrainedModels | None = None
    ) -> list[store.SeedResult]:
        if job.candidate == "gmu":
            raise RuntimeError("no luck today")
        return before(bench, job, trained)

    monkeypatch.setattr(jobs, "run_job", fail)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({**SMALL, "corruptions": False}))
    assert main(["--config", str(recipe), "--out", str(tmp_path)]) == 1
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert "RuntimeError: no luck today" in summary["failed"]["gmu"]
    assert "1 candidates failed: gmu." in summary["behind"]
    assert line_of(summary, "sum")["seeds"] == 2
    monkeypatch.undo()
    monkeypatch.setenv("FUSIONZOO_CACHE", str(tmp_path / "cache"))
    assert not run(small(tmp_path, corruptions=False))["failed"]


@pytest.mark.parametrize("task", ["xor", "redundant"])
def test_synergy_shows_as_interaction_and_redundancy_does_not(task: str, tmp_path: Path) -> None:
    data = {"name": "interactions", "task": task, "samples": 800, "noise": 0.3}
    changes = {"data": data, "fusions": "gmu", "epochs": 25, "corruptions": False, "seeds": 1}
    summary = run(small(tmp_path, **changes, fusion={"dim": 32}, optim={"lr": 1e-2}))
    value = summary["interactions"]["gmu"]["a+b"]
    assert value > 0.3 if task == "xor" else value < -0.3


def test_folds_test_every_sample_once(tmp_path: Path) -> None:
    cfg = small(tmp_path, folds=4, corruptions=False, controls=False, seeds=1, fusions="sum")
    bench, dataset = setup.open_bench(cfg)
    tested = sorted(row for fold in bench.folds for row in fold.test.tolist())
    assert tested == list(range(len(dataset)))
    for fold in bench.folds:
        parts = [set(part.tolist()) for part in (fold.train, fold.val, fold.test)]
        assert sum(map(len, parts)) == len(set.union(*parts)) == len(dataset)
    assert run(cfg)["data"]["test"] == 400


def test_folds_keep_groups_together() -> None:
    ids = [str(i) for i in range(60)]
    columns = {"id": ids, "split": ["train"] * 60, "target": [str(i % 2) for i in range(60)]}
    columns |= {"group": [str(i // 3) for i in range(60)], "text": ids, "more": ids}
    dataset = PairedDataset(pa.table(columns), {"text": "text", "more": "text"})
    for fold in setup.make_folds(dataset, 5, 0):
        where = [{int(row) // 3 for row in part} for part in (fold.train, fold.val, fold.test)]
        assert not (where[0] & where[1] or where[0] & where[2] or where[1] & where[2])


def test_folds_train_an_encoder_without_weights_on_each_fold(tmp_path: Path) -> None:
    words = {"x": "wet rain", "y": "dry sand"}
    rows = [f"{i},train,{'xy'[i % 2]},{words['xy'[i % 2]]} {i},{i} {i % 2}" for i in range(24)]
    encoders = {name: {"name": "chars", "dim": 8, "max_length": 12} for name in ("more", "text")}
    changes: dict[str, Any] = {"encoder_epochs": 1, "epochs": 1, "seeds": 1, "fusions": "sum"}
    changes["corruptions"] = False
    cfg = small(tmp_path / "out", data=manifest(tmp_path, rows), folds=3, **changes)
    summary = run(replace(cfg, encoders=encoders))
    assert summary["data"]["folds"] == 3
    assert summary["data"]["test"] == 24
    names, said = zip(*(note.split(": ", 1) for note in summary["notes"]), strict=True)
    assert names == ("more", "text")
    assert all("in each of 3 folds it was trained alone" in words for words in said)
    assert not summary["failed"]


@pytest.mark.nightly
def test_folds_run_on_the_stamps_recipe(tmp_path: Path, real_stamps: Path) -> None:
    recipe = ["--config", str(ROOT / "configs/benchmarks/stamps.yaml"), "--out", str(tmp_path)]
    recipe += ["--data.root", str(real_stamps)]
    small = ["--fusions", "sum,late_mean", "--seeds", "1", "--epochs", "2", "--encoder_epochs", "1"]
    fast = ["--corruptions", "false", "--jobs", "1", "--folds", "5"]
    assert main([*recipe, *small, *fast]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert not summary["failed"]
    assert summary["data"]["test"] == 773  # every sample is tested once
    assert [note.split(":")[0] for note in summary["notes"]] == ["audio"]


TUNED = {"tune": 4, "corruptions": False, "controls": False}


def trials_of(out: Path, name: str = "") -> list[list[dict[str, Any]]]:
    """Return the trials of each tuning file in a report's folder, or of a candidate's."""
    files = sorted((out / "cells").glob(f"{name}*.jsonl"))
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in files]


def jobs_of(out: Path, name: str = "") -> list[dict[str, Any]]:
    """Return what each result in a report's folder, or a candidate's, says of its job."""
    return [json.loads(str(np.load(x)["about"])) for x in (out / "cells").glob(f"{name}*.npz")]


def test_tuning_never_evaluates_on_the_test_split_and_continues_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {**TUNED, "fusions": "gmu"}
    examined: list[Any] = []
    before = examine.Examiner.examine
    noted = lambda self, *rest: examined.append(rest) or before(self, *rest)  # noqa: E731
    monkeypatch.setattr(examine.Examiner, "examine", noted)
    first = run(small(tmp_path / "a", **changes))
    trials = trials_of(tmp_path / "a")
    assert [len(x) for x in trials] == [3, 3, 3]  # gmu and each modality, beside the default
    seeds = sum(len(x["cells"]) for x in jobs_of(tmp_path / "a") if '"lr"' in json.dumps(x))
    assert len(examined) == 3 * 2 + seeds  # no proposal that is not reported
    whole = next((tmp_path / "a" / "cells").glob("gmu-*.jsonl"))
    text = whole.read_text()
    # Killed after one proposal and a half: the others are the same.
    path = tmp_path / "b" / "cells" / whole.name
    path.parent.mkdir(parents=True)
    path.write_text(text[: len(text) // 2])
    second = run(small(tmp_path / "b", **changes))
    assert path.read_text() == text
    assert first["leaderboard"] == second["leaderboard"]


@pytest.mark.parametrize(("gain", "adopted"), [(0.5, False), (2.0, True)])
def test_settings_are_adopted_if_they_are_better_by_more_than_one_standard_error(
    gain: float, adopted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = small(tmp_path, **{**TUNED, "fusions": "sum", "seeds": 1, "jobs": 1})
    bench, _ = setup.open_bench(cfg)
    samples = len(bench.folds[0].val)
    noise = torch.randn(samples, generator=torch.Generator().manual_seed(0))
    noise = (noise - noise.mean()) / noise.std() / samples**0.5  # its standard error is 1 / N
    default = torch.full((samples,), 3.0)
    worse, better = default + 1, default + noise - gain / samples
    before, turn = jobs.train, iter([worse, better, worse] * 3)

    def planted(bench: setup.Bench, job: setup.Job, *rest: Any) -> jobs.TrainedModels:
        trained = before(bench, job, *rest)
        losses = next(turn) if job.training else default
        return trained._replace(fits=[x._replace(losses=losses) for x in trained.fits])

    monkeypatch.setattr(jobs, "train", planted)
    run(cfg)
    trained = [job["unit"]["training"] for job in jobs_of(tmp_path, "sum-")]
    assert len(trained) == 1 + adopted
    assert not adopted or trials_of(tmp_path, "sum-")[0][1]["training"] in trained


def test_tuning_tries_a_linear_skip_and_layers_first_and_reports_what_it_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = small(tmp_path, **{**TUNED, "fusions": "concat", "tune": 3, "seeds": 1})
    before = jobs.train

    def planted(bench: setup.Bench, job: setup.Job, *rest: Any) -> jobs.TrainedModels:
        trained = before(bench, job, *rest)
        loss = 1.0 if job.settings.get("linear_skip") else 2.0
        noise = torch.linspace(-0.1, 0.1, len(trained.fits[0].losses)) * loss
        losses = [x._replace(losses=loss + noise) for x in trained.fits]
        return trained._replace(fits=losses)

    monkeypatch.setattr(jobs, "train", planted)
    summary = run(cfg)
    first, second = (trial["settings"] for trial in trials_of(tmp_path, "concat-")[0])
    assert first == {"dim": 16, "dropout": 0.1, "linear_skip": True}
    assert second == {"dim": 16, "dropout": 0.1, "hidden": []}
    lines = {line["candidate"]: line.get("tuned_settings") for line in summary["leaderboard"]}
    assert lines["concat"] == "0 of 1 folds default, linear_skip true in 1"
    assert lines["alone:a"] == "1 of 1 folds default"
    units = [job["unit"] for job in jobs_of(tmp_path, "concat-")]
    assert [x["settings"]["linear_skip"] for x in units if x["training"]] == [True]


def test_end_to_end_tuning_adds_no_linear_skip(tmp_path: Path) -> None:
    bench, _ = setup.open_bench(small(tmp_path, mode="finetune"))
    bench = replace(bench, dims={"a": 4, "b": 4})
    job = schedule.first_job(bench, "sum", 0)
    assert "linear_skip" not in schedule._space(bench, job)
    frozen = replace(bench, cfg=replace(bench.cfg, mode="probe"))
    assert "linear_skip" in schedule._space(frozen, job)
    assert "linear_skip" not in schedule._space(frozen, schedule.first_job(frozen, "alone:a", 0))


def test_rates_below_the_default_are_tried_to_the_end(tmp_path: Path) -> None:
    """A low rate has a high loss for many epochs; it is not compared before its end."""
    run(small(tmp_path, **{**TUNED, "tune": 8, "fusions": "sum", "seeds": 1, "patience": None}))
    trials = [trial for file in trials_of(tmp_path) for trial in file]
    rates = [trial["training"]["optim"]["lr"] for trial in trials]
    assert min(rates) < 3e-3 / 3 < 3e-3 * 3 < max(rates)
    assert all(np.isfinite(trial["losses"]).all() and trial["losses"] for trial in trials)


def test_models_that_tuning_trained_are_tested_as_those_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {**TUNED, "tune": 8, "fusions": "gmu,tfn", "jobs": 1}
    reused: list[bool] = []
    before = jobs.run_job

    def run_job(
        bench: setup.Bench, job: setup.Job, trained: jobs.TrainedModels | None = None
    ) -> list[store.SeedResult]:
        reused.append(trained is not None)
        return before(bench, job, trained)

    monkeypatch.setattr(jobs, "run_job", run_job)
    first = run(small(tmp_path / "a", **changes))
    assert any(reused)
    monkeypatch.setattr(jobs, "run_job", lambda bench, job, trained=None: before(bench, job))
    assert first["leaderboard"] == run(small(tmp_path / "b", **changes))["leaderboard"]


@pytest.mark.parametrize("folds", [0, 3])
def test_tested_models_learn_from_validation_samples_too_and_validated_ones_do_not(
    folds: int, tmp_path: Path
) -> None:
    cfg = small(tmp_path, fusions="sum", folds=folds, refit=None)
    bench, _ = setup.open_bench(cfg)
    assert bench.cfg.refit == (folds > 0)  # by default where a benchmark has folds
    for refit in (False, True):
        bench, dataset = setup.open_bench(replace(cfg, refit=refit))
        bench = prepare.prepare(bench, dataset, tokens=False)
        fold, job = bench.folds[0], setup.Job("sum", 0, (0,), False, {"dim": 8}, {})
        expected = {*fold.train.tolist()} | ({*fold.val.tolist()} if refit else set())
        assert {*setup.learned_rows(bench, fold).tolist()} == expected
        (result,) = jobs.run_job(bench, job)
        trained = jobs.train(bench, job, *jobs.build(bench, job))
        (weights,) = jobs.tested_weights(bench, job, trained)
        same = [torch.equal(x, weights[name]) for name, x in trained.fits[0].weights.items()]
        assert all(same) != refit
        (model,), feed = jobs.build(bench, job)
        model.load_state_dict(trained.fits[0].weights)
        logits = examine.Examiner(bench, job, feed).validate(model)
        np.testing.assert_allclose(result.val_logits, logits.numpy(), atol=1e-6)


def stop_after(monkeypatch: pytest.MonkeyPatch, pieces: int) -> None:
    """Let the time limit be over when so many pieces of work are done, besides the features."""
    begun = iter(range(pieces))

    def check_time() -> None:
        if next(begun, None) is None:
            raise executors.OutOfTimeError

    monkeypatch.setattr(executors, "check_time", check_time)


ANYTIME = {"fusions": "sum,gmu", "corruptions": False, "tune": 2}


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        (7 + 2, "every candidate has 1 of 2 seeds, 0 of 4 are tuned)"),
        pytest.param(
            7 + 8 + 3, "every candidate has 2 of 2 seeds, 3 of 4 are tuned)", marks=pytest.mark.slow
        ),
        (3, "every candidate has 1 of 2 seeds, 0 of 3 are tuned; not run yet: "),
    ],
)
def test_a_time_limit_leaves_a_report_of_what_is_done_and_the_next_run_goes_on(
    pieces: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(small(tmp_path / "whole", **ANYTIME))
    stop_after(monkeypatch, pieces)
    report = api.run(small(tmp_path / "a", **ANYTIME, time_limit="20m"))
    assert report.verdict.startswith("PROVISIONAL (stopped by the time limit of 20m, every")
    assert words in report.verdict
    assert "PROVISIONAL" in report.page.read_text(encoding="utf-8")
    monkeypatch.undo()
    assert run(small(tmp_path / "a", **ANYTIME)) == whole


def test_a_time_limit_before_anything_is_known_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_after(monkeypatch, 0)
    with pytest.raises(FusionZooError, match="before any candidate was trained on a fold"):
        api.run(small(tmp_path, **ANYTIME, time_limit="20m"))


def test_a_training_in_this_process_stops_at_the_deadline(tmp_path: Path) -> None:
    bench, dataset = setup.open_bench(small(tmp_path))
    bench = prepare.prepare(bench, dataset, tokens=False)
    job = schedule.first_job(bench, "sum", 0)
    with pytest.raises(executors.OutOfTimeError), executors.time_limit(0.001):
        schedule._run_job(bench, job)
    assert executors._time_left() is None


@pytest.mark.parametrize("folds", [0, 3])
def test_a_benchmark_in_which_nothing_can_be_trained_is_one_clear_error(
    folds: int, tmp_path: Path
) -> None:
    hopeless = {"baselines": "alone", "controls": False, "optim": {"lr": 1e30}, "folds": folds}
    with pytest.raises(FusionZooError, match=r"no candidate could be trained; alone:a: .*lower"):
        api.run(small(tmp_path, **ANYTIME, time_limit="5m", **hopeless))


def test_what_cannot_be_stored_says_what_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    plain = {"baselines": "alone", "controls": False, "corruptions": "sample", "tune": 0}
    with pytest.raises(FusionZooError, match="make room, then the same command goes on"):
        api.run(small(tmp_path, **plain))


def test_a_control_c_leaves_a_report_of_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before, calls = jobs.run_job, iter(range(100))

    def run_job(*arguments: Any) -> list[store.SeedResult]:
        if next(calls) == 8:
            raise KeyboardInterrupt
        return before(*arguments)

    monkeypatch.setattr(jobs, "run_job", run_job)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({**SMALL, **ANYTIME}))
    assert main(["--config", str(recipe), "--out", str(tmp_path)]) == 130
    said = capsys.readouterr().out
    assert "PROVISIONAL (every candidate has 1 of 2 seeds" in said  # after the first stage
    assert "PROVISIONAL (stopped by Ctrl-C, every candidate has 1 of 2 seeds" in said
    assert "the same command continues where it stopped" in said


FOLDED = {"fusions": "sum,mbt", "seeds": 1, "folds": 3, "controls": False, "epochs": 2}


@pytest.mark.parametrize(
    ("stopped", "where"),
    [(schedule.CTRL_C, "shown"), (schedule.CTRL_C, "encoded"), ("the time limit of 1h", "encoded")],
)
def test_what_stops_a_benchmark_between_stages_leaves_a_report_too(
    stopped: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {**FOLDED, "fusions": "sum", "time_limit": "1h"}
    show, prepare, calls = page.print_figures, api.prepare, iter(range(100))

    def shown(figures: Any) -> None:
        if where == "shown":
            raise KeyboardInterrupt
        show(figures)

    def prepared(*arguments: Any) -> Any:
        if next(calls) == 1 and where == "encoded":  # after the first fold is done
            if stopped == schedule.CTRL_C:
                raise KeyboardInterrupt
            raise executors.OutOfTimeError
        return prepare(*arguments)

    monkeypatch.setattr(page, "print_figures", shown)
    monkeypatch.setattr(api, "prepare", prepared)
    report = api.run(small(tmp_path, **changes))
    words = f"PROVISIONAL (stopped by {stopped}, every candidate has 1 of 1 seed, 1 of 3 folds"
    assert report.verdict.startswith(words) and report.figures["stopped"] == stopped


def test_the_first_answers_come_from_the_first_fold_and_from_cheap_candidates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts: list[str] = []
    cells: list[set[str]] = []

    def shown(figures: Any) -> None:
        verdicts.append(figures["verdict"].partition(").")[0])
        files = (tmp_path / "cells").glob("*.npz")
        cells.append({path.name.rpartition("-s0")[0] for path in files})

    monkeypatch.setattr(page, "print_figures", shown)
    report = api.run(small(tmp_path, **FOLDED))
    assert [len(x) for x in cells] == [6, 18, 21]  # mbt, the seventh, comes after the rest
    assert "PROVISIONAL (every candidate has 1 of 1 seed, 1 of 3 folds (1" in verdicts[0]
    assert not any("folds" in x for x in verdicts[1:])
    assert ["not run yet: `mbt`" in x for x in verdicts] == [True, True, False]
    assert all("damaged samples are tested last" in x for x in verdicts)
    verdicts.clear()
    again = api.run(small(tmp_path, **FOLDED))
    assert len(verdicts) == 1  # nothing is left of the first fold
    assert again.figures["leaderboard"] == report.figures["leaderboard"]


def test_without_a_cheap_fusion_the_first_fold_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts: list[str] = []
    monkeypatch.setattr(page, "print_figures", lambda figures: verdicts.append(figures["verdict"]))
    api.run(small(tmp_path, **{**FOLDED, "fusions": "mbt"}))
    assert len(verdicts) == 2
    assert "1 of 3 folds" in verdicts[0] and "not run yet" not in verdicts[0]


@pytest.mark.slow
def test_damaged_samples_are_tested_last_with_the_same_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"fusions": "sum,gmu", "seeds": 2, "tune": 2, "epochs": 2}
    whole = run(small(tmp_path / "whole", **changes))
    assert not list((tmp_path / "whole" / "cells").glob("*.pt"))
    before, calls = jobs.run_damaged, iter(range(100))

    def run_damaged(*arguments: Any) -> None:
        if next(calls) == 2:
            raise KeyboardInterrupt
        before(*arguments)

    monkeypatch.setattr(jobs, "run_damaged", run_damaged)
    report = api.run(small(tmp_path / "a", **changes))
    assert "damaged samples are tested last" in report.verdict
    assert list((tmp_path / "a" / "cells").glob("*.pt"))
    monkeypatch.undo()
    assert run(small(tmp_path / "a", **changes)) == whole  # stopped, and continued
    monkeypatch.setattr(examine, "tests_damage_later", lambda bench: False)
    assert run(small(tmp_path / "b", **changes))["leaderboard"] == whole["leaderboard"]
    files = [tmp_path / name / "results.parquet" for name in ("whole", "b")]
    assert pq.read_table(files[0]).to_pylist() == pq.read_table(files[1]).to_pylist()


def test_models_whose_weights_are_damaged_are_trained_again(tmp_path: Path) -> None:
    cfg = small(tmp_path, fusions="sum", seeds=1)
    whole = run(cfg)
    bench, dataset = setup.open_bench(cfg)
    bench = prepare.prepare(bench, dataset, tokens=False)
    path = schedule.path_of(bench, schedule.first_job(bench, "sum", 0))
    store.weights_path(path).write_bytes(b"half a fi")
    assert run(cfg)["leaderboard"] == whole["leaderboard"]
    assert not store.weights_path(path).exists()


def test_end_to_end_training_gives_the_same_kind_of_report(tmp_path: Path) -> None:
    encoders = {name: {"name": "vector/mlp", "dim": 8, "hidden": 16} for name in "ab"}
    summary = run(small(tmp_path, mode="finetune", encoders=encoders, seeds=1, fusions="sum"))
    rows = pq.read_table(tmp_path / "results.parquet").to_pylist()
    assert {r["corruption"] for r in rows} == {"", "pairing", "undamaged", "jitter", "dropout"}
    assert line_of(summary, "sum")["accuracy"] > 0.5
    linear = line_of(summary, "logistic regression on everything")
    assert linear["family"] == "baseline" and linear["accuracy"] > 0.8  # of the vectors themselves


def test_an_encoder_without_weights_is_trained_alone_first_and_the_report_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoders = {name: {"name": "vector/mlp", "dim": 8, "hidden": 16} for name in "ab"}
    changes = {"encoders": encoders, "seeds": 1, "fusions": "sum", "corruptions": False}
    summary = run(small(tmp_path, **changes))
    assert [note.split(":")[0] for note in summary["notes"]] == ["a", "b"]
    assert all("; it was trained alone on 240" in note for note in summary["notes"])
    monkeypatch.setattr(prepare, "pretrain", lambda *_: pytest.fail("trained again"))
    assert run(small(tmp_path / "again", **changes))["leaderboard"] == summary["leaderboard"]


def test_no_candidate_starts_from_the_head_that_an_encoder_was_trained_under(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads: list[torch.Tensor] = []
    before = prepare.fit

    def watch(trainer: Any, *rest: Any) -> Any:
        heads.append(trainer.model.fusion.head.weight.detach().clone())
        return before(trainer, *rest)

    monkeypatch.setattr(prepare, "fit", watch)
    encoders = {name: {"name": "vector/mlp", "dim": 16, "hidden": 16} for name in "ab"}
    cfg = small(tmp_path, encoders=encoders, seeds=3, corruptions=False, encoder_epochs=1)
    bench, dataset = setup.open_bench(cfg)
    bench = prepare.prepare(bench, dataset, tokens=False)
    assert len(heads) == 2
    settings = candidates.settings_of(cfg, "alone:a")
    models, _ = jobs.build(bench, setup.Job("alone:a", 0, (0, 1, 2), False, settings, {}))
    for model in models:
        start = model.fusion.head.weight
        assert start.shape == heads[0].shape
        assert not torch.equal(start, heads[0])


def stored_report(folder: Path, metric: str, scores: dict[str, float]) -> str:
    lines = [{"candidate": n, "kind": "fusion", "score": x} for n, x in scores.items()]
    figures = {"metric": metric, "data": {"name": folder.name}, "leaderboard": lines}
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps(figures))
    return str(folder)


def test_reports_that_are_one_stopped_or_in_the_way_are_not_combined(tmp_path: Path) -> None:
    scores = {"sum": 0.8, "gmu": 0.9, "max": 0.7}
    a, b, c = (Path(stored_report(tmp_path / x, "accuracy", scores)) for x in "abc")
    shutil.copy(a / "summary.json", b)
    figures = json.loads((c / "summary.json").read_text())
    (c / "summary.json").write_text(json.dumps({**figures, "stopped": "the time limit"}))
    for folders, out, says in (
        ([a, a], "out", "report of the same data as one before it"),
        ([a, b], "out", "report of the same data as one before it"),
        ([a, c], "out", "was stopped before its end"),
        ([a, c], "a", "is a report to combine"),
    ):
        with pytest.raises(FusionZooError, match=says):
            combine.combine([str(x) for x in folders], tmp_path / out)


def test_each_column_of_combined_reports_shows_its_own_metric_in_its_own_sign(
    tmp_path: Path,
) -> None:
    folders = [
        stored_report(tmp_path / "ages", "mae", {"sum": -6.672, "gmu": -5.5, "max": -7.0}),
        stored_report(tmp_path / "cats", "accuracy", {"sum": 0.8, "gmu": 0.9, "max": 0.7}),
    ]
    assert main(["--combine", json.dumps(folders), "--out", str(tmp_path / "all")]) == 0
    summary = json.loads((tmp_path / "all" / "summary.json").read_text())
    assert set(summary["ranks"]) == {"sum", "gmu", "max"} and summary["friedman_p"] is None
    assert "Over 2 data sets" in summary["verdict"]
    assert "needs 5 data sets or more" in summary["verdict"]
    table = (tmp_path / "all" / "table.md").read_text()
    assert "| candidate | average rank | ages (MAE) | cats (accuracy) |" in table
    assert "| gmu | 1.00 | 5.500 | 0.900 |" in table and "-6.672" not in table
    page = (tmp_path / "all" / "index.html").read_text()
    assert "Accuracy on each" not in page and "Nemenyi" not in page and page.count("<svg") == 1
    more = [stored_report(tmp_path / f"{n}", "mae", {"sum": 1, "gmu": 2, "max": 0}) for n in "abc"]
    assert main(["--combine", json.dumps([*folders, *more]), "--out", str(tmp_path / "five")]) == 0
    assert json.loads((tmp_path / "five" / "summary.json").read_text())["friedman_p"] < 0.05


def command(out: Path, cache: Path, **flags: str) -> list[str]:
    recipe = out.parent / "recipe.yaml"
    recipe.write_text(json.dumps(SMALL))
    flags = {"fusions": "sum,gmu,mbt,concat", "epochs": "8", "out": str(out), **flags}
    words = [word for key, value in flags.items() for word in (f"--{key}", value)]
    return [sys.executable, str(ROOT / "benchmark.py"), "--config", str(recipe), *words]


def training_seconds(path: Path) -> list[float]:
    """Return how long the models of a job took to train, which no second training takes again."""
    return [result.facts["seconds"] for result in store.load(path) or ()]


@pytest.mark.slow
def test_a_killed_benchmark_continues_and_ends_with_the_same_tables(tmp_path: Path) -> None:
    environment = {**os.environ, "FUSIONZOO_CACHE": str(tmp_path / "cache")}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    subprocess.run(command(whole, tmp_path), env=environment, check=True, timeout=300)
    kills = 0
    for wanted in (1, 5):
        process = subprocess.Popen(
            command(broken, tmp_path), env=environment, start_new_session=True
        )
        while process.poll() is None and len(list(broken.glob("cells/*.npz"))) < wanted:
            time.sleep(0.02)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            kills += 1
        process.wait()
    assert kills == 2
    before = {path: training_seconds(path) for path in broken.glob("cells/*.npz")}
    subprocess.run(command(broken, tmp_path), env=environment, check=True, timeout=300)
    for path, seconds in before.items():  # the file may have changed: damaged samples come last
        assert training_seconds(path) == seconds, f"{path.name} was trained again"
    for name in TABLES:
        assert (whole / name).read_bytes() == (broken / name).read_bytes(), name


def gone(is_left: Callable[[], object]) -> bool:
    """Whether processes end within a minute."""
    end = time.monotonic() + 60
    while is_left() and time.monotonic() < end:
        time.sleep(0.05)
    return not is_left()


def lives(session: int) -> bool:
    try:
        os.killpg(session, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_worker_processes_end_at_a_control_c(tmp_path: Path) -> None:
    environment = {**os.environ, "FUSIONZOO_CACHE": str(tmp_path / "cache")}
    out = tmp_path / "out"
    flags = ["--jobs", "2", "--seeds", "120"]
    piped: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    words = [*command(out, tmp_path), *flags]
    process = subprocess.Popen(words, env=environment, start_new_session=True, **piped)
    # Both workers are at work by then, and most of 240 jobs and more are left.
    while process.poll() is None and len(list(out.glob("cells/*.npz"))) < 40:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does
    said, errors = process.communicate(timeout=300)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "PROVISIONAL (stopped by Ctrl-C" in said
    assert (out / "index.html").is_file()
    assert gone(lambda: lives(process.pid))


def test_worker_processes_import_nothing_that_cannot_be_imported_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torchaudio", None)  # as encoders leave a broken one
    executors._process_context()
    server: Any = forkserver._forkserver
    assert "torch" in server._preload_modules
    assert "torchaudio" not in server._preload_modules


@pytest.mark.slow
def test_worker_processes_end_at_the_deadline(tmp_path: Path) -> None:
    before = set(active_children())
    pieces = [600.0, 600.0]
    with pytest.raises(executors.OutOfTimeError), executors.time_limit(1.0):
        list(executors.map_unordered(small(tmp_path, jobs=2), None, pieces, wait, "wait"))
    assert gone(lambda: set(active_children()) - before)


@pytest.mark.usefixtures("own_cache")
def test_the_time_limit_stops_an_encoding_that_goes_on_where_it_was(tmp_path: Path) -> None:
    bench, dataset = setup.open_bench(small(tmp_path))
    encoders = prepare.build_encoders(bench.cfg, dataset)
    with pytest.raises(executors.OutOfTimeError), executors.time_limit(0.001):
        prepare.store_all(bench, dataset, encoders, True)
    (part,) = cache.feature_cache().entries()
    assert part.metadata is not None
    assert part.metadata["description"]["unfinished_from"] == 0
    assert part.metadata["arrays"]["pooled"][1] == [64, 8]
    descriptions = prepare.store_all(bench, dataset, encoders, True)
    keys = {key_of({**x, "view": 0}) for x in descriptions.values()}
    assert {entry.key for entry in cache.feature_cache().entries()} == keys


def test_preparing_returns_a_new_bench_and_changes_none(tmp_path: Path) -> None:
    bench, dataset = setup.open_bench(small(tmp_path))
    before = vars(bench).copy()
    prepared = prepare.prepare(bench, dataset, tokens=False)
    assert all(value is before[name] for name, value in vars(bench).items())
    assert (bench.dims, bench.features, bench.corrupted) == ({}, (), ())
    assert prepared.dims == {"a": 8, "b": 8}
    assert len(prepared.features) == len(prepared.corrupted) == 1
    with pytest.raises(FrozenInstanceError):
        bench.dims = {}  # type: ignore[misc]


def test_settings_that_do_not_change_a_trial_do_not_change_its_file_name(tmp_path: Path) -> None:
    bench, dataset = setup.open_bench(small(tmp_path))
    bench = prepare.prepare(bench, dataset, tokens=False)
    (job, *_) = schedule.list_jobs(bench, ["sum"])
    names = []
    for changes in ({}, {"jobs": 7, "fusions": "all"}, {"epochs": 5}):
        other = setup.Bench(**{**vars(bench), "cfg": small(tmp_path, **changes)})
        names.append(schedule.path_of(other, job).name)
    assert names[0] == names[1] != names[2]


def test_the_linear_baseline_is_scikit_learns(tmp_path: Path) -> None:
    cfg = small(tmp_path, fusions="sum", corruptions=False, controls=False, seeds=1)
    summary = run(cfg)
    bench, dataset = setup.open_bench(cfg)
    fold = bench.folds[0]
    samples = map(dataset.__getitem__, range(400))
    x = torch.stack([torch.cat([sample.values["a"], sample.values["b"]]) for sample in samples])
    scale = x[fold.train].std(0, correction=0)
    x = (x - x[fold.train].mean(0)) / scale * 5 / x.shape[1] ** 0.5 * 2**0.5
    parts = (fold.train, fold.val, fold.test)
    (train, y), (val, of_val), (test, tested) = ((x[rows], bench.targets[rows]) for rows in parts)
    fits = [LogisticRegression(C=10.0**c, max_iter=500).fit(train, y) for c in range(-1, 4)]
    best = min(fits, key=lambda model: log_loss(of_val, model.predict_proba(val)))
    expected = best.score(test, tested)
    line = line_of(summary, "logistic regression on everything")
    assert line["accuracy"] == pytest.approx(expected, abs=0.015)


def test_small_data_is_cross_validated_and_tuned_unless_told_otherwise(tmp_path: Path) -> None:
    defaults = small(tmp_path, folds=None, tune=None)
    bench, _ = setup.open_bench(defaults)
    assert (len(bench.folds), bench.cfg.tune) == (5, 8)
    end_to_end, _ = setup.open_bench(replace(defaults, mode="finetune"))
    assert end_to_end.cfg.tune == 0
    large = {**SMALL["data"], "samples": 5000}
    assert len(setup.open_bench(replace(defaults, data=large))[0].folds) == 1


def test_pretrained_encoders_encode_damaged_samples_once_for_all_folds(tmp_path: Path) -> None:
    bench, dataset = setup.open_bench(small(tmp_path, folds=4, seeds=1))
    bench = prepare.prepare(bench, dataset, tokens=False)
    entries = [{str(damaged.description) for damaged in fold.values()} for fold in bench.corrupted]
    assert all(fold == entries[0] for fold in entries)
    tested = torch.cat([setup.damaged_rows(bench, fold) for fold in bench.folds])
    assert len(tested.unique()) == len(tested) and 130 <= len(tested) <= 140  # a third of 400
    for fold in bench.folds:
        rows = setup.damaged_rows(bench, fold)
        assert set(rows.tolist()) <= set(fold.test.tolist())
        share = bench.targets[rows].double().mean() - bench.targets[fold.test].double().mean()
        assert abs(share) < 0.05  # stratified
