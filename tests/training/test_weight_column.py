"""Training with weights of samples: a weight of 2 is a row listed twice, 0 a row left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fusionzoo as fz
from fusionzoo.cli import main
from fusionzoo.errors import FusionZooError
from fusionzoo.structures import Batch, StepContext
from fusionzoo.training.balance import BALANCE
from fusionzoo.training.balance.gblend import mean_loss
from fusionzoo.training.report import Run
from helpers.strategies import (
    ROWS,
    TARGETS,
    make_batch,
    make_loaders,
    make_model,
    make_objective,
    make_trainer,
    only,
    save_teachers,
)
from helpers.trainings import PREEMPTED, preempt_at

COMPARES = ("cca_loss", "comm", "contrastive_align", "gmc", "symile")  # samples with each other
# `mixup` draws partners, `matryoshka` and `relearn` need more of a run; see below and `gblend`.
WEIGHABLE = [x for x in BALANCE if x not in (*COMPARES, "mixup", "matryoshka", "relearn", "gblend")]
WEIGHTS = torch.tensor([1.0, 2, 1, 3, 1, 1, 2, 1, 1, 1, 1, 1])
TWICE = torch.arange(ROWS).repeat_interleave(WEIGHTS.long())
SGD = {"optim": {"name": "sgd", "lr": 0.1, "clip": None, "settings": {"momentum": 0}}}


def weighted(batch: Batch, weights: torch.Tensor = WEIGHTS) -> Batch:
    return batch._replace(weight=weights)


def step(balance: str, settings: dict[str, Any], batch: Batch, fusion: str = "gmu") -> Any:
    """One step from the same start; return the loss and the model's parameters after it."""
    model = make_model(fusion)
    objective = make_objective(balance, settings, model=model)
    objective.mean_weight = float(WEIGHTS.mean())
    result = make_trainer(objective, SGD).step([batch], StepContext(epoch=1.0))
    assert result.skipped is None
    return result.loss, dict(model.named_parameters())


@pytest.mark.parametrize("name", ["", *WEIGHABLE])
def test_a_weight_of_2_is_a_row_listed_twice(name: str, tmp_path: Path) -> None:
    settings = save_teachers(tmp_path) if name == "umt" else {}
    batch = make_batch(absent=[])
    loss, found = step(name, settings, weighted(batch))
    listed_loss, wanted = step(name, settings, batch.take(TWICE))
    torch.testing.assert_close(loss, listed_loss)
    plain = step(name, settings, batch)[1]
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=1e-6, atol=1e-9)
    assert any(not torch.equal(found[key], plain[key]) for key in found)


@pytest.mark.parametrize("fusion", ["late_mean", "misa", "drfuse", "mmdynamics", "i2moe"])
def test_losses_of_fusions_are_multiplied_row_by_row(fusion: str) -> None:
    batch, outputs = make_batch(), []
    for one in (batch, weighted(batch)):
        objective = make_objective(model=make_model(fusion))
        objective.mean_weight = float(WEIGHTS.mean())
        torch.manual_seed(0)
        outputs.append(objective(one, StepContext(rows=objective.rows(batch))))
    plain, weighed = outputs
    factors = WEIGHTS / WEIGHTS.mean()
    torch.testing.assert_close(weighed.loss, factors * plain.loss)
    for name, loss in plain.unimodal_loss.items():
        torch.testing.assert_close(weighed.unimodal_loss[name], factors * loss)


def test_a_weight_of_0_is_a_row_left_out() -> None:
    weights = torch.ones(ROWS)
    weights[[2, 9]] = 0
    kept = weights.nonzero()[:, 0]
    states = []
    for batch in (weighted(make_batch(absent=[]), weights), make_batch(absent=[]).take(kept)):
        objective = make_objective()
        objective.mean_weight = float(weights.mean())
        make_trainer(objective, SGD).step([batch], StepContext())
        states.append(dict(objective.named_parameters()))
    for key, value in states[1].items():
        torch.testing.assert_close(states[0][key], value, rtol=1e-6, atol=1e-9)


