"""What breaks a run, and what is left of it; test_interrupted_runs.py does it harder."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from fusionzoo.config import RunConfig, from_tree
from fusionzoo.datasets import PairedDataset
from fusionzoo.errors import FusionZooError
from fusionzoo.machine.distributed import World
from fusionzoo.scripts.train import main as train
from fusionzoo.structures import Batch
from fusionzoo.training import checkpoint, loaders, run_folder
from fusionzoo.training.checkpoint import State
from fusionzoo.training.report import out_of_memory
from fusionzoo.training.trainer import Trainer, first_cause
from helpers.strategies import make_batch, make_objective, make_trainer

QUICK = ["--data.name", "interactions", "--data.samples", "300", "--log", "none"]
QUICK += ["--train.epochs", "2", "--train.save_every", "3"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run, never changed: tests copy it."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    assert train([*QUICK, "--out", str(out), "--train.ema", "0.9"]) == 0
    return out


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    import shutil

    return Path(shutil.copytree(finished, tmp_path / "run"))


def flip(path: Path, where: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(where * (len(data) - 1))] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("where", [0.0, 0.3, 0.9, 0.999, 1.0])
def test_a_flipped_bit_is_found_and_the_checkpoint_before_it_goes_on(
    where: float, run: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(run / "checkpoints" / "last.pt", where)
    assert train(["--resume", "--out", str(run)]) == 0
    assert "last-1.pt is whole: step" in capsys.readouterr().out
    ours, theirs = (json.loads((x / "metrics.json").read_text()) for x in (run, finished))
    assert ours["test"] == theirs["test"]
    assert (run / "metrics.jsonl").read_text() == (finished / "metrics.jsonl").read_text()


@pytest.mark.parametrize("left", [0, 1, 100, 5000])
def test_a_cut_checkpoint_is_found(left: int, run: Path) -> None:
    last = run / "checkpoints" / "last.pt"
    last.write_bytes(last.read_bytes()[:left])
    with pytest.raises(FusionZooError, match=r"last.pt cannot be read: it is cut off"):
        run_folder.read(last)


def test_nothing_in_a_checkpoint_is_executed(run: Path) -> None:
    last = run / "checkpoints" / "last.pt"
    ran = run / "ran"

    class Bomb:
        def __reduce__(self) -> Any:
            return (Path.touch, (ran,))

    with last.open("wb+") as file:  # with a digest that is right
        torch.save({"state": Bomb()}, file)
        run_folder._seal(file)
    with pytest.raises(FusionZooError, match="cannot be read"):
        run_folder.read(last)
    assert not ran.exists()


def test_without_any_whole_checkpoint_the_run_says_so(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("last.pt", "last-1.pt"):
        flip(run / "checkpoints" / name, 0.5)
    assert train(["--resume", "--out", str(run)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert "its bytes have changed since it was written" in said


def test_a_disk_that_refuses_keeps_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, left = run_folder._seal, [3]

    def full(file: Any) -> None:
        left[0] -= 1
        if not left[0]:
            raise OSError(28, "No space left on device")
        real(file)

    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "_seal", full)
        assert train([*QUICK, "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "last.pt (the one before is kept; " in said
    assert "MB are free there): [Errno 28]" in said
    assert not list((tmp_path / "checkpoints").glob("*.partial"))
    assert train(["--resume", "--out", str(tmp_path)]) == 0


def test_two_runs_do_not_share_a_folder(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (run / "metrics.json").read_text()
    hold = "import sys, pathlib, fusionzoo.files as files\nwith files.locked("
    hold += "pathlib.Path(sys.argv[1]), 0, '', ''): print('held', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", hold, str(run / "lock")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        assert train([*QUICK, "--out", str(run)]) == 2
        assert train(["--resume", "--out", str(run)]) == 2
    said = capsys.readouterr().err
    assert said.count(f"error: another run is writing into {run} since 20") == 2
    who = f"(processes on {socket.gethostname()} {other.pid})"
    what_to_do = f"wait for it, end it by `kill {other.pid}` on {socket.gethostname()}, or take"
    assert said.count(f"{who}: {what_to_do} another --out\n") == 2
    assert (run / "metrics.json").read_text() == before
    assert train(["--resume", "--out", str(run)]) == 0


def test_a_folder_that_other_nodes_do_not_see_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = from_tree(RunConfig, {"data": {"name": "digits"}, "out": str(tmp_path / "a")})
    monkeypatch.setattr(run_folder, "PATIENCE", 0.0)
    with run_folder.claim_folder(cfg, World()) as (claimed, again):
        assert (claimed, again) == (tmp_path / "a", False)
    monkeypatch.setattr(run_folder, "LOCK", "elsewhere/lock")  # what another node's disk looks like
    monkeypatch.setattr(run_folder, "locked", lambda *_: nullcontext())
    cfg = from_tree(RunConfig, {"data": {"name": "digits"}, "out": str(tmp_path / "b")})
    match = r"process 0 does not see .*/b .* all nodes share"
    with pytest.raises(FusionZooError, match=match), run_folder.claim_folder(cfg, World()):
        pass


def test_a_resumed_run_takes_the_rates_and_decay_that_it_is_given_now(run: Path) -> None:
    later = ["--resume", "--out", str(run), "--optim.lr", "0.5", "--optim.weight_decay", "0.25"]
    assert train([*later, "--train.epochs", "4", "--optim.schedule", "constant"]) == 0
    saved = run_folder.read(run / "checkpoints" / "last.pt")["optimizer"]["param_groups"]
    assert {group["base_lr"] for group in saved} == {0.5}
    assert {group["weight_decay"] for group in saved} == {0.0, 0.25}


@pytest.mark.parametrize("other", ["--optim.name sgd", "--balance pmr", "--encoders.a.freeze all"])
def test_what_a_checkpoint_does_not_fit_is_one_line_and_leaves_the_run_as_it_was(
    other: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (run / "config.yaml").read_text()
    assert train(["--resume", "--out", str(run), "--train.epochs", "4", *other.split()]) == 2
    said = capsys.readouterr().err
    assert "last.pt belongs to another model: " in said
    assert said.count("\n") == 1
    assert (run / "config.yaml").read_text() == before


def test_nodes_that_hold_checkpoints_of_different_steps_do_not_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _ = small_trainer()
    checkpoint.save(tmp_path / "last.pt", trainer, State(step=7))
    monkeypatch.setattr(checkpoint, "gather", lambda step, world: [step, step - 4])
    with pytest.raises(FusionZooError, match=r"another file on another node: .* \[7, 3\]"):
        checkpoint.restore(tmp_path / "last.pt", trainer)


def poison(monkeypatch: pytest.MonkeyPatch, bad: set[str], visits: int) -> None:
    """Make these samples' values NaN, the first times that they are asked for."""
    real, left = PairedDataset.__getitem__, [visits]

    def get(self: PairedDataset, key: Any) -> Any:
        sample = real(self, key)
        if sample is None or sample.id not in bad or sample.split != "train" or not left[0]:
            return sample
        left[0] -= 1
        values = {**sample.values, "b": torch.full_like(sample.values["b"], torch.nan)}
        return sample._replace(values=values)

    monkeypatch.setattr(PairedDataset, "__getitem__", get)
    monkeypatch.setattr(loaders, "whole_batch", lambda *_: None)  # which asks once


