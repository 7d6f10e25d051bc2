"""`--train.trials`: several trainings, of which the best by validation stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import fusionzoo
from fusionzoo.config import OptimConfig, RunConfig, TrainConfig
from fusionzoo.errors import FusionZooError
from fusionzoo.machine.distributed import World
from fusionzoo.training.report import Run
from fusionzoo.training.tracker import Tracker
from fusionzoo.training.trials import Trial, Trials
from helpers.trainings import kill_in

DATA = {"name": "interactions", "samples": 300}


def run(out: Path, trials: int = 4, *, data: Any = None, resume: Any = False, **train: Any) -> Run:
    train = {"epochs": 2, "trials": trials, **train}
    fixed: dict[str, Any] = {"log": "none", "device": "cpu", "fusion": "concat", "preset": "none"}
    return fusionzoo.train(data or DATA, out=out, train=train, resume=resume, **fixed)


def finished(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "trials.json").read_text())["finished"]  # type: ignore[no-any-return]


def test_the_best_of_several_rates_and_seeds_by_validation_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(tmp_path / "a")
    trials = finished(tmp_path / "a")
    said = capsys.readouterr().out
    assert [x["factor"] for x in trials[:3]] == [1.0, 1 / 3, 3.0]
    assert [x["seed"] for x in trials] == [0, 0, 0, 1]
    assert trials[3]["factor"] == max(trials[:3], key=lambda x: x["rank"])["factor"]
    best = max(trials, key=lambda x: x["rank"])
    assert len({x["figure"] for x in trials}) > 1  # there was something to choose
    assert result.metrics["val"]["accuracy"] == best["figure"]
    folder = tmp_path / "a" / "trials" / str(trials.index(best) + 1)
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    assert settings["optim"]["lr"] == pytest.approx(best["factor"] * 1e-3)
    measured = result.metrics["test"]["accuracy"]
    assert fusionzoo.evaluate(result, DATA)["accuracy"] == pytest.approx(measured)
    models = [x.parent.name for x in (tmp_path / "a" / "trials").glob("*/model")]
    assert models == [str(trials.index(best) + 1)]  # the others' weights are gone
    assert said.count("Test split") == 1
    assert said.count("(kept)") == 1


def test_trials_that_are_stopped_go_on_to_the_same_bits(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", 3)
    kill_in(2, lambda: run(tmp_path / "a", 3))
    assert len(finished(tmp_path / "a")) == 1
    with pytest.raises(FusionZooError, match="holds a run: resume= continues it"):
        run(tmp_path / "a", 3)
    changed = {**DATA, "samples": 310}
    with pytest.raises(FusionZooError, match="was trained on data with other"):
        run(tmp_path / "a", 3, data=changed, resume=True)
    result = run(tmp_path / "a", 3, resume="auto")
    assert result.metrics["test"] == whole.metrics["test"]
    for name, x in whole.model.state_dict().items():
        assert torch.equal(x, result.model.state_dict()[name]), name


def test_a_single_training_is_not_taken_for_trials(tmp_path: Path) -> None:
    run(tmp_path, 1)
    with pytest.raises(FusionZooError, match="holds no trials to go on with"):
        run(tmp_path, 2, resume=True)


def trial(factor: float, figure: float, seconds: float = 10) -> Trial:
    return Trial(
        factor=factor, seed=0, rank=[figure, 0.0], figure=figure, best_epoch=1, seconds=seconds
    )


def opened(folder: Path, *trials: Trial, **optim: Any) -> Trials:
    cfg = RunConfig(train=TrainConfig(trials=9, time_limit=60), optim=OptimConfig(**optim))
    result = Trials(folder, cfg, {}, World(), resume=False)
    result.finished += trials
    return result


def test_a_trial_scales_every_rate_and_begins_if_the_longest_would_fit(tmp_path: Path) -> None:
    rates: dict[str, Any] = {"lr": 0.1, "modality_lr": {"image": 0.4}}
    tried = opened(tmp_path, trial(1, 0.5), trial(1 / 3, 0.6), trial(3, 0.7), **rates)
    optim = tried.settings().optim
    assert optim.lr == pytest.approx(0.3)
    assert optim.modality_lr == pytest.approx({"image": 1.2})
    assert tried.settings().seed == 1
    assert tried.settings().train == TrainConfig(trials=1, time_limit=60)
    assert opened(tmp_path).obstacle(-1) == ""
    tried = opened(tmp_path, trial(1, 0.5, seconds=20), trial(1 / 3, 0.6, seconds=10))
    assert tried.obstacle(21) == ""
    assert tried.obstacle(19) == (
        f"time for 2 of 9 trials: --resume --out {tmp_path} goes on with the others"
    )


def test_a_trial_has_the_clock_and_the_folder_of_its_run(tmp_path: Path) -> None:
    whole = Tracker(World())
    whole.folder = tmp_path
    whole._created -= 100
    own = Tracker(World(), whole)
    assert own.is_late(99)
    assert not own.is_late(200)
    assert own.how_to_go_on == f"--resume --out {tmp_path} goes on"
