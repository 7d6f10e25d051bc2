"""Schedules: closed forms, each group's own, and nothing remembered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fusionzoo.config import OptimConfig
from fusionzoo.scripts.train import main as train
from fusionzoo.structures import Phase
from fusionzoo.training import fit
from fusionzoo.training.schedules import drops, phased, schedule
from fusionzoo.training.trainer import Trainer

WHOLE = [Phase("train", 1.0)]
QUICK = ["--data.name", "interactions", "--data.samples", "300", "--log", "none"]


def curve(steps: int = 100, **settings: object) -> list[float]:
    factor = schedule(OptimConfig(**settings), steps, 10)  # type: ignore[arg-type]
    return [factor(step, []) for step in range(steps)]


def test_schedules_warm_up_and_then_fall_as_named() -> None:
    step = curve(schedule="step", warmup=0.1, step_epochs=2, gamma=0.5)
    assert [step[i] for i in (0, 4, 9, 10, 19, 20, 39, 40, 99)] == pytest.approx(
        [0.1, 0.5, 1, 1, 1, 0.5, 0.5, 0.25, 0.0625]
    )
    cosine = curve(schedule="cosine", warmup=0.0)
    assert cosine[0] == 1
    assert cosine[50] == pytest.approx(0.5)
    assert 0 < cosine[99] < 0.001
    assert set(curve(schedule="constant", warmup=0)) == {1}
    linear = curve(schedule="linear", warmup=0.2)
    assert [linear[i] for i in (0, 19, 20, 60, 99)] == pytest.approx([0.05, 1, 1, 0.5, 0.0125])


@pytest.mark.parametrize("share", [0.05, 0.3])
def test_one_cycle_is_that_of_torch(share: float) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    cycle = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 1.0, total_steps=100, pct_start=share, cycle_momentum=False
    )
    wanted = []
    for _ in range(100):
        wanted.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if len(wanted) < 100:
            cycle.step()
    assert curve(schedule="onecycle", warmup=share) == pytest.approx(wanted)
    assert curve(schedule="onecycle", warmup=0.0)[0] == 1.0


def test_a_restarted_schedule_is_a_fresh_one_for_the_steps_that_remain_of_its_phase() -> None:
    cfg = OptimConfig(warmup=0.1, modality_schedule={"text": "linear"})
    plan = phased(cfg, WHOLE, 40, 5)
    for step in range(40):
        assert plan(step, (), {}) == plan(step)
    fresh = schedule(cfg, 20, 5, "text")
    for step in range(20, 40):
        factors = plan(step, (), {"text": 4, "image": 6})[1]
        assert factors["text"] == fresh(step - 20, [])
        assert factors[""] == plan(step)[1][""]
    assert plan(31, (), {"image": 6})[1]["image"] == 1.0  # the peak, after a warm-up of a step
    assert plan(20)[1]["text"] < 0.6 < fresh(2, [])
    cfg = OptimConfig(warmup=0.0, schedule="plateau", step_epochs=2, gamma=0.5)
    plan = phased(cfg, WHOLE, 12, 2)
    losses = [1.0, 1.0, 1.0, 1.0]
    assert plan(8, losses)[1][""] == 0.5
    assert plan(8, losses, {"text": 3})[1] == {"": 0.5, "text": 1.0}
    halves = [Phase("a", 0.5), Phase("b", 0.5)]
    plan = phased(OptimConfig(warmup=0.0), halves, 8, 2)
    assert plan(6, (), {"text": 1})[1]["text"] == plan(6)[1][""]


def test_plateau_drops_as_torchs() -> None:
    losses = [3, 2, 2, 2, 1, 1.5, 1, 1, 1, 1, 0.5, 0.4]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    # torch's patience is one less
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=1, threshold=0.0
    )
    factor = schedule(OptimConfig(schedule="plateau", gamma=0.5, step_epochs=2, warmup=0), 9, 1)
    for epoch, loss in enumerate(losses):
        plateau.step(loss)
        assert factor(epoch, losses[: epoch + 1]) == optimizer.param_groups[0]["lr"]
    assert drops([], 1) == 0


def test_a_group_has_its_own_schedule_and_warm_up_from_when_it_thaws() -> None:
    own: Any = {"modality_warmup": {"text": 0.5}, "modality_schedule": {"image": "linear"}}
    cfg = OptimConfig(warmup=0.0, schedule="constant", **own)
    plan = phased(cfg, WHOLE, 10, 5)
    assert [plan(step)[1]["text"] for step in (0, 4, 5)] == [0.2, 1, 1]
    assert [plan(step)[1]["image"] for step in (0, 5)] == [1, 0.5]
    assert [plan(step)[1][""] for step in (0, 9)] == [1, 1]
    cfg = OptimConfig(warmup=0.25, schedule="linear", unfreeze_at_epoch={"text": 2})
    plan = phased(cfg, WHOLE, 18, 5)
    found = [plan(step)[1]["text"] for step in range(18)]
    assert found[:10] == [0.0] * 10
    assert found[10:] == [schedule(cfg, 8, 5)(step, []) for step in range(8)]
    # With phases too, and with the losses of the phase alone.
    cfg = OptimConfig(warmup=0.0, schedule="plateau", step_epochs=1, gamma=0.5)
    plan = phased(cfg, [Phase("a", 0.5), Phase("b", 0.5)], 8, 2)
    assert plan(3, [1, 1])[1][""] == 0.5
    assert plan(4, [1, 1])[1][""] == 1.0
    assert plan(7, [1, 1, 1, 1])[1][""] == 0.5


PLANTED = [1.0, 0.9, 0.95, 0.8, 0.85, 0.86, 0.7, 0.9]  # validation losses of eight epochs


def plant_validation_losses(patch: pytest.MonkeyPatch) -> None:
    """Replace the loss of each evaluation in turn: how a real one falls depends on the CPU."""
    losses, evaluate = iter([*PLANTED, 0.5]), fit.evaluate  # 0.5: the test split

    def planted(*args: Any, **settings: Any) -> dict[str, Any]:
        return {**evaluate(*args, **settings), "loss": next(losses)}

    patch.setattr(fit, "evaluate", planted)


def test_a_resumed_plateau_run_equals_the_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = ["--optim.schedule", "plateau", "--optim.step_epochs", "1", "--optim.gamma", "0.5"]
    long += ["--optim.lr", "0.3", "--optim.warmup", "0", "--train.log_every", "1"]
    long += ["--train.epochs", str(len(PLANTED)), "--data.missing", "0.4"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    with monkeypatch.context() as patch:
        plant_validation_losses(patch)
        assert train([*QUICK, *long, "--out", str(whole)]) == 0
    update, left = Trainer._update_weights, iter(range(27))  # in the fifth epoch of six steps

    def broken(trainer: Trainer, *args: Any) -> Any:
        next(left)
        return update(trainer, *args)

    with monkeypatch.context() as planted:
        plant_validation_losses(planted)
        with monkeypatch.context() as patch, pytest.raises(StopIteration):
            patch.setattr(Trainer, "_update_weights", broken)
            train([*QUICK, *long, "--out", str(cut)])
        assert train(["--resume", "--out", str(cut)]) == 0
    lines = (whole / "metrics.jsonl").read_text()
    assert (cut / "metrics.jsonl").read_text() == lines
    ours, theirs = (
        torch.load(out / "checkpoints" / "last.pt", weights_only=True)["objective"]
        for out in (whole, cut)
    )
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    events = [json.loads(line) for line in lines.splitlines()]
    rates = [event["lr"]["fusion"] for event in events if event["event"] == "step"]
    # A loss above the best so far halves the rate of the epochs after it.
    halvings = [0, 0, 0, 1, 1, 2, 3, 3]
    assert rates == [0.3 * 0.5**count for count in halvings for _ in range(6)]
    assert (whole / "groups.json").is_file()
