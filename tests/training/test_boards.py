"""Figures reach each board, offline, and a resumed run goes on with the same one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fusionzoo.errors import FusionZooError
from fusionzoo.training.boards import BOARDS, open_board

OFFLINE = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "TRACKIO_QUIET": "1"}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
    for name in ("MLFLOW_TRACKING_URI", "TRACKIO_DIR"):
        monkeypatch.delenv(name, raising=False)


def show(name: str, folder: Path, step: int) -> None:
    board = open_board(name, folder, step)
    assert board is not None
    board.scalars(step + 1, {"step/loss": 0.5, "step/lr/image": 1e-3})
    board.close()


def test_without_a_board_nothing_is_opened(tmp_path: Path) -> None:
    assert open_board("none", tmp_path, 0) is None
    assert not list(tmp_path.iterdir())


def test_tensorboard_gets_the_figures(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    show("tensorboard", tmp_path, 0)
    show("tensorboard", tmp_path, 1)
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(one.step, one.value) for one in found.Scalars("step/loss")] == [(1, 0.5), (2, 0.5)]


def test_mlflow_gets_the_figures_in_one_run(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    show("mlflow", tmp_path, 0)
    show("mlflow", tmp_path, 1)
    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").absolute().as_uri())
    run = (tmp_path / "mlflow.id").read_text()
    history = client.get_metric_history(run, "step/loss")
    assert [(one.step, one.value) for one in history] == [(1, 0.5), (2, 0.5)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_the_others_write_offline_under_one_name(name: str, tmp_path: Path) -> None:
    show(name, tmp_path, 0)
    known = (tmp_path / f"{name}.id").read_text()
    show(name, tmp_path, 1)
    assert (tmp_path / f"{name}.id").read_text() == known
    written = [path for path in (tmp_path / name).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in written) > 0


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_board_that_is_not_installed_says_how(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("wandb", "mlflow", "mlflow.tracking", "trackio"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(FusionZooError, match=rf"--log {name} needs pip install 'fusionzoo\[{name}"):
        open_board(name, tmp_path, 0)


def test_every_board_can_be_asked_for() -> None:
    from typing import get_args, get_type_hints

    from fusionzoo.config import RunConfig

    assert set(get_args(get_type_hints(RunConfig)["log"])) == {*BOARDS, "none"}
