"""train.py, as a user runs it: it trains, reports, stops, resumes, and says what is wrong."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import fusionzoo
from fusionzoo import create_dataset
from fusionzoo.config import RunConfig, read_yaml
from fusionzoo.encoders.vector import VectorMLP
from fusionzoo.errors import FusionZooError
from fusionzoo.ground.progress import LogBar
from fusionzoo.machine.distributed import World
from fusionzoo.scripts.embed import main as embed
from fusionzoo.scripts.train import main as train
from fusionzoo.training import checkpoint, report, run_folder
from fusionzoo.training.checkpoint import State
from fusionzoo.training.report import next_steps, show_data
from fusionzoo.training.tracker import Tracker
from helpers.trainings import assert_same_run, weights

ROOT = Path(__file__).parents[2]
QUICK = ["--data.name", "interactions", "--data.samples", "300", "--log", "none"]


def flags(out: Path, *more: str) -> list[str]:
    return [*QUICK, "--out", str(out), *more]


def script(*args: str, **settings: Any) -> subprocess.Popen[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *args]
    return subprocess.Popen(
        command, cwd=ROOT, env=env, text=True, stderr=subprocess.PIPE, **settings
    )


def finished(process: subprocess.Popen[str]) -> bool:
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said[-8000:]
    return True


def wait_for(running: subprocess.Popen[str], out: Path, lines: int = 1) -> None:
    """Wait until the run has logged so many lines."""
    log = out / "metrics.jsonl"
    while running.poll() is None and (not log.is_file() or log.read_text().count("\n") < lines):
        time.sleep(0.01)
    assert running.poll() is None, "the run ended before it could be stopped"


def results_of(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "metrics.json").read_text())
    return found


def test_a_run_leaves_what_the_design_promises(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "a"
    # Each epoch counts as the best so far: which one really is depends on the CPU.
    monkeypatch.setattr(State, "is_best", lambda *_: True)
    assert train([*QUICK[:-2], "--out", str(out), "--train.epochs", "8", "--optim.lr", "5e-3"]) == 0
    for name in ("config.yaml", "metrics.jsonl", "model/config.json", "model/model.safetensors"):
        assert (out / name).is_file(), name
    saved = {x.name for x in (out / "checkpoints").iterdir()}
    assert saved == {"best.pt", "best-1.pt", "last.pt", "last-1.pt"}
    results = results_of(out)
    assert set(results) >= {"train", "val", "test", "unimodal", "throughput", "environment"}
    assert results["best_epoch"] == 8
    alone = [figures["accuracy"] for figures in results["unimodal"].values()]
    assert results["test"]["accuracy"] > max(alone) + 0.2  # xor: 1.0, and chance from one of them
    gain = results["gain"]
    assert gain["over"] in ("a alone", "b alone")
    assert gain["gain"] == pytest.approx(results["test"]["accuracy"] - max(alone))
    assert 0 < gain["low"] < gain["gain"] < gain["high"]
    assert gain["won"] - gain["lost"] == round(gain["gain"] * gain["samples"])
    shown = capsys.readouterr().out
    parts = (
        "a alone",
        "fusion: gmu",
        "gain over",
        f"gain    {gain['words']}\n",
        "fusionzoo predict ",
        "Learning-rate groups",
    )
    parts += ("the best epoch is the last: --train.epochs 16 may be better",)
    assert [part for part in parts if part not in shown] == []


def test_a_model_that_could_not_be_loaded_again_is_refused_before_its_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    build, sizes = VectorMLP.__init__, itertools.count(1)

    @functools.wraps(build)
    def another_each_time(encoder: VectorMLP, **settings: Any) -> None:
        build(encoder, **settings)
        encoder.extra = nn.Linear(next(sizes), 2)

    run = flags(tmp_path / "a", "--train.epochs", "1")
    with monkeypatch.context() as patch:
        patch.setattr(VectorMLP, "__init__", another_each_time)
        assert train(run) == 2
    told = capsys.readouterr().err
    assert "so the run is not started: model.safetensors: Error(s) in loading" in told
    assert {x.name for x in (tmp_path / "a").iterdir()} <= {"config.yaml", "groups.json", "lock"}
    assert train(run) == 0  # the folder holds no run


def test_loading_the_model_once_changes_no_bit_of_a_run_and_is_not_done_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ["--train.epochs", "2"]
    assert train(flags(tmp_path / "checked", *run)) == 0
    monkeypatch.setattr(report, "check_saving", lambda *_: None)
    assert train(flags(tmp_path / "unchecked", *run)) == 0
    assert_same_run(tmp_path / "checked", tmp_path / "unchecked")
    monkeypatch.setattr(report, "check_saving", lambda *_: pytest.fail("loaded again"))
    assert train(flags(tmp_path / "checked", *run, "--train.epochs", "3", "--resume")) == 0


@pytest.mark.parametrize(
    ("pause", "written"), [(math.inf, [(0, "last"), (1, "best"), (4, "last")]), (0, None)]
)
def test_checkpoints_are_written_at_the_end_and_where_writing_takes_little_of_the_time(
    pause: float,
    written: list[tuple[int, str]] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(State, "is_best", lambda state, *_: not state.best)  # the first epoch
    monkeypatch.setattr(checkpoint, "PAUSE", pause)
    saved, write = [], checkpoint.write

    def count(contents: Any, path: Path, keep: int) -> None:
        saved.append((contents["state"]["evaluated"], path.stem))
        write(contents, path, keep)

    monkeypatch.setattr(checkpoint, "write", count)
    assert train(flags(tmp_path / "a", "--train.epochs", "4")) == 0
    each = [(0, "last"), (1, "best"), *((epoch, "last") for epoch in range(1, 5))]
    assert saved == (written or each)
    best = run_folder.read(tmp_path / "a" / "checkpoints" / "best.pt")
    assert best["state"]["best"]["epoch"] == 1
    fusion = fusionzoo.load(tmp_path / "a").fusion  # with that epoch's weights, not the last one's
    weights = best["objective"]
    assert all(torch.equal(x, weights[f"model.fusion.{n}"]) for n, x in fusion.named_parameters())


def test_the_data_summary_is_printed_first_and_by_one_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        f"{n}, {split},{n % 2},word {n}, x" for n, split in enumerate(["train", "val", "test"] * 8)
    ]
    (tmp_path / "m.csv").write_text("\n".join(["id , Split,target, text, scanner", *rows]))
    run = [*TEXT, "--data.root", str(tmp_path / "m.csv"), "--preset", "none"]
    run += ["--log", "none", "--train.epochs", "1"]
    assert train([*run, "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[:5] == [
        f"data      {tmp_path / 'm.csv'}: 24 samples",
        "splits    train 8, val 8, test 8 (column ' Split')",
        "classes   2: 0 12, 1 12",
        "have      text 24",
        "unused    column ' scanner'",
    ]
    show_data(create_dataset("digits", samples=60), [], Tracker(World(rank=1, size=2)))
    assert capsys.readouterr().out == ""


RECIPE = """
data: {name: interactions, samples: 300, num_modalities: 3, task: redundant}
log: none
balance: modality_dropout
balance_settings: {modality_dropout: {rate: {a: 0.1, c: 0.2}}}
encoders: {c: {name: vector/mlp, dim: 16}, a: {name: vector/mlp, dim: 24}}
optim:
  modality_lr: {c: 1e-3, a: 2e-3}
  unfreeze_at_epoch: {c: 1}
