"""What every training strategy keeps, whatever it does."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from fusionzoo.scripts.train import main as train
from fusionzoo.structures import StepContext
from fusionzoo.training.balance import BALANCE
from fusionzoo.training.balance._shared import BatchSum
from fusionzoo.training.objective import Objective
from fusionzoo.training.trainer import Trainer
from helpers.strategies import (
    OFF,
    ROWS,
    make_batch,
    make_loaders,
    make_model,
    make_objective,
    make_trainer,
    mean,
    only,
    save_teachers,
    see,
    take,
)

STEPS = 4


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return save_teachers(tmp_path_factory.mktemp("teachers"))


def wanted(name: str, teachers: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**(teachers if name == "umt" else {}), **more}


def learned(objective: Objective, accumulate: int = 1, **tree: Any) -> dict[str, torch.Tensor]:
    """What a few steps make of the model, with chance at work."""
    trainer = make_trainer(objective, {"train": tree})
    torch.manual_seed(5)
    for step in range(STEPS):
        now = StepContext(step, step / 2)
        if step % 2 == 0 and "gblend" not in objective.balance:
            for one in objective.strategies(now):
                one.begin_epoch(trainer, make_loaders(), now)
        parts = [take(make_batch(), slice(i, None, accumulate)) for i in range(accumulate)]
        result = trainer.step(parts, now)
        assert math.isfinite(result.loss)
    return {name: p.detach().clone() for name, p in objective.model.named_parameters()}


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(x, theirs[name]) for name, x in ours.items())


@pytest.fixture(scope="module")
def plain() -> dict[str, torch.Tensor]:
    return learned(make_objective(model=make_model("mean"), dropout=True))


OFFS = [(name, {"end": 0}) for name in BALANCE] + list(OFF.items())


@pytest.mark.parametrize(("name", "off"), OFFS, ids=[f"{n}-{next(iter(x))}" for n, x in OFFS])
def test_a_strategy_that_is_off_leaves_every_weight_as_plain_training_would(
    name: str, off: dict[str, Any], teachers: dict[str, Any], plain: dict[str, torch.Tensor]
) -> None:
    model = make_model("mean")
    settings = wanted(name, teachers, **off)
    assert same(plain, learned(make_objective(name, settings, model=model, dropout=True)))


@pytest.mark.parametrize("name", BALANCE)
def test_a_strategy_changes_training_but_no_answer(
    name: str, teachers: dict[str, Any], plain: dict[str, torch.Tensor]
) -> None:
    model = make_model("mean")
    objective = make_objective(name, wanted(name, teachers), model=model, dropout=True)
    assert objective.model.state_dict().keys() == make_model("mean").state_dict().keys()
    assert not same(plain, learned(objective))
    state = {key: x.clone() for key, x in objective.state_dict().items()}
    objective.eval()
    batch = make_batch()
    with torch.no_grad():
        assert torch.equal(objective(batch).logits, model(batch).logits)
    assert same(state, objective.state_dict())


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


@pytest.mark.parametrize("name", BALANCE)
def test_what_an_absent_modality_holds_reaches_no_loss_and_no_gradient(
    name: str, teachers: dict[str, Any]
) -> None:
    found = []
    for poison in (0.0, math.nan, math.inf):
        objective = make_objective(name, wanted(name, teachers), model=make_model("mean"))
        one = only(objective)
        turns = one.turns(StepContext())
        for step in range(2):
            now = StepContext(step, float(step), turn=turns[0])
            batch = one.edit_batch(make_batch(), torch.arange(ROWS), now)
            if name != "gblend":
                one.begin_epoch(make_trainer(objective), make_loaders(), now)
            features = objective.model.encode(batch)
            for m, own in features.items():
                gone = ~own.mask
                tokens = own.tokens.detach().masked_fill(gone[..., None], poison)
                pooled = own.pooled.detach().masked_fill(gone.all(1)[:, None], poison)
                features[m] = own._replace(
                    tokens=tokens.requires_grad_(), pooled=pooled.requires_grad_()
                )
            seen = see(objective, batch, now, features)
            seen = seen._replace(output=one.edit_output(seen))
            values = objective.model.fusion.loss(seen.output, batch.target, seen)
            main = one.main_loss(seen, one_term(values))
            loss = mean(main) + sum(mean(term) for term in one.extra_losses(seen).values())
            objective.zero_grad()
            loss.backward()
        leaves = [x.pooled for x in features.values()]
        grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
        for x, own in zip(grads, features.values(), strict=True):
            assert (x[~own.mask.any(1)] == 0).all()
        own = [p.grad for p in objective.parameters() if p.grad is not None]
        sums = [x for x in vars(one).values() if isinstance(x, BatchSum)]
        scores = [x.values[0] for x in sums if x.values]
        found.append([loss.detach(), *grads, *own, *scores, *one.buffers()])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))
    assert all(x.isfinite().all() for x in found[0])


def one_term(values: torch.Tensor) -> Any:
    from fusionzoo.training.balance import LossTerm

    return LossTerm(values, torch.ones(len(values), dtype=torch.bool))


@pytest.mark.parametrize("name", BALANCE)
def test_modalities_that_nobody_has_are_no_trouble(name: str, teachers: dict[str, Any]) -> None:
    objective = make_objective(name, wanted(name, teachers), model=make_model("mean"))
    trainer = make_trainer(objective, {"optim": {"name": "sgd"}})
    for absent in ([(r, 1) for r in range(ROWS)], [(r, c) for r in range(ROWS) for c in range(3)]):
        trainer.step([make_batch(absent)], StepContext())
    trainer.step([take(make_batch(), slice(0, 0))], StepContext())
    assert all(p.isfinite().all() for p in objective.parameters())


# ---- train.py

QUICK = ["--data.name", "interactions", "--data.samples", "300", "--data.missing", "0.2"]
QUICK += ["--log", "none", "--train.epochs", "3", "--fusion.name", "mean"]
QUICK += ["--fusion.dim", "16"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    alone = ["--data.modalities", "a", "--out", str(folder / "a")]
    assert train([*QUICK, *alone]) == 0
    return folder


@pytest.mark.parametrize(
    "name",
    [x if x in ("gblend", "pmr") else pytest.param(x, marks=pytest.mark.slow) for x in BALANCE],
)
def test_a_run_that_stops_within_an_epoch_resumes_bit_for_bit(
    name: str, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [*QUICK, "--balance", name, "--train.accumulate", "2"]
    if name == "umt":
        flags += ["--balance_settings.umt.teachers.a", str(runs / "a")]
    if name == "reconboost":
        flags += ["--balance_settings.reconboost.epochs", "1"]
        flags += ["--balance_settings.reconboost.rectify", "1"]
    if name == "relearn":
        flags += ["--balance_settings.relearn.every", "1"]
        flags += ["--balance_settings.relearn.restart", "true"]
    if name == "gblend":
        flags += ["--balance_settings.gblend.every", "2"]
    assert train([*flags, "--out", str(tmp_path / "whole")]) == 0
    step = Trainer.step

    def stopped(trainer: Trainer, batches: Any, context: StepContext, **flags: Any) -> Any:
        if context.step == 3:  # in the second epoch; heard at the step after
            signal.raise_signal(signal.SIGTERM)
        return step(trainer, batches, context, **flags)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", stopped)
        assert train([*flags, "--out", str(tmp_path / "cut")]) == 75
    assert train(["--resume", "--out", str(tmp_path / "cut")]) == 0
    ends = [
        torch.load(tmp_path / x / "checkpoints" / "last.pt", weights_only=True)["objective"]
        for x in ("whole", "cut")
    ]
    assert same(*ends)


def test_several_that_are_off_leave_a_run_as_it_is(tmp_path: Path) -> None:
    left_out = ("umt", "mixup")  # a teacher is a run of its own; mixup goes with few others
    names = [n for n in BALANCE if n not in left_out]
    names = [n for n in names if n == "agm" or not BALANCE[n].cls.surgery]  # type: ignore[attr-defined]
    off = [x for n in names for x in (f"--balance_settings.{n}.end", "0")]
    assert train([*QUICK, "--out", str(tmp_path / "plain")]) == 0
    assert train([*QUICK, "--out", str(tmp_path / "off"), "--balance", ",".join(names), *off]) == 0
    ends = [
        torch.load(tmp_path / x / "checkpoints" / "last.pt", weights_only=True)["objective"]
        for x in ("plain", "off")
    ]
    assert same(*ends)