@pytest.mark.parametrize(("visits", "skipped"), [(1, 1), (10**6, 2)])
def test_a_sample_that_is_not_finite_costs_a_step_an_epoch_and_is_named(
    visits: int,
    skipped: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    poison(monkeypatch, {"9"}, visits)
    assert train([*QUICK, "--train.floors", "true", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.count("skipped") == skipped and "linear on everything" in said
    assert "samples '9': the input of b is not finite" in said
    weights = run_folder.read(tmp_path / "checkpoints" / "last.pt")["objective"]
    assert all(tensor.isfinite().all() for tensor in weights.values())


def test_too_many_steps_in_a_row_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    poison(monkeypatch, {str(number) for number in range(300)}, visits=10**6)
    run = [*QUICK, "--out", str(tmp_path), "--train.max_bad_steps", "2"]
    assert train(run) == 2
    said = capsys.readouterr()
    assert said.out.count("skipped") == 3
    assert "error: 3 steps in a row were not finite (--train.max_bad_steps 2)" in said.err


def small_trainer() -> tuple[Trainer, Batch]:
    return make_trainer(make_objective()), make_batch([])


def test_the_first_layer_that_fails_is_named_and_no_weight_or_mode_changes() -> None:
    trainer, batch = small_trainer()
    encoder = trainer.module.model.encoders["image"]
    next(p for p in encoder.parameters() if p.ndim == 2).data[0, 0] = torch.inf
    before = {name: x.clone() for name, x in trainer.module.state_dict().items()}
    skipped = trainer.step([batch]).skipped
    assert skipped is not None
    assert "first in image: " in skipped
    for name, tensor in trainer.module.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0, equal_nan=True)
    trainer, batch = small_trainer()
    trainer.step([batch])
    trainer.module.model.encoders["image"].eval()  # as an encoder that rests
    before = {name: module.training for name, module in trainer.module.named_modules()}
    assert first_cause(trainer.module, [batch]) is None
    assert {name: module.training for name, module in trainer.module.named_modules()} == before


def test_running_statistics_forget_a_step_that_is_skipped() -> None:
    trainer, batch = small_trainer()
    norm = torch.nn.BatchNorm1d(6).double()
    trainer.module.model.encoders["image"].append = norm
    trainer.saved_buffers.buffers, trainer.saved_buffers.copies = (
        [norm.running_mean],
        [norm.running_mean.clone()],
    )  # type: ignore[union-attr, list-item]
    encode = type(trainer.module.model.encoders["image"]).encode

    def normed(inputs: Any) -> Any:
        made = encode(trainer.module.model.encoders["image"], inputs)
        return made._replace(pooled=norm(made.pooled * torch.nan))

    trainer.module.model.encoders["image"].encode = normed
    assert trainer.step([batch]).skipped is not None
    assert norm.running_mean is not None
    assert norm.running_mean.isfinite().all()


def test_out_of_memory_names_the_batch_and_the_largest_encoder() -> None:
    trainer, _ = small_trainer()
    said = str(out_of_memory(trainer))
    assert "--train.batch_size is 32" in said
    assert "the largest encoder is text with" in said


def test_steps_are_counted_anew_where_an_epoch_has_another_number() -> None:
    state = State(step=25, evaluated=2, epoch_steps=10)
    assert state.refit(10) == []
    assert state.refit(20) == ["an epoch had 10 steps and now has 20: going on at 50"]
    assert (state.step, state.epoch_steps) == (50, 20)


def test_a_run_cut_between_the_last_step_of_an_epoch_and_its_evaluation_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = [*QUICK, "--train.save_every", "1", "--out", str(tmp_path)]
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="cut"):
        patch.setattr("fusionzoo.training.fit.evaluate", cut)
        train(run)
    assert train(["--resume", "--out", str(tmp_path)]) == 0


def cut(*given: Any) -> Any:
    raise RuntimeError("cut")