def test_mixed_rows_count_by_their_own_weights_and_gblend_measures_weighted_means() -> None:
    objective, batch = make_objective("mixup"), weighted(make_batch(absent=[]))
    objective.mean_weight = float(WEIGHTS.mean())
    strategy: Any = only(objective)
    context = StepContext(rows=objective.rows(batch))
    found = objective(batch, context).main_loss.values
    features = objective.model.encode(batch)
    mixed = strategy.edit_features(context._replace(batch=batch, features=features))
    pairs, logits = strategy.pairs, objective.model.fusion(mixed).logits
    factors = WEIGHTS / WEIGHTS.mean()
    losses = [
        factors[rows] * objective.criterion(logits, TARGETS[rows])
        for rows in (torch.arange(ROWS), pairs.position)
    ]
    share = strategy.label_share
    torch.testing.assert_close(found, share * losses[0] + (1 - share) * losses[1])
    objective, batch = make_objective("gblend"), weighted(make_batch(absent=[]))
    objective.mean_weight = 5.0  # the weights of another split have another mean
    trainer = make_trainer(objective, SGD)
    context = StepContext(epoch=1.0)
    found = mean_loss(trainer, make_loaders(batch)["train"], context)
    plain = objective(batch._replace(weight=None), context._replace(rows=objective.rows(batch)))
    wanted = np.average(plain.main_loss.values.detach(), weights=WEIGHTS)
    assert found == pytest.approx(wanted, rel=1e-6)