train: {epochs: 1}
"""


def test_a_recipe_serves_fewer_modalities_than_it_knows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE)
    run = ["--config", str(tmp_path / "r.yaml"), "--data.modalities", "a,b"]
    assert train([*run, "--out", str(tmp_path / "a")]) == 0
    said = next(x for x in capsys.readouterr().out.splitlines() if "unused settings" in x)
    for key in ("encoders.c", "optim.modality_lr.c", "optim.unfreeze_at_epoch.c"):
        assert f"--{key}" in said
    assert "--balance_settings.modality_dropout.rate.c" in said
    assert ".a" not in said
    cfg = read_yaml(tmp_path / "a" / "config.yaml")
    assert cfg["encoders"]["a"]["dim"] == 24
    assert cfg["optim"]["modality_lr"] == {"a": 2e-3}
    assert train([*run, "--out", str(tmp_path / "b"), "--encoders.d.name", "vector/mlp"]) == 2
    assert "--encoders.d: the data has no modality 'd'" in capsys.readouterr().err


def test_a_seed_fixes_a_run_and_workers_do_not_change_it(tmp_path: Path) -> None:
    variants = {
        "first": ["--seed", "1"],
        "again": ["--seed", "1", "--train.num_workers", "2"],
        "other": ["--seed", "2"],
    }
    for name, settings in variants.items():
        assert train(flags(tmp_path / name, "--train.epochs", "2", *settings)) == 0
    assert_same_run(tmp_path / "first", tmp_path / "again")
    first, other = (weights(tmp_path / x) for x in ("first", "other"))
    assert any(not torch.equal(x, other[name]) for name, x in first.items())


KILLED = [pytest.param(x, signal.SIGKILL, marks=pytest.mark.slow) for x in ("qmf", "mmin")]
KILLED += [pytest.param("late_stacking", signal.SIGKILL, marks=pytest.mark.slow)]


@pytest.mark.parametrize(
    ("fusion", "how"), [("gmu", signal.SIGKILL), ("gmu", signal.SIGTERM), *KILLED]
)
def test_a_run_that_is_killed_or_asked_to_stop_resumes_bit_for_bit(
    fusion: str, how: signal.Signals, tmp_path: Path
) -> None:
    long = ["--train.epochs", "24", "--train.save_every", "3", "--train.accumulate", "2"]
    long += ["--fusion.name", fusion, "--data.missing", "0.2"]
    assert train(flags(tmp_path / "whole", *long)) == 0
    cut = tmp_path / "cut"
    running = script("train.py", *flags(cut, *long), stdout=subprocess.PIPE)
    wait_for(running, cut, 12)
    running.send_signal(how)
    shown, _ = running.communicate(timeout=60)
    if how == signal.SIGTERM:
        assert running.returncode == 75
        assert "--resume" in shown
    assert not (cut / "metrics.json").exists()
    assert train(["--resume", "--out", str(cut)]) == 0
    assert_same_run(tmp_path / "whole", cut)


DEMANDING = "--data.name digits --data.samples 120 --data.missing 0.3 --fusion.name mbt --log none"
DEMANDING += " --balance ogm_ge,modality_dropout --train.amp bf16 --optim.modality_lr.text 2e-5"
DEMANDING += " --train.ema 0.999 --train.accumulate 4 --train.batch_size 4 --train.epochs 4"
for modality in ("image", "audio"):  # narrow: a CPU takes its time with bfloat16
    narrow = f" --encoders.{modality}.channels [8,8,16,16] --encoders.{modality}.stem_width 8"
    DEMANDING += narrow


@pytest.mark.parametrize(("how", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_run_that_is_stopped_before_its_first_step_is_gone_on_with(
    how: signal.Signals, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = flags(tmp_path / "a", "--train.epochs", "1")
    heed = functools.partial(
        signal.signal, how, signal.SIG_DFL
    )  # of a suite in the background it is ignored
    running = script("train.py", *words, preexec_fn=heed)
    while running.poll() is None and not (tmp_path / "a" / "config.yaml").exists():
        time.sleep(0.002)
    running.send_signal(how)
    _, said = running.communicate(timeout=60)
    assert running.returncode == code
    assert said.endswith("goes on, with --resume auto and the run's folder as --out\n")
    assert train(["--resume", "--out", str(tmp_path / "a")]) == 0
    assert "has no checkpoint yet: this run starts from the beginning" in capsys.readouterr().out
    assert train(["--resume", "--out", str(tmp_path / "b")]) == 2


@pytest.mark.slow
def test_a_killed_run_of_two_processes_resumes_bit_for_bit(tmp_path: Path) -> None:
    long = [*DEMANDING.split(), "--train.save_every", "4", "--dist.nproc", "2"]
    long += ["--train.log_every", "1"]
    assert finished(script("train.py", *flags(tmp_path / "whole", *long)))
    cut = tmp_path / "cut"
    running = script("train.py", *flags(cut, *long), start_new_session=True)
    wait_for(running, cut, 6)
    os.killpg(running.pid, signal.SIGKILL)
    running.communicate()
    assert finished(script("train.py", "--resume", "--out", str(cut), "--dist.nproc", "2"))
    assert_same_run(tmp_path / "whole", cut)


def test_the_unimodal_heads_do_not_change_the_fusion(tmp_path: Path) -> None:
    for heads in ("true", "false"):
        assert train(flags(tmp_path / heads, "--train.epochs", "2", "--train.unimodal", heads)) == 0
    ours, theirs = weights(tmp_path / "true"), weights(tmp_path / "false")
    assert all(torch.equal(tensor, ours[name]) for name, tensor in theirs.items())


def test_a_run_that_may_resume_starts_once_goes_on_and_is_reported_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = flags(tmp_path / "a", "--resume", "auto", "--train.epochs")
    assert train([*run, "1"]) == 0
    first = (tmp_path / "a" / "metrics.jsonl").read_text()
    assert train([*run, "2"]) == 0
    again = (tmp_path / "a" / "metrics.jsonl").read_text()
    assert again.startswith(first)
    assert len(again) > len(first)
    before = results_of(tmp_path / "a")["test"]
    assert train(["--resume", "--out", str(tmp_path / "a")]) == 0
    assert results_of(tmp_path / "a")["test"] == before
    assert train([*QUICK, "--resume", "auto"]) == 2
    assert "--resume needs --out" in capsys.readouterr().err


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--"]


@pytest.mark.slow
def test_what_asks_the_launcher_to_stop_reaches_its_processes(tmp_path: Path) -> None:
    run = flags(tmp_path, "--train.epochs", "40", "--dist.nproc", "2")
    running = script("train.py", *run, stdout=subprocess.DEVNULL)
    wait_for(running, tmp_path)
    running.send_signal(signal.SIGUSR1)  # tests/helpers/faults.py sends SIGTERM
    _, said = running.communicate(timeout=100)
    assert running.returncode == 75, said[-8000:]
    last = torch.load(tmp_path / "checkpoints" / "last.pt", weights_only=True)
    assert last["state"]["step"] > 0
    assert not (tmp_path / "metrics.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("start", [["train.py", "--dist.nproc", "2"], [*TORCHRUN, "train.py"]])
def test_processes_save_and_end_when_their_launcher_is_killed(
    start: list[str], tmp_path: Path
) -> None:
    split = start.index("train.py") + 1
    run = [*start[:split], *flags(tmp_path, "--train.epochs", "4000"), *start[split:]]
    running = script(*run, stdout=subprocess.DEVNULL)
    wait_for(running, tmp_path)
    assert len(json.loads((tmp_path / "lock.json").read_text())["processes"]) == 2
    running.kill()
    _, said = running.communicate(timeout=100)  # until the last process has ended
    assert f"the launcher (process {running.pid}) is gone: stopping" in said
    last = torch.load(tmp_path / "checkpoints" / "last.pt", weights_only=True)
    assert last["state"]["step"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "start", [[*TORCHRUN, "train.py"], ["-m", "fusionzoo", "train", "--dist.nproc", "2"]]
)
def test_two_processes_train_and_one_of_them_writes(start: list[str], tmp_path: Path) -> None:
    quick = ["--train.epochs", "12", "--optim.lr", "5e-3", "--train.batch_size"]
    assert finished(script(*start, *flags(tmp_path / "two", *quick, "16")))
    two = results_of(tmp_path / "two")
    assert two["environment"]["processes"] == 2
    assert two["test"]["accuracy"] > 0.9
    assert train(flags(tmp_path / "one", *quick, "32")) == 0
    one = results_of(tmp_path / "one")
    assert abs(one["test"]["accuracy"] - two["test"]["accuracy"]) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("method", ["tcp://127.0.0.1:29571", "file"])
def test_processes_meet_by_address_or_file(method: str, tmp_path: Path) -> None:
    where = method if method != "file" else f"file://{tmp_path}/meet"
    ranks = [
        script(
            "train.py",
            *flags(tmp_path / "run", "--train.epochs", "1", "--dist.init_method", where),
            *["--dist.rank", str(rank), "--dist.world_size", "2", "--dist.timeout", "60"],
        )
        for rank in range(2)
    ]
    assert all(map(finished, ranks))
    assert (tmp_path / "run" / "metrics.json").is_file()


@pytest.mark.slow
def test_two_processes_embed_the_same_rows_as_one(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(flags(run, "--train.epochs", "1")) == 0
    assert embed(["--model", str(run), "--out", str(tmp_path / "one.parquet")]) == 0
    command = ["embed.py", "--model", str(run), "--out", str(tmp_path / "two.parquet")]
    assert finished(script(*TORCHRUN, *command))
    one, two = (pq.read_table(tmp_path / f"{name}.parquet") for name in ("one", "two"))
    assert len(one) == 300
    assert two["id"].equals(one["id"])
    for name in ("fused", "a"):
        found, wanted = (torch.tensor(table[name].to_pylist()) for table in (two, one))
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_finished_run_is_never_overwritten_unasked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = flags(tmp_path / "a", "--train.epochs", "1")
    assert train(run) == 0
    assert train(run) == 2
    assert "holds a run: --resume continues it; else remove it" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert train([*QUICK, "--train.epochs", "1"]) == 0
    assert {x.name for x in (tmp_path / "runs").iterdir()} == {"interactions", "interactions-2"}


MANIFEST = "id,split,target,text\n1,train,x,one\n2,train,y,two\n3,val,x,three\n4,test,y,four\n"
TEXT = ["--data.name", "manifest", "--encoders.text.name", "chars"]


MISTAKES = [
    ("--fusion.name concta", "unknown fusion 'concta'. Did you mean 'concat'?"),
    ("--fusion.nam concat", "has no setting 'nam'. Did you mean 'name'?"),
    ("--train.epoch 3", "unknown setting --train.epoch. Did you mean '--train.epochs'"),
    ("--fusion.ranks 3", "fusion 'gmu' has no setting 'ranks'"),
    ("--data.columns.text txt", "no column 'txt' for --data.columns.text. Did you mean 'text'"),
    ("--encoders.txt.name chars", "the data has no modality 'txt'. Did you mean 'text'?"),
    ("--optim.modality_lr.image 1", "the model has no modality 'image'"),
    ("--data.name manifst", "'manifst' is neither a file, nor a folder, nor the name of a data"),
    ("--device gpu", "--device 'gpu' is none"),
    ("--dist.strategy dp", "splits a batch over several GPUs"),
]
WRONG_TABLES = [
    ("3,val,x", "3,val,z", "row 4, sample '3' (split 'val') has the label 'z'"),
    ("test,y", "train,y", "split 'test' is empty"),
    ("target", "label", "has no column 'target': --target names the"),
    ("text\n1,train,x,one", "image\n1,train,x,one.png", "row 2, sample '1': image"),
]


@pytest.mark.parametrize(
    ("manifest", "args", "says"),
    [(MANIFEST, args, says) for args, says in MISTAKES]
    + [(MANIFEST.replace(old, new), "", says) for old, new, says in WRONG_TABLES],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    manifest: str, args: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m.csv").write_text(manifest)
    root = ["--data.root", str(tmp_path / "m.csv"), "--out", str(tmp_path / "out")]
    assert train([*TEXT, *root, *args.split()]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert says in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


SETTINGS = [
    "--optim.name sgd --optim.lr 0.1",
    "--train.group_by length",
    "--train.group_by target",
    "--train.max_steps 3",
    "--train.patience 1",
    "--objective.label_smoothing 0.1 --optim.schedule step",
    "--encoders.a.freeze all --encoders.a.init orthogonal",
    "--train.log_every 1 --optim.clip null",
    "--optim.name lion --optim.modality_schedule.a linear --optim.layer_decay.fusion 0.5",
    "--optim.schedule onecycle --encoders.b.freeze all_but_last_1",
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_each_setting_trains(settings: str, tmp_path: Path) -> None:
    assert train(flags(tmp_path / "a", "--train.epochs", "1", *settings.split())) == 0
    results = json.loads((tmp_path / "a" / "metrics.json").read_text())
    assert 0 <= results["test"]["accuracy"] <= 1


def test_a_run_that_failed_before_its_first_step_leaves_its_folder_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mistake found late (here: when the first step is made) does not block --out."""
    run = flags(tmp_path / "a", "--train.epochs", "1")

    def fail(*_: object, **__: object) -> None:
        raise FusionZooError("failed before step 1")

    with monkeypatch.context() as patch:
        patch.setattr("fusionzoo.training.trainer.Trainer.step", fail)
        assert train(run) == 2
    assert (tmp_path / "a" / "checkpoints" / "last.pt").is_file()
    assert train(run) == 0


