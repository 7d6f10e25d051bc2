"""Training strategies as rows of the table."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fusionzoo.benchmark import api, candidates, jobs
from fusionzoo.benchmark.bench import Bench, Job, open_bench
from fusionzoo.benchmark.candidates import Candidate, parse, select_balance
from fusionzoo.benchmark.prepare import prepare
from fusionzoo.errors import FusionZooError
from helpers.setup_benchmark import small


def opened(tmp_path: Path, **changes: object) -> Bench:
    bench, dataset = open_bench(small(tmp_path, controls=False, corruptions=False, **changes))
    return prepare(bench, dataset, tokens=False)


def job(bench: Bench, name: str, seed: int = 0) -> Job:
    return Job(name, 0, (seed,), False, candidates.settings_of(bench.cfg, name), {})


@pytest.mark.parametrize(
    "named",
    [
        Candidate("gmu"),
        Candidate("alone:text"),
        Candidate("linear probe of text"),
        Candidate("gmu", ("mla", "modality_dropout")),
    ],
)
def test_the_name_of_a_candidate_says_all_of_it(named: Candidate) -> None:
    assert parse(named.name) == named


def test_an_unknown_training_strategy_is_named() -> None:
    with pytest.raises(FusionZooError, match=r"unknown training strategy 'ogm_g'.*ogm_ge"):
        select_balance("none,ogm_g")


def test_the_full_trainer_without_a_strategy_learns_what_the_short_one_does(tmp_path: Path) -> None:
    """Rows with and without --balance are comparable: the step is the same."""
    bench = opened(tmp_path)
    plain = job(bench, "gmu")
    models, feed = jobs.build(bench, plain)
    expected = jobs.train(bench, plain, models, feed).fits[0]
    idle = job(bench, "gmu + modality_dropout")
    settings = {"modality_dropout": {"rate": 0.0}}
    bench = opened(tmp_path, balance="modality_dropout", balance_settings=settings)
    models, feed = jobs.build(bench, idle)
    result = jobs.train(bench, idle, models, feed).fits[0]
    assert result.best_epoch == expected.best_epoch
    for name, weight in expected.weights.items():
        torch.testing.assert_close(result.weights[name], weight)


def test_training_strategies_are_rows_beside_the_fusions(tmp_path: Path) -> None:
    changes = {"fusions": "sum,mean", "balance": "none,mla,modality_dropout", "seeds": 1}
    report = api.run(small(tmp_path, controls=False, corruptions=False, **changes))
    assert report.failed == {}
    lines = {line["candidate"]: line for line in report.figures["leaderboard"]}
    rows = {f"{f}{b}" for f in ("sum", "mean") for b in ("", " + mla", " + modality_dropout")}
    assert rows <= set(lines)
    assert lines["sum + mla"]["score"] != lines["sum"]["score"] or (
        lines["sum + mla"]["nll"] != lines["sum"]["nll"]
    )
    assert "Of 6 fusions and training strategies" in report.figures["behind"][0]


def test_a_strategy_for_encoders_says_that_a_probe_trains_none(tmp_path: Path) -> None:
    report = api.run(small(tmp_path, controls=False, fusions="sum", seeds=1, balance="none,ogm_ge"))
    assert "--mode finetune" in report.failed["sum + ogm_ge"]
    assert any(line["candidate"] == "sum" for line in report.figures["leaderboard"])


@pytest.mark.parametrize("name", ["ogm_ge", "unimodal_aux", "gblend"])
def test_strategies_for_encoders_train_end_to_end(name: str, tmp_path: Path) -> None:
    encoders = {m: {"name": "vector/mlp", "dim": 8, "hidden": 8} for m in "ab"}
    changes = {"mode": "finetune", "encoders": encoders, "seeds": 1, "epochs": 2, "balance": name}
    report = api.run(small(tmp_path, controls=False, corruptions=False, fusions="sum", **changes))
    assert report.failed == {}


def test_the_best_single_modality_is_its_probe_where_that_beats_the_head(tmp_path: Path) -> None:
    # One epoch leaves the heads untrained.
    report = api.run(small(tmp_path, controls=False, corruptions=False, fusions="sum", epochs=1))
    lines = {line["candidate"]: line for line in report.figures["leaderboard"]}
    probes = [lines[f"linear probe of {name}"] for name in "ab"]
    assert all(line["kind"] == line["family"] == "single" for line in probes)
    best = report.figures["best_single"]
    assert report.figures["best_single_row"] == f"linear probe of {best}"
    assert f"{best} alone (its linear probe)" in report.verdict
    assert lines[f"alone:{best}"]["accuracy"] < lines[f"linear probe of {best}"]["accuracy"]