def write_table(path: Path, weights: Any, rows: int = 120) -> None:
    draw = np.random.default_rng(0)
    lines = ["id,split,target,age,size,w"]
    for row in range(rows):
        label, split = row % 2, ("train", "train", "val", "test")[row // 2 % 4]
        numbers = draw.normal(size=2) + label
        lines.append(
            f"r{row},{split},{'ab'[label]},{numbers[0]:.4f},{numbers[1]:.4f},{weights[row]}"
        )
    path.write_text("\n".join(lines) + "\n")


SETTINGS: dict[str, Any] = {
    "columns": {"first": "age", "second": "size"},
    "kinds": {"first": "tabular", "second": "tabular"},
    "fusion": {"name": "mean", "dim": 8},
    "encoders": {x: {"name": "tabular/mlp", "dim": 8} for x in ("first", "second")},
    "train": {"epochs": 2, "batch_size": 15, "num_workers": 0},
    "device": "cpu",
}


def test_a_run_is_weighted_says_so_and_its_model_remembers_the_column(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = np.random.default_rng(1).integers(0, 4, 120)
    write_table(tmp_path / "a.csv", weights)
    run = fz.train(
        str(tmp_path / "a.csv"), weight_column="w", out=str(tmp_path / "run"), **SETTINGS
    )
    assert "weighted by w" in capsys.readouterr().out
    results = json.loads((tmp_path / "run/metrics.json").read_text())
    assert results["weighted_by"] == "w"
    found = fz.evaluate(str(tmp_path / "run"))
    assert found["weighted_by"] == "w"
    assert found["loss"] == pytest.approx(results["test"]["loss"], abs=1e-6)
    predicted = fz.predict(str(tmp_path / "run"), str(tmp_path / "a.csv"))
    cells = dict(zip(predicted["id"].to_pylist(), predicted["label"].to_pylist(), strict=True))
    tested = [row for row in range(120) if row // 2 % 4 == 3]
    right = [cells[f"r{row}"] == "ab"[row % 2] for row in tested]
    assert found["accuracy"] == pytest.approx(np.average(right, weights=weights[tested]))
    # Rows of weight 0 are as if they were not there.
    kept = fz.create_dataset(
        str(tmp_path / "a.csv"), weight_column="w", **{x: SETTINGS[x] for x in ("columns", "kinds")}
    )
    assert kept.weights is not None
    some = kept.subset((kept.weights > 0).nonzero()[:, 0])
    again = fz.evaluate(run.model, some)
    assert again["accuracy"] == pytest.approx(found["accuracy"])

    # Another table without the column: an error with what to do, which then works.
    text = (tmp_path / "a.csv").read_text().replace(",w\n", ",other\n")
    (tmp_path / "b.csv").write_text(text)
    with pytest.raises(FusionZooError, match=r"b.csv has no column 'w' for weight_column="):
        fz.evaluate(str(tmp_path / "run"), str(tmp_path / "b.csv"))
    alike = fz.evaluate(str(tmp_path / "run"), str(tmp_path / "b.csv"), weight_column="none")
    assert "weighted_by" not in alike and alike["accuracy"] == pytest.approx(np.mean(right))
    assert len(fz.predict(str(tmp_path / "run"), str(tmp_path / "b.csv"))) == 120
    assert main(["evaluate", str(tmp_path / "run")]) == 0
    assert "Split 'test', weighted by w" in capsys.readouterr().out


WAYS: list[dict[str, Any]] = [{}, {"ema": 0.5}, {"refit": True}, {"seeds": 2}]
WAYS += [{"sampler": "class_weighted"}]


def train(folder: Path, name: str, cells: Any, **settings: Any) -> Run:
    """Train on a table whose weights are `cells`, and on nothing else that differs."""
    write_table(folder / f"{name}.csv", cells)
    train = {**SETTINGS["train"], **settings.pop("train", {})}
    named = {"out": str(folder / name), **SETTINGS, "train": train, **settings}
    return fz.train(str(folder / f"{name}.csv"), **named)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_equal_weights_and_none_give_the_same_model_and_others_another(
    way: dict[str, Any], tmp_path: Path
) -> None:
    unequal = np.random.default_rng(1).integers(0, 4, 120)
    tables = {"a": [2] * 120, "b": unequal, "c": [2] * 120}
    states = []
    for name, cells in tables.items():
        column = {} if name == "c" else {"weight_column": "w"}
        run = train(tmp_path, name, cells, train=way, **column)
        states.append(run.model.state_dict())
    for key, value in states[2].items():
        assert torch.equal(states[0][key], value), key
    assert any(not torch.equal(states[1][key], value) for key, value in states[2].items())


def test_a_stopped_weighted_run_resumes_to_the_same_weights(tmp_path: Path) -> None:
    cells = np.random.default_rng(1).integers(0, 4, 120)
    whole = train(tmp_path, "a", cells, weight_column="w")
    stopped = preempt_at(3, lambda: train(tmp_path, "b", cells, weight_column="w"))
    assert stopped.exit_code == PREEMPTED
    resumed = fz.train(out=str(tmp_path / "b"), resume=True)
    ours, theirs = (x.model.state_dict() for x in (whole, resumed))
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_strategy_that_compares_samples_refuses_weights(tmp_path: Path) -> None:
    assert {x for x in BALANCE if not getattr(BALANCE[x].cls, "weighs_rows", True)} == {*COMPARES}
    assert not only(make_objective("subset_distill", {"relation": "mad"})).weighs_rows
    write_table(tmp_path / "a.csv", [1] * 120)
    out = str(tmp_path / "run")
    with pytest.raises(FusionZooError, match="balance= symile compares samples with each other"):
        fz.train(str(tmp_path / "a.csv"), weight_column="w", out=out, balance="symile", **SETTINGS)


@pytest.mark.parametrize("split", ["training", "val", "test"])
def test_a_split_whose_weights_are_all_0_is_refused(split: str, tmp_path: Path) -> None:
    places = {"training": (0, 1), "val": (2,), "test": (3,)}[split]
    write_table(tmp_path / "a.csv", [0 if row // 2 % 4 in places else 1 for row in range(120)])
    with pytest.raises(FusionZooError, match=f"all weights of the {split} split are 0 in column"):
        fz.train(str(tmp_path / "a.csv"), weight_column="w", out=str(tmp_path / "run"), **SETTINGS)