# ---- what a run says at its end


FILE = {"name": "manifest", "root": "my table.csv"}
STORED = {"name": "manifest", "root": "/cache/tables/data-0123456789ab.parquet"}


@pytest.mark.parametrize(
    ("data", "first"),
    [
        (FILE, "fusionzoo predict runs/a 'my table.csv' --out predictions.csv"),
        ({"name": "digits"}, "fusionzoo predict runs/a --split test --out predictions.csv"),
        (STORED, 'fusionzoo.predict("runs/a", data)'),
        ({"name": "in_memory"}, 'fusionzoo.predict("runs/a", data)'),
    ],
)
def test_the_next_steps_name_the_users_data_as_they_were_given(
    data: dict[str, Any], first: str
) -> None:
    steps = next_steps(Path("runs/a"), RunConfig(data=data), has_target=True)
    assert steps[0] == first
    assert len(steps) == 4
    alone = next_steps(Path("runs/a"), RunConfig(data=data), has_target=False)
    assert alone == steps[3:]
    assert "embed" in alone[0]


def test_plugins_are_among_the_next_steps() -> None:
    steps = next_steps(Path("runs/a"), RunConfig(data=FILE, plugins="mine.py"), has_target=True)
    assert all(step.endswith(" --plugins mine.py") for step in steps)


