"""A limit on the time of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fusionzoo
from fusionzoo.errors import FusionZooError
from fusionzoo.machine.distributed import World
from fusionzoo.training.report import Run
from fusionzoo.training.tracker import Tracker
from helpers.trainings import weights

DATA = {"name": "interactions", "samples": 300}


def run(out: Path, **settings: Any) -> Run:
    train = {"epochs": 4, **settings.pop("train", {})}
    return fusionzoo.train(DATA, out=out, log="none", device="cpu", train=train, **settings)


def read(path: Path) -> dict[str, Any]:
    contents: dict[str, Any] = torch.load(path, weights_only=True)
    return contents


def test_a_run_out_of_time_reports_and_goes_on_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = run(tmp_path / "whole")
    asked: list[int] = []

    def late_at_the_eighth_step(tracker: Tracker, limit: Any) -> bool:
        asked.append(1)
        return limit is not None and len(asked) > 9

    with monkeypatch.context() as patch:
        patch.setattr(Tracker, "is_late", late_at_the_eighth_step)
        part = run(tmp_path / "parts", train={"time_limit": "10m"})
    said = capsys.readouterr().out
    assert "time limit of 10m reached at step" in said and "goes on" in said
    assert part.exit_code == 0 and part.metrics["test"] and part.model
    steps = part.history[-1]["step"]
    assert 0 < steps < whole.history[-1]["step"]
    again = run(tmp_path / "parts", train={"time_limit": None}, resume=True)
    ours, theirs = (weights(tmp_path / name) for name in ("whole", "parts"))
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
    found, wanted = ([event["val"]["loss"] for event in x.history] for x in (again, whole))
    assert found == wanted


def test_a_limit_of_no_time_still_makes_a_step_and_a_model_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(tmp_path / "a", train={"time_limit": "0.001s"})
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("warning: hardly trained, 1 of the 6 steps of the first epoch: --resume")
    assert result.history[-1]["step"] == 1
    assert result.metrics["test"] and (tmp_path / "a" / "model" / "config.json").is_file()
    state = read(tmp_path / "a" / "checkpoints" / "last.pt")["state"]
    assert (state["step"], state["evaluated"]) == (1, 0)
    # Its best epoch counts anew once the last phase has begun.
    result = run(tmp_path / "b", fusion="mmin", train={"time_limit": "0.001s"})
    assert result.metrics["test"]
    state = read(tmp_path / "b" / "checkpoints" / "last.pt")["state"]
    assert state["best"] == {}


@pytest.mark.parametrize("limit", ["10 minutes", "0s", "m", "1d", "-5s"])
def test_a_limit_that_is_no_time_is_one_line(limit: str, tmp_path: Path) -> None:
    with pytest.raises(FusionZooError, match="time_limit="):
        run(tmp_path / "a", train={"time_limit": limit})
    assert not (tmp_path / "a").exists()


def test_limits_in_all_units_are_counted() -> None:
    tracker = Tracker(World())
    tracker._created -= 100
    assert all(tracker.is_late(x) for x in ("99s", "1.5m", 99))
    assert not any(tracker.is_late(x) for x in ("101", "2m", "1h", None))
