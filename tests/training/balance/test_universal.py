"""What training strategies keep, beside their contract: settings that switch off, fusions, runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fusionzoo.config import RunConfig, from_tree
from fusionzoo.datasets import create_dataset
from fusionzoo.errors import FusionZooError
from fusionzoo.machine.distributed import World
from fusionzoo.scripts.train import main as train
from fusionzoo.structures import StepContext
from fusionzoo.training.balance import BALANCE, Balance, StrategyInputs, build_balance
from fusionzoo.training.build import build_objective
from fusionzoo.training.objective import Objective
from helpers.strategies import (
    DIMS,
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


RIVALS = sorted(name for name in BALANCE if BALANCE[name].cls.surgery)  # type: ignore[attr-defined]


@pytest.mark.parametrize("second", RIVALS[1:])
def test_two_of_them_are_refused(second: str) -> None:
    with pytest.raises(FusionZooError, match=f"agm and {second} each decide .* take one"):
        make_objective(f"agm,{second}", model=make_model("mean"))


@pytest.mark.parametrize("first", [*RIVALS, "gblend"])
def test_the_others_go_with_each_of_them(first: str) -> None:
    balance = f"{first},modality_dropout,unimodal_aux,contrastive_align,cca_loss"
    trainer = make_trainer(make_objective(balance, model=make_model("mean")))
    for step in range(3):
        result = trainer.step([make_batch()], StepContext(step, step / 2))
    assert all(p.isfinite().all() for p in trainer.module.parameters())
    assert any(name.startswith("unimodal_aux/") for name in result.losses)


def test_unknown_names_and_fusions_that_do_not_suit_are_refused() -> None:
    setting = StrategyInputs(make_model("mean"), torch.zeros(9, dtype=torch.int64), 0, World())
    with pytest.raises(FusionZooError, match=r"unknown training strategy 'ogmge'\. Did you mean"):
        build_balance("ogmge", {}, setting)
    with pytest.raises(FusionZooError, match=r"agm: --balance does not name 'agm'"):
        build_balance("ogm_ge", {"agm": {"alpha": 1}}, setting)
    with pytest.raises(FusionZooError, match="LateMean has no linear head that all modalities"):
        make_objective("mla", model=make_model("late_mean"))
    trainer = make_trainer(make_objective("agm", model=make_model("late_max")))
    with pytest.raises(FusionZooError, match="loss of LateMax does not read the fused logits"):
        trainer.step([make_batch()], StepContext())


@pytest.mark.parametrize(
    ("name", "strategy", "says"),
    [
        ("agm", "dp", "remember what dp's threads forget: use ddp"),
        ("gblend", "fsdp", "gblend needs whole weights"),
        ("mmpareto", "fsdp", "mmpareto needs whole weights"),
    ],
)
def test_other_ways_to_use_several_gpus_are_refused(name: str, strategy: str, says: str) -> None:
    data = create_dataset("interactions", samples=60)
    encoders = {n: {**e, "in_dim": 8} for n, e in data.default_encoders.items()}
    tree = {"balance": name, "dist": {"strategy": strategy}, "encoders": encoders}
    with pytest.raises(FusionZooError, match=says):
        build_objective(from_tree(RunConfig, tree), data.split("train"))


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("agm", {"alpha": -1}, "agm: alpha=-1; it must be at least 0"),
    ("cca_loss", {"dim": 0}, "dim=0; it must be at least 1"),
    ("cca_loss", {"dim": 2, "top": 3}, "top=3; it is 1 to dim=2"),
    ("comm", {"temperature": 0}, "temperature=0; it must be positive"),
    ("gmc", {"weight": -1}, "gmc: weight=-1; it must be at least 0"),
    ("symile", {"dim": 0}, "symile: dim=0; it must be at least 1"),
    ("contrastive_align", {"mode": "clap"}, "mode='clap': input should be 'clip'"),
    ("contrastive_align", {"anchor": "imag"}, "Did you mean 'image'?"),
    ("cggm", {"rho": 0}, "cggm: rho=0; it must be positive"),
    ("relearn", {"clusters": 1}, "relearn: clusters=1; it must be at least 2"),
    ("gblend", {"floor": 0}, "floor=0; it must be in"),
    ("mla", {"alpha": 0}, "alpha=0; it must be positive"),
    ("mmpareto", {"gamma": 0}, "gamma=0; it must be positive"),
    ("modality_dropout", {"rate": 1}, "rate=1; it must be at least 0 and less than 1"),
    ("modality_dropout", {"rate": {"txt": 0.1}}, "rate.txt: .* Did you mean 'text'?"),
    ("ogm_ge", {"alpha": -0.5}, "ogm_ge: alpha=-0.5"),
    ("ogm_ge", {"alhpa": 0.5}, "has no setting 'alhpa'. Did you mean 'alpha'?"),
    ("pmr", {"momentum": 0}, "momentum=0; it must be in"),
    ("reconboost", {"epochs": 0}, "epochs=0; a stage takes at least 1"),
    ("umt", {}, "--balance_settings.umt.teachers.image runs/image; train one by `python train.py"),
    ("umt", {"teachers": {"image": "/none"}}, "teacher of 'image': /none is no model folder"),
    ("umt", {"teachers": {"imag": "/none"}}, "teachers.imag: .* Did you mean 'image'?"),
    ("unimodal_aux", {"weight": {"txt": 1}}, "weight.txt: the model has no modality"),
]


@pytest.mark.parametrize(("name", "settings", "says"), WRONG)
def test_a_wrong_setting_is_one_clear_line(name: str, settings: Any, says: str) -> None:
    with pytest.raises(FusionZooError, match=says):
        make_objective(name, settings, model=make_model("mean"))


@pytest.mark.parametrize("name", ["agm", "ogm_ge", "pmr", "reconboost"])
@pytest.mark.parametrize("targets", [torch.zeros(9), torch.zeros(9, 2, dtype=torch.int64)])
def test_scores_of_classes_need_one_class_for_each_sample(name: str, targets: Any) -> None:
    setting = StrategyInputs(make_model("mean"), targets, 0, World())
    with pytest.raises(FusionZooError, match=f"{name}: it scores .* must be one class"):
        BALANCE.create(name, setting)


@pytest.mark.parametrize("name", ["cca_loss", "cggm", "contrastive_align", "gmc", "symile"])
def test_one_modality_cannot_be_compared(name: str) -> None:
    with pytest.raises(FusionZooError, match="the model has only one"):
        make_objective(name, model=make_model("mean", {"image": 5}))


def test_a_teacher_of_another_width_or_without_the_modality_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = save_teachers(tmp_path)
    only_text = make_model("mean", {"text": 7})
    only_text.save(tmp_path / "text")
    with pytest.raises(FusionZooError, match="has no 'image', only text; train one by"):
        make_objective("umt", {"teachers": {"image": str(tmp_path / "text")}})
    folder = settings["teachers"]["image"]
    monkeypatch.setitem(DIMS, "image", 9)
    with pytest.raises(FusionZooError, match=r"makes features of width 6, the encoder .* width 9"):
        make_objective("umt", {"teachers": {"image": folder}})


def test_samples_that_are_not_of_the_split_are_refused_where_chance_goes_by_sample() -> None:
    trainer = make_trainer(make_objective("modality_dropout"))
    batch = make_batch()._replace(ids=[f"x{row}" for row in range(12)])
    with pytest.raises(FusionZooError, match="not of the training split"):
        trainer.step([batch], StepContext())


def test_what_a_strategy_needs_of_training_follows_from_the_hooks_that_it_overrides() -> None:
    needs = {"makes_views": {"comm"}, "aligns": {"contrastive_align"}, "two_pass": {"mmpareto"}}
    for flag, names in needs.items():
        assert {name for name in BALANCE if getattr(BALANCE[name].cls, flag)} == names

    class Set(Balance):  # a flag may be set, too, in a class or an object
        makes_views = True  # type: ignore[assignment]

    strategy = Set(StrategyInputs(make_model(), torch.zeros(9), 0, World()))
    assert strategy.makes_views and not strategy.two_pass
    strategy.two_pass = True  # type: ignore[misc, assignment]
    assert strategy.two_pass and not Set.two_pass
