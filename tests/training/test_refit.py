"""`--train.refit`: the saved model is trained anew on train and validation together."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import fusionzoo
from fusionzoo.errors import FusionZooError
from fusionzoo.training import checkpoint, fit
from fusionzoo.training.report import Run

ROOT = Path(__file__).parents[2]
DATA = {"name": "interactions", "samples": 300}


def run(out: Path, *, resume: bool = False, **train: Any) -> Run:
    settings = {"epochs": 3, "refit": True, **train}
    return fusionzoo.train(
        DATA, out=out, log="none", device="cpu", fusion="concat", train=settings, resume=resume
    )


def assert_equal_models(first: Run, second: Run) -> None:
    weights = second.model.state_dict()
    for name, x in first.model.state_dict().items():
        assert torch.equal(x, weights[name]), name


def test_the_saved_model_learnt_from_train_and_validation_for_the_best_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    train_epoch = fit.RunInProgress.train_epoch

    def counted(run: Any, signals: Any) -> int:
        rows.append(len(run.loaders["train"].dataset))
        return train_epoch(run, signals)

    monkeypatch.setattr(fit.RunInProgress, "train_epoch", counted)
    result, plain = run(tmp_path / "a"), run(tmp_path / "b", refit=False)
    best, train, val = plain.metrics["best_epoch"], 180, 60
    assert rows == [train] * 3 + [train + val] * best + [train] * 3
    assert result.metrics["best_epoch"] == best
    assert result.metrics["refit"] == {"samples": train + val, "epochs": best}
    assert "refit" not in plain.metrics
    assert result.metrics["val"] == plain.metrics["val"]  # of the first training
    assert result.history == plain.history
    weights = plain.model.state_dict()
    same = [torch.equal(x, weights[name]) for name, x in result.model.state_dict().items()]
    assert not all(same)
    metrics = fusionzoo.evaluate(result, DATA)
    assert metrics["accuracy"] == pytest.approx(result.metrics["test"]["accuracy"])


def test_a_refit_that_is_stopped_goes_on_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(tmp_path / "whole")
    save, calls = checkpoint.save, []

    def killed(path: Path, *rest: Any, **more: Any) -> None:
        save(path, *rest, **more)
        if path.name == "refit.pt":
            calls.append(path)
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "a")
    monkeypatch.undo()
    assert len(calls) == 1
    result = run(tmp_path / "a", resume=True)
    assert result.metrics["test"] == whole.metrics["test"]
    assert_equal_models(result, whole)
    assert_equal_models(run(tmp_path / "a", resume=True), whole)  # a finished one is reported again


@pytest.mark.slow
def test_two_processes_do_by_default_what_one_does(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    table = pd.DataFrame(draw.normal(size=(200, 3)), columns=["a", "b", "c"])
    table["target"] = np.where(table["a"] > 0, "more", "less")
    table["split"] = np.repeat(["train", "val", "test"], (120, 40, 40))
    table.to_csv(tmp_path / "m.csv", index=False)
    flags = [str(tmp_path / "m.csv"), "--target", "target", "--preset", "good", "--log", "none"]
    flags += ["--train.epochs", "2", "--train.refit", "true"]
    flags += ["--dist.nproc", "2", "--device", "cpu"]
    flags += ["--out", str(tmp_path / "run")]
    for more in ([], ["--resume"]):
        command = [sys.executable, "train.py", *flags, *more]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    results = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert results["environment"]["processes"] == 2
    assert results["refit"] == {"samples": 160, "epochs": results["best_epoch"]}
    assert results["average_linear"]
    assert len(results["floors"]) == 2
    metrics = fusionzoo.evaluate(tmp_path / "run")
    assert metrics["accuracy"] == pytest.approx(results["test"]["accuracy"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optim": {"schedule": "plateau"}}, "plateau"),
        ({"balance": "gblend"}, 'balance="gblend"'),
    ],
)
def test_what_needs_a_validation_split_is_refused_before_training(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    settings["train"] = {"refit": True, "epochs": 1, **settings.get("train", {})}
    with pytest.raises(FusionZooError, match=message):
        fusionzoo.train(DATA, out=tmp_path / "a", log="none", device="cpu", **settings)
