"""Figures reach each board, offline, and a resumed run goes on with the same one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fusionzoo.errors import FusionZooError
from fusionzoo.machine.distributed import World
from fusionzoo.training.checkpoint import State
from fusionzoo.training.tracker import LOGGERS, Tracker, open_logger

OFFLINE = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def show(name: str, folder: Path, step: int) -> None:
    board = open_logger(name, folder, step)
    assert board is not None
    board.scalars(step + 1, {"step/loss": 0.5, "epoch/val/a_to_b.recall@1": 1e-3})
    board.close()


def test_without_a_board_nothing_is_opened(tmp_path: Path) -> None:
    assert open_logger("none", tmp_path, 0) is None
    assert not list(tmp_path.iterdir())


@pytest.mark.needs("tensorboard")
def test_tensorboard_gets_the_figures(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    show("tensorboard", tmp_path, 0)
    show("tensorboard", tmp_path, 1)
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(one.step, one.value) for one in found.Scalars("step/loss")] == [(1, 0.5), (2, 0.5)]


@pytest.mark.needs("mlflow")
def test_mlflow_gets_the_figures_in_one_run(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    show("mlflow", tmp_path, 0)
    show("mlflow", tmp_path, 1)
    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").absolute().as_uri())
    run = (tmp_path / "mlflow.id").read_text()
    history = client.get_metric_history(run, "step/loss")
    assert [(one.step, one.value) for one in history] == [(1, 0.5), (2, 0.5)]


def test_a_board_that_fails_costs_its_figures_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Down:
        def __init__(self, *_: object) -> None: ...

        def scalars(self, *_: object) -> None:
            raise ConnectionError("nobody\nanswers")

        def close(self) -> None: ...

    monkeypatch.setitem(LOGGERS, "wandb", Down)
    tracker = Tracker(World())
    tracker.start(tmp_path, State(), "wandb")
    tracker.log(3, "step", {"loss": 0.5})
    tracker.close()
    said = capsys.readouterr().out
    assert "step 3 is in metrics.jsonl, and not in the logger: nobody answers" in said
    assert '"loss": 0.5' in (tmp_path / "metrics.jsonl").read_text()


def test_a_board_that_does_not_open_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("no key")

    monkeypatch.setitem(LOGGERS, "wandb", refuse)
    with pytest.raises(FusionZooError, match="--log wandb: no key; --log none goes without"):
        open_logger("wandb", tmp_path, 0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.needs("wandb")
def test_wandb_writes_offline_under_one_name(tmp_path: Path) -> None:
    import wandb

    show("wandb", tmp_path, 0)
    known = (tmp_path / "wandb.id").read_text()
    show("wandb", tmp_path, 1)
    assert (tmp_path / "wandb.id").read_text() == known
    written = [path for path in (tmp_path / "wandb").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in written) > 0
    wandb.teardown()  # the service process that it would end with this one


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_board_that_is_not_installed_says_how(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("wandb", "mlflow", "mlflow.tracking"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(FusionZooError, match=rf"--log {name} needs pip install 'fusionzoo\[{name}"):
        open_logger(name, tmp_path, 0)


def test_every_board_can_be_asked_for() -> None:
    from typing import get_args, get_type_hints

    from fusionzoo.config import RunConfig

    assert set(get_args(get_type_hints(RunConfig)["log"])) == {*LOGGERS, "none"}
