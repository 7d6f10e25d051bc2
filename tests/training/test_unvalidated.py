"""Data without a validation split: a share of train held out, or `--train.select last`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fusionzoo
from fusionzoo import create_dataset
from fusionzoo.benchmark.bench import open_bench
from fusionzoo.config import BenchmarkConfig
from fusionzoo.datasets.opening.spec import DataSpec
from fusionzoo.errors import FusionZooError
from fusionzoo.training.report import Run

TABLE = {
    "x": [[number % 3, number % 5] for number in range(120)],
    "y": [[number % 3 + 0.3 * (number % 4), number % 7] for number in range(120)],
    "target": [("low", "mid", "high")[number % 3] for number in range(120)],
    "group": [f"g{number // 2}" for number in range(120)],
    "split": [("train", "train", "train", "test")[number // 2 % 4] for number in range(120)],
}
KINDS = {"x": "vector", "y": "vector"}
VALIDATED = {**TABLE, "split": [("train", "train", "val", "test")[n // 2 % 4] for n in range(120)]}


def run(out: Path, table: dict[str, Any] = TABLE, **settings: Any) -> Run:
    common = {"kinds": KINDS, "fusion": {"name": "concat", "dim": 8}, "epochs": 3, "log": "none"}
    common |= {"preset": "none"}
    return fusionzoo.train(table, out=out, **{**common, "device": "cpu", **settings})


def test_a_tenth_of_train_validates_where_the_data_has_no_such_split(tmp_path: Path) -> None:
    result = run(tmp_path / "a")
    data = create_dataset(TABLE, kinds=KINDS, val_share=0.1)
    assert result.model.trained_on.results.samples == data.splits
    assert data.splits == {"train": 82, "val": 8, "test": 30}
    assert result.metrics["val"]["loss"] > 0
    again = fusionzoo.evaluate(result, TABLE)
    assert again["accuracy"] == pytest.approx(result.metrics["test"]["accuracy"])


def test_groups_and_shares_of_classes_are_kept_and_statistics_are_those_of_train() -> None:
    before, data = create_dataset(TABLE, kinds=KINDS), create_dataset(TABLE, kinds=KINDS)
    held_out = data.hold_out(0.25)
    assert before.ids == held_out.ids
    pairs = [*zip(before.split_names, held_out.split_names, strict=True)]
    assert {*pairs} == {("train", "train"), ("train", "val"), ("test", "test")}
    parts = {x: {*held_out.split(x).groups} for x in ("train", "val", "test")}
    assert not parts["train"] & parts["val"]
    assert len({*held_out.split("val").labels}) == 3
    assert held_out.split_names == data.hold_out(0.25).split_names
    assert "25 % of train held out" in held_out.provenance.split_rule
    table = {**TABLE, "target": [float(number) for number in range(120)]}
    data = create_dataset(table, kinds=KINDS, targets={"target": "regression"}).hold_out(0.5)
    assert data.scheme is not None
    numbers = [float(x) for x in data.split("train").labels]
    assert data.scheme[0].mean == pytest.approx(sum(numbers) / len(numbers))
    assert float(data.split("train").targets.mean()) == pytest.approx(0, abs=1e-6)


def test_with_select_last_all_of_train_is_learnt_from_and_the_last_epoch_kept(
    tmp_path: Path,
) -> None:
    result = run(tmp_path / "a", train={"select": "last"})
    assert result.model.trained_on.results.samples == {"train": 90, "test": 30}
    assert result.metrics["best_epoch"] == 3
    assert result.metrics["val"] == {}
    assert "calibration" not in result.metrics
    assert [event["val"] for event in result.history] == [{}] * 3
    assert "epoch 3, the last" in (result.folder / "model" / "README.md").read_text()
    assert "epoch 3, the last" in fusionzoo.report(result, data=TABLE).read_text()
    assert len(result.plot().axes) == 1  # the losses


def test_with_a_validation_split_the_last_epoch_is_kept_whatever_it_says(tmp_path: Path) -> None:
    settings = {"optim": {"lr": 0.5}, "seed": 1}  # too high: validation gets worse
    last = run(tmp_path / "a", VALIDATED, train={"select": "last"}, **settings)
    best = run(tmp_path / "b", VALIDATED, **settings)
    assert best.metrics["best_epoch"] < 3
    assert last.metrics["best_epoch"] == 3
    assert last.metrics["val"]["loss"] == last.history[-1]["val"]["loss"]
    assert last.history == best.history


def test_seeds_join_their_last_epochs(tmp_path: Path) -> None:
    result = run(tmp_path / "a", train={"select": "last", "seeds": 2})
    assert [len(x["val"]) for x in result.metrics["seeds"]] == [0, 0]
    assert "each of its last epoch" in (result.folder / "model" / "README.md").read_text()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"train": {"patience": 2}}, "patience= goes by validation"),
        ({"train": {"trials": 2}}, "trials= keeps the best by validation"),
        ({"train": {"refit": True}}, "refit= trains anew for the epochs"),
        ({"train": {"calibrate": "temperature"}}, 'calibrate="temperature" needs'),
        ({"optim": {"schedule": "plateau"}}, "schedule= plateau follows"),
        ({"balance": "gblend"}, 'balance="gblend" needs a validation split'),
    ],
)
def test_what_goes_by_validation_is_refused(
    settings: dict[str, Any], says: str, tmp_path: Path
) -> None:
    settings = {**settings, "train": {**settings.get("train", {}), "select": "last"}}
    with pytest.raises(FusionZooError, match=says):
        run(tmp_path / "a", **settings)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("table", "share", "says"),
    [(VALIDATED, 0.1, "has a val split: leave out"), (TABLE, 1.5, "val_share=1.5")],
)
def test_a_share_that_cannot_be_held_out_is_one_clear_error(
    table: dict[str, Any], share: float, says: str
) -> None:
    with pytest.raises(FusionZooError, match=says):
        create_dataset(table, kinds=KINDS, val_share=share)


def test_a_benchmark_of_the_data_s_own_splits_holds_out_the_same() -> None:
    data = create_dataset(TABLE, kinds=KINDS)
    bench, opened = open_bench(
        BenchmarkConfig(data={"name": "manifest"}, folds=0), DataSpec(dataset=data)
    )
    assert bench.cfg.data["val_share"] == 0.1
    assert opened.split_names == data.hold_out(0.1).split_names
    rows = [bench.folds[0].train, bench.folds[0].val, bench.folds[0].test]
    assert sorted(torch.cat(rows).tolist()) == [*range(120)]
