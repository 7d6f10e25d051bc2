"""The floors of the final table: a linear model and boosted trees on the same columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.linear_model import Ridge

import fusionzoo as fz
from fusionzoo.training import presets
from fusionzoo.training.average import add_linear
from fusionzoo.training.fitted.linear import LinearMap
from fusionzoo.training.presets import Length

ROWS = 120
TINY = {"tabular": {"dim": 4, "members": 2, "number_dim": 2}}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train two epochs by default."""
    two = Length(steps=1, fewest=2, most=2, patience=2, time_limit=None)
    for lengths in (presets.LIGHT, presets.DEEP):
        monkeypatch.setitem(lengths, "good", two)


def table(**columns: Any) -> pd.DataFrame:
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(2, ROWS))
    splits = np.repeat(["train", "val", "test"], (70, 20, 30))
    frame = pd.DataFrame({"x": x, "y": y, "split": splits, **columns})
    return frame.assign(target=3 * x - y + 0.1 * draw.normal(size=ROWS))


def trained(frame: pd.DataFrame, out: Path, **settings: Any) -> fz.Run:
    settings = {"encoders": TINY, "log": "none", "device": "cpu", **settings}
    return fz.train(frame, target="target", out=out, **settings)


def test_the_linear_floor_is_a_ridge_regression_on_train_and_validation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frame = table()
    run = trained(frame, tmp_path / "a")
    numbers, learnt = frame[["x", "y"]], (frame["split"] != "test").to_numpy()
    scale = numbers[frame["split"] == "train"]
    scaled = ((numbers - scale.mean()) / scale.std(ddof=0)).to_numpy()
    model = Ridge(alpha=1e-3).fit(scaled[learnt], frame["target"][learnt])
    wanted = model.score(scaled[~learnt], frame["target"][~learnt])
    floors = run.metrics["floors"]
    assert floors["linear on everything"]["r2"] == pytest.approx(wanted, abs=2e-3)
    assert [*floors] == ["linear on everything", "boosted trees on everything"]
    printed = capsys.readouterr().out
    assert "linear on everything" in printed and "trained: tabular/tabm" in printed
    assert "Better here than the trained model: linear on everything (+" in printed


def test_gaps_categories_and_classes_have_floors_too(tmp_path: Path) -> None:
    colours = np.resize(["red", "blue", None, "red", "green"], ROWS)
    frame = table(colour=colours).assign(target=np.where(colours == "red", "warm", "cold"))
    frame.loc[::7, "x"] = None
    run = trained(frame, tmp_path / "a")
    assert [x["accuracy"] for x in run.metrics["floors"].values()] == [1.0, 1.0]


