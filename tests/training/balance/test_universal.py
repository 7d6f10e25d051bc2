"""What training strategies keep, beside their contract: settings that switch off, fusions, runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fusionzoo.scripts.train import main as train
from fusionzoo.structures import StepContext
from fusionzoo.training.balance import BALANCE
from fusionzoo.training.objective import Objective
from helpers.strategies import (
    OFF,
    make_batch,
    make_loaders,
    make_model,
    make_objective,
    make_trainer,
    save_teachers,
    take,
)
from helpers.trainings import PREEMPTED, preempt_at, weights

STEPS = 4


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return save_teachers(tmp_path_factory.mktemp("teachers"))


def wanted(name: str, teachers: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**(teachers if name == "umt" else {}), **more}


def learned(objective: Objective) -> dict[str, torch.Tensor]:
    """What a few steps make of the model, with chance at work."""
    trainer = make_trainer(objective)
    torch.manual_seed(5)
    for step in range(STEPS):
        now = StepContext(step, step / 2)
        if step % 2 == 0 and "gblend" not in objective.balance:
            for one in objective.strategies(now):
                one.begin_epoch(trainer, make_loaders(), now)
        assert math.isfinite(trainer.step([make_batch()], now).loss)
    return {name: p.detach().clone() for name, p in objective.model.named_parameters()}


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(x, theirs[name]) for name, x in ours.items())


@pytest.fixture(scope="module")
def plain() -> dict[str, torch.Tensor]:
    return learned(make_objective(model=make_model("mean"), dropout=True))


@pytest.mark.parametrize(("name", "off"), OFF.items(), ids=OFF)
def test_a_strategy_that_is_off_leaves_every_weight_as_plain_training_would(
    name: str, off: dict[str, Any], teachers: dict[str, Any], plain: dict[str, torch.Tensor]
) -> None:
    model = make_model("mean")
    settings = wanted(name, teachers, **off)
    assert same(plain, learned(make_objective(name, settings, model=model, dropout=True)))


@pytest.mark.parametrize("fusion", ["gmu", "mbt", "late_mean"])
@pytest.mark.parametrize("name", BALANCE)
def test_a_strategy_trains_any_fusion_in_half_precision_over_several_batches(
    name: str, fusion: str, teachers: dict[str, Any]
) -> None:
    if (name, fusion) == ("mla", "late_mean"):
        pytest.skip("it has no head that all modalities share, and is refused")
    before = make_model(fusion)
    objective = make_objective(name, wanted(name, teachers), model=make_model(fusion)).float()
    torch.set_default_dtype(torch.float32)
    trainer = make_trainer(objective, {"train": {"amp": "bf16"}})
    batch = make_batch()
    inputs = {m: {k: x.float() for k, x in own.items()} for m, own in batch.inputs.items()}
    batch = batch._replace(inputs=inputs)
    for step in range(STEPS):
        now = StepContext(step, step / 2)
        if step % 2 == 0 and name != "gblend":
            for one in objective.strategies(now):
                one.begin_epoch(trainer, make_loaders(batch), now)
        trainer.step([take(batch, slice(0, 7)), take(batch, slice(7, None))], now)
    for parameter in objective.parameters():
        assert parameter.isfinite().all()
    start = dict(before.named_parameters())
    moved = {
        n.split(".")[1] for n, p in objective.model.named_parameters() if (p != start[n]).any()
    }
    assert {"image", "text", "audio"} <= moved


# ---- train.py
QUICK = ["--data.name", "interactions", "--data.samples", "300", "--data.missing", "0.2"]
QUICK += ["--log", "none", "--train.epochs", "3", "--fusion.name", "mean"]
QUICK += ["--fusion.dim", "16"]


@pytest.mark.parametrize("name", ["gblend", "pmr"])  # of all, the contract holds it
def test_a_run_that_stops_within_an_epoch_resumes_bit_for_bit(name: str, tmp_path: Path) -> None:
    flags = [*QUICK, "--balance", name, "--train.accumulate", "2"]
    flags += ["--balance_settings.gblend.every", "2"] if name == "gblend" else []
    assert train([*flags, "--out", str(tmp_path / "whole")]) == 0
    cut = tmp_path / "cut"
    assert preempt_at(4, lambda: train([*flags, "--out", str(cut)])) == PREEMPTED
    assert train(["--resume", "--out", str(cut)]) == 0
    assert same(weights(tmp_path / "whole"), weights(cut))


def test_several_that_are_off_leave_a_run_as_it_is(tmp_path: Path) -> None:
    left_out = ("umt", "mixup")  # a teacher is a run of its own; mixup goes with few others
    names = [n for n in BALANCE if n not in left_out]
    names = [n for n in names if n == "agm" or not BALANCE[n].cls.surgery]  # type: ignore[attr-defined]
    off = [x for n in names for x in (f"--balance_settings.{n}.end", "0")]
    assert train([*QUICK, "--out", str(tmp_path / "plain")]) == 0
    assert train([*QUICK, "--out", str(tmp_path / "off"), "--balance", ",".join(names), *off]) == 0
    assert same(weights(tmp_path / "plain"), weights(tmp_path / "off"))