def test_progress_says_loss_rate_epoch_and_metric() -> None:
    tracker = Tracker(World())
    with tracker.progress(10, 0):
        assert tracker.bar is not None
        tracker.log(1, "step", {"loss": 0.5, "lr": {"image": 1e-3, "text": 1e-3}})
        assert tracker.bar.postfix == "loss 0.500, lr 1.0e-03"
        val: dict[str, Any] = {"loss": 0.4, "accuracy": 0.75, "unimodal": {}}
        tasks: Any = SimpleNamespace(leading="accuracy", higher=True)
        tracker.log_epoch(State(evaluated=2), 0.5, val, tasks)
        assert tracker.bar.postfix.endswith("lr 1.0e-03, epoch 2, val accuracy 0.750")


def test_progress_ends_with_a_training_that_stopped_early(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(LogBar, "every", 0)
    tracker = Tracker(World())
    with tracker.progress(10, 0):
        tracker.say("epoch 1")
        assert "0 of 10 steps" in capsys.readouterr().err
    tracker.say("refit")
    assert capsys.readouterr().err == ""


def test_of_many_epochs_the_better_and_every_tenth_have_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--data.name", "interactions", "--data.samples", "60", "--train.epochs", "31"]
    assert train([*flags, "--preset", "none", "--out", str(tmp_path)]) == 0
    shown = {int(x) for x in re.findall(r"^epoch +(\d+)", capsys.readouterr().out, re.MULTILINE)}
    events = [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    scores = {x["epoch"]: x["val"]["accuracy"] for x in events if x["event"] == "epoch"}
    better = {n for n, x in scores.items() if x > max([-1, *(scores[m] for m in range(1, n))])}
    assert len(scores) == 31
    assert better | {10, 20, 30} <= shown < {*scores}