@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_a_table_is_answered_by_the_mean_of_its_model_and_a_linear_one(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frame = table(colour=np.resize(["red", "blue", None, "red", "green"], ROWS))
    frame.loc[::7, "x"] = None
    if kind == "classes":
        frame["target"] = np.where(frame["target"] > 0, "warm", "cold")
    run = trained(frame, tmp_path / "a")
    assert run.metrics["average_linear"]
    assert "the mean of tabular/tabm and a linear model" in capsys.readouterr().out
    model = trained(frame, tmp_path / "b", average_linear=False, refit=False).model.eval()
    rows = model.open_samples(frame.to_dict("records"))
    batch = model.collate()([rows[n] for n in range(ROWS)])
    x = model.encoders["tabular"].linear_inputs(batch.inputs["tabular"]).double()
    width = model.fusion.num_outputs
    draw = torch.Generator().manual_seed(0)
    shapes = (x.shape[1], width), (width,)
    added = LinearMap(*(torch.randn(x, generator=draw).double() for x in shapes))
    before = model(batch).logits.double()
    add_linear(model, added, ["tabular"])
    wanted = (before + x @ added.weight + added.bias) / 2
    torch.testing.assert_close(model(batch).logits.double(), wanted, rtol=1e-4, atol=1e-4)


def test_vectors_are_answered_by_the_mean_of_their_fusion_and_a_linear_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    far = table(left=[*np.random.default_rng(1).normal(50, 9, size=(ROWS, 3))])
    far["right"] = [row if n % 5 else None for n, row in enumerate(far[["x", "y"]].to_numpy())]
    frame = far[["left", "right", "split", "target"]]
    identity = {key: {"name": "vector/identity"} for key in ("left", "right")}
    run = trained(frame, tmp_path / "a", encoders=identity)
    assert run.metrics["average_linear"] and run.metrics["test"]["r2"] > 0.3  # in two epochs
    assert "the mean of gmu and a linear model" in capsys.readouterr().out
    records = frame.to_dict("records")
    assert fz.load(tmp_path / "a").predict(records) == run.model.predict(records)
    settings: dict[str, Any] = {"encoders": identity, "average_linear": False, "refit": False}
    model = trained(frame, tmp_path / "b", **settings).model.eval()
    rows = model.open_samples(records)
    batch = model.collate()([rows[n] for n in range(ROWS) if n % 5])
    x = torch.cat([batch.inputs[name]["values"] for name in identity], dim=1).double()
    draw = torch.Generator().manual_seed(0)
    added = LinearMap(*(torch.randn(x, generator=draw).double() for x in ((5, 1), (1,))))
    wanted = (model(batch).logits + x @ added.weight + added.bias) / 2
    add_linear(model, added, [*identity])
    torch.testing.assert_close(model(batch).logits.double(), wanted, rtol=1e-4, atol=1e-4)


def test_a_mean_with_a_linear_model_that_knows_nothing_is_not_taken(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    frame = pd.DataFrame(draw.normal(size=(400, 2)), columns=["a", "b"])
    frame["target"] = np.where(frame["a"] * frame["b"] > 0, "same", "other")
    run = fz.train(frame, target="target", out=tmp_path, preset="good", epochs=30, device="cpu")
    assert "average_linear" not in run.metrics


def test_what_is_trained_from_scratch_is_not_read_and_the_line_says_what_is(tmp_path: Path) -> None:
    texts = [f"word {x % 3} and {x}" for x in range(ROWS)]
    chars = {**TINY, "text": {"name": "chars", "dim": 8}}
    run = trained(table(text=texts), tmp_path / "a", encoders=chars)
    assert run.metrics["linear"] == {"tabular": run.metrics["floors"]["linear on tabular"]}
    assert run.metrics["gain"]["over"] == "linear on tabular"  # its head has learnt two epochs
    only = table(text=texts)[["text", "split", "target"]]
    assert "floors" not in trained(only, tmp_path / "b", encoders={"text": chars["text"]}).metrics


def test_the_gain_is_over_the_best_of_heads_and_linear_models_of_single_modalities(
    tmp_path: Path,
) -> None:
    vectors = np.random.default_rng(1).normal(size=(ROWS, 3))
    run = trained(table(vector=[*vectors]), tmp_path / "a", encoders={**TINY, "vector": {"dim": 4}})
    linear, rows = run.metrics["linear"], {row[0]: row[1:] for row in run.results()[1]}
    assert [*linear] == ["tabular", "vector"]
    assert linear["tabular"]["r2"] > 0.9 > 0.5 > linear["vector"]["r2"]  # which says nothing
    for name, figures in linear.items():
        is_better = figures["r2"] > run.metrics["unimodal"][name]["r2"]
        assert (f"linear on {name}" in rows) == is_better
    assert run.metrics["gain"]["over"] == "linear on tabular"
    mae = run.metrics["test"]["mae"], linear["tabular"]["mae"]
    assert run.metrics["gain"]["gain"] == pytest.approx(mae[1] - mae[0], abs=1e-4)
    assert "gain over linear on tabular" in rows


@pytest.mark.parametrize("settings", [{"resume": True}, {"trials": 2}, {"seeds": 2}])
def test_resumed_repeated_and_joined_trainings_have_them(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    again = trained(table(), tmp_path / "b", epochs=1, **settings | {"resume": False})
    if "resume" in settings:
        again = trained(table(), tmp_path / "b", epochs=2, resume=True)
    assert "linear on everything" in again.metrics["floors"]
