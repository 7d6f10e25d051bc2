"""`--speed auto`: a default stays unless another value wins by a margin; the choice is stored."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fusionzoo
from fusionzoo.benchmark.bench import open_bench
from fusionzoo.benchmark.prepare import build_encoders, choose_workers
from fusionzoo.config import BenchmarkConfig, RunConfig, from_tree
from fusionzoo.distributed import World
from fusionzoo.errors import FusionZooError
from fusionzoo.training import speed
from fusionzoo.training.speed import (
    CHOSEN,
    Option,
    Settings,
    SpeedChoice,
    TimedSetting,
    Timing,
    choose,
    worker_options,
)

DEFAULTS: Settings = {"amp": "none", "num_workers": 0}
OPTIONS = [Option("amp", ("bf16",)), Option("num_workers", (1, 2, 4))]


class Machine:
    """Timings by settings, and a clock that advances by what each measurement takes."""

    def __init__(
        self, cost: Callable[[Settings], float], once: float = 0.0, takes: float = 1.0
    ) -> None:
        self.cost, self.once, self.takes = cost, once, takes
        self.now = 0.0
        self.measured: list[Settings] = []

    def __call__(self, settings: Settings) -> Timing:
        self.measured.append(dict(settings))
        self.now += self.takes
        once = self.once if settings != DEFAULTS else 0.0
        return Timing(self.cost(settings), once)

    def choose(self, samples: int = 1_000_000, options: Any = OPTIONS) -> SpeedChoice:
        return choose(DEFAULTS, options, self, samples=samples, clock=lambda: self.now)


def test_what_saves_more_than_the_margin_is_taken_and_combined() -> None:
    def cost(settings: Settings) -> float:
        precision = 0.5 if settings["amp"] == "bf16" else 1.0
        return precision * {0: 1.0, 1: 0.7, 2: 0.5, 4: 0.48}[settings["num_workers"]]

    machine = Machine(cost)
    choice = machine.choose()
    assert choice.settings == {"amp": "bf16", "num_workers": 2}
    notes = {(trial.setting, trial.value): trial.note for trial in choice.trials}
    assert notes["amp", "bf16"] == notes["num_workers", 2] == CHOSEN
    assert notes["num_workers", 4] == "does not save 10%"
    assert choice.seconds == machine.now


@pytest.mark.parametrize("saved", [-0.5, 0.0, 0.05, 0.099])
def test_the_default_stays_without_a_clear_winner(saved: float) -> None:
    machine = Machine(lambda settings: 1.0 if settings == DEFAULTS else 1.0 - saved)
    choice = machine.choose()
    assert choice.settings == DEFAULTS
    assert [trial.value for trial in choice.trials] == [None, "bf16", 1]  # 2 and 4 are left out


def test_a_winner_must_win_again_after_the_default_was_measured_again() -> None:
    times = iter([1.0, 1.0, 0.5, 1.0, 1.0])  # a lucky measurement, not confirmed
    machine = Machine(lambda settings: next(times))
    choice = machine.choose(options=OPTIONS[:1])
    assert choice.settings == DEFAULTS
    assert choice.trials[-1].note == "does not save 10% in a second measurement"
    assert machine.measured[-2:] == [DEFAULTS, {**DEFAULTS, "amp": "bf16"}]


def test_what_is_paid_once_must_pay_off_within_the_work() -> None:
    def machine() -> Machine:
        return Machine(lambda s: 1.0 if s == DEFAULTS else 0.5, once=100.0)

    assert machine().choose(samples=230, options=OPTIONS[:1]).settings == DEFAULTS
    assert machine().choose(samples=400, options=OPTIONS[:1]).settings["amp"] == "bf16"


def test_measuring_takes_no_more_than_its_share_and_a_minute() -> None:
    def cost(settings: Settings) -> float:
        return 1.0 / (1 + settings["num_workers"])

    def machine(**options: Any) -> Machine:
        return Machine(cost, **options)

    values = [Option("num_workers", tuple(range(1, 100)))]
    short = machine(takes=0.1)
    choice = short.choose(samples=10, options=values)
    assert choice.settings == DEFAULTS
    assert {t.note for t in choice.trials[1:]} == {"no time to measure it"}
    assert len(short.measured) == 2
    bounded = machine(takes=2.0).choose(samples=1000, options=values)
    assert bounded.settings["num_workers"] > 1
    assert bounded.seconds <= 50 + 3 * 2
    assert machine(takes=2.0).choose(samples=10**9, options=values).seconds <= 60 + 3 * 2
    slow = machine().choose(samples=200, options=[Option("num_workers", (1,), takes=30.0)])
    assert slow.trials[-1].note == "no time to measure it"


@pytest.mark.parametrize(
    ("error", "note"),
    [
        (torch.OutOfMemoryError("no"), "out of memory"),
        (RuntimeError("not\nimplemented"), "does not work here: not implemented"),
        (FusionZooError("bad"), "does not work here: bad"),
    ],
)
def test_what_fails_is_not_chosen_and_said(error: Exception, note: str) -> None:
    def cost(settings: Settings) -> float:
        if settings["amp"] == "bf16":
            raise error
        return 1.0 / (1 + settings["num_workers"])

    choice = Machine(cost).choose()
    assert choice.settings == {"amp": "none", "num_workers": 4}
    assert choice.trials[1] == TimedSetting("amp", "bf16", None, note)
    assert SpeedChoice.from_record(json.loads(json.dumps(choice.record))) == choice


def test_what_the_user_set_is_not_measured() -> None:
    assert worker_options(0, 0, World()) == []
    assert worker_options(None, 0, World())[0].values[0] == 1
    cfg = from_tree(fusionzoo.config.PredictConfig, {"batch_size": 10, "num_workers": 0})
    model = fusionzoo.create_model("gmu", {"text": "chars"}, 2, dim=8)
    settings = [option.setting for option in speed.options_for(cfg, model, 0, World())]
    assert settings == ["amp", "compile"]


# ---- in a run


SETTINGS: dict[str, Any] = {
    "data": {"name": "interactions", "samples": 60, "width": 4},
    "fusion": {"name": "concat", "dim": 8, "hidden": []},
    "train": {"epochs": 1, "batch_size": 12},
    "log": "none",
    "device": "cpu",
}
IMAGES: dict[str, Any] = {
    **SETTINGS,
    "data": {"name": "digits", "samples": 60, "modalities": "image,text"},
    "encoders": {
        "image": {"name": "timm/test_resnet", "pretrained": False, "size": 32},
        "text": {"name": "chars", "dim": 16, "num_layers": 1},
    },
}


def forced(settings: Settings) -> Callable[..., SpeedChoice]:
    """A choice without a measurement."""

    def chosen(defaults: Settings, *_: Any, **__: Any) -> SpeedChoice:
        trials = [
            TimedSetting("", None, 10.0, "the defaults"),
            TimedSetting("amp", "bf16", 20.0, CHOSEN),
        ]
        return SpeedChoice({**defaults, **settings}, trials, 1.5)

    return chosen


def weights(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


def test_a_run_measures_stores_its_choice_and_trains_the_same_if_the_defaults_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fusionzoo.training.speed.SECONDS", 0.05)
    off = fusionzoo.train(config=SETTINGS, out=str(tmp_path / "off"))
    assert not (off.folder / "speed.json").exists()
    auto = fusionzoo.train(config=SETTINGS, out=str(tmp_path / "auto"), speed="auto")
    record = json.loads((auto.folder / "speed.json").read_text(encoding="utf-8"))
    assert record["trials"][0]["samples_per_second"] > 0
    # A run of a second leaves no time to measure more than the defaults.
    assert record["settings"] == {"channels_last": False, "amp": "none", "num_workers": 0}
    assert "--speed auto: the defaults stay" in capsys.readouterr().out
    assert weights(auto.folder) == weights(off.folder)
    assert "choose speed" in auto.metrics["throughput"]["seconds"]


def test_a_chosen_precision_is_said_applied_and_taken_again_on_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = {"amp": "bf16", "channels_last": True}
    monkeypatch.setattr(speed, "choose", forced(choice))
    run = fusionzoo.train(config=SETTINGS, out=str(tmp_path / "a"), speed="auto")
    said = capsys.readouterr().out
    assert "--speed auto: channels_last on, amp bf16 (20 samples/s; 10 with the defaults)" in said
    assert "bf16: matrix products and convolutions are computed in bfloat16" in said
    monkeypatch.undo()
    asked = {**SETTINGS, "train": {**SETTINGS["train"], **choice}}
    same = fusionzoo.train(config=asked, out=str(tmp_path / "b"))
    assert run.metrics["test"] == same.metrics["test"]

    def no_measuring(*_: Any, **__: Any) -> SpeedChoice:
        raise AssertionError("a resumed run measures nothing")

    monkeypatch.setattr(speed, "choose", no_measuring)
    fusionzoo.train(out=str(run.folder), resume=True, epochs=2)
    assert "--speed auto: as in speed.json" in capsys.readouterr().out


def test_embedding_and_prediction_take_the_choice_and_store_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = fusionzoo.train(config=SETTINGS, out=str(tmp_path / "run"))
    data = SETTINGS["data"]
    plain = fusionzoo.predict(run, data)
    monkeypatch.setattr(speed, "choose", forced({"batch_size": 16, "channels_last": True}))
    out = tmp_path / "p.csv"
    fusionzoo.predict(run, data, out=str(out), speed="auto")
    assert json.loads((tmp_path / "p.csv.speed.json").read_text())["settings"]["batch_size"] == 16
    assert "--speed auto: batch_size 16, channels_last on" in capsys.readouterr().out
    lines = out.read_text(encoding="utf-8").splitlines()
    assert [line.split(",")[0].strip('"') for line in lines[1:]] == plain["id"].to_pylist()
    monkeypatch.setattr(speed, "choose", forced({"amp": "bf16"}))
    fusionzoo.embed(run, data, out=str(tmp_path / "e.parquet"), speed="auto")
    assert (tmp_path / "e.parquet.speed.json").exists()
    assert "bf16: outputs are computed in bfloat16" in capsys.readouterr().out
    metrics = fusionzoo.evaluate(run, data, speed="auto")
    assert metrics["loss"] == pytest.approx(run.metrics["test"]["loss"], rel=0.1)


def test_a_benchmark_measures_loader_processes_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fusionzoo.training.speed.SECONDS", 0.05)
    tree = {"data": SETTINGS["data"], "speed": "auto", "out": str(tmp_path), "device": "cpu"}
    bench, dataset = open_bench(from_tree(BenchmarkConfig, tree))
    encoders = build_encoders(bench.cfg, dataset)
    chosen = choose_workers(bench, dataset, encoders)
    record = json.loads((tmp_path / "speed.json").read_text(encoding="utf-8"))
    assert chosen.cfg.num_workers == record["settings"]["num_workers"]
    assert record["settings"].keys() == {"num_workers"}
    assert "--speed auto" in chosen.notes[-1]
    off = replace(bench, cfg=replace(bench.cfg, speed="off"))
    assert choose_workers(off, dataset, encoders) is off


def test_weights_that_are_shared_out_are_refused() -> None:
    cfg = from_tree(RunConfig, {**SETTINGS, "speed": "auto", "dist": {"strategy": "fsdp"}})

    class Sharded:
        world = World()

    trainer: Any = Sharded()
    trainer.cfg = cfg
    with pytest.raises(FusionZooError, match="fsdp shards: --speed off"):
        speed.choose_for_training(trainer, {}, Path(), resume=False)


@pytest.mark.slow
def test_a_real_probe_measures_every_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fusionzoo.training.speed.SECONDS", 0.2)
    long = {**IMAGES, "train": {**SETTINGS["train"], "epochs": 100_000, "max_steps": 50_000}}
    cfg = from_tree(RunConfig, {**long, "speed": "auto"})
    from fusionzoo.scripts import train

    world = World()
    tracker = train_tracker(world)
    from fusionzoo.inputs.data import open_dataset

    dataset = open_dataset(cfg.data, None)
    trainer, splits, _ = train.build_trainer(cfg, world, dataset, tracker)
    loaders = train.build_loaders(trainer, dataset, splits, tracker, resume=False)
    before = torch.get_rng_state()
    loaders, notes = speed.choose_for_training(trainer, loaders, tmp_path, resume=False)
    assert torch.equal(torch.get_rng_state(), before)
    record = json.loads((tmp_path / "speed.json").read_text(encoding="utf-8"))
    measured = {trial["setting"] for trial in record["trials"] if trial["samples_per_second"]}
    assert {"", "channels_last", "amp", "num_workers"} <= measured
    assert trainer.cfg.train.amp == record["settings"]["amp"]
    assert loaders["train"].num_workers == record["settings"]["num_workers"]
    assert all(p.grad is None for p in trainer.module.parameters())
    assert record["seconds"] < 60
    assert notes


def train_tracker(world: World) -> Any:
    from fusionzoo.training.tracker import Tracker

    return Tracker(world)
