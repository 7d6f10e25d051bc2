"""Every parameter in one group, at the rate that was asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fusionzoo.config import OptimConfig, RunConfig, from_tree
from fusionzoo.encoders.base import layer_numbers
from fusionzoo.errors import FusionZooError
from fusionzoo.machine.distributed import World
from fusionzoo.model.fusion_model import FusionModel, UnimodalHeads, create_model
from fusionzoo.scripts.train import main as train
from fusionzoo.structures import Batch, Phase, StepContext
from fusionzoo.training import checkpoint, fit
from fusionzoo.training.freezing import Unfreezing
from fusionzoo.training.objective import Objective, freeze_unused
from fusionzoo.training.optim import (
    Group,
    _uncompiled,
    build_optimizer,
    describe,
    group_rows,
    param_groups,
    rates,
    set_rates,
)
from fusionzoo.training.schedules import drops, phased, schedule
from fusionzoo.training.trainer import Trainer


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adagrad", "Muon"])
def test_an_optimiser_kept_from_the_compiler_computes_what_torchs_does(name: str) -> None:
    torchs = getattr(torch.optim, name)
    ours, settings = _uncompiled(torchs), {"lr": 0.1, "weight_decay": 0.01}
    assert issubclass(ours, torchs)
    generator = torch.Generator().manual_seed(0)
    start, *grads = torch.randn(4, 3, 2, generator=generator)
    states, weights = [], []
    for kind in (torchs, ours):
        weight = torch.nn.Parameter(start.clone())
        optimizer = kind([weight], **settings)
        for grad in grads:
            weight.grad = grad.clone()
            optimizer.step()
            again = kind([weight], **settings)
            again.load_state_dict(optimizer.state_dict())
            optimizer = again
        optimizer.zero_grad()
        assert weight.grad is None
        states.append(optimizer.state_dict())
        weights.append(weight.detach())
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)
    assert torch.equal(*weights) and not torch.equal(start, weights[0])


def test_settings_that_training_cannot_keep_are_refused() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    groups: Any = [{"params": [weight], "lr": 0.1, "weight_decay": 0.0}]
    cfg = OptimConfig(name="adamw", settings={"differentiable": True})
    with pytest.raises(FusionZooError, match="differentiable: adamw has no such"):
        build_optimizer(groups, cfg)


def make(**image: object) -> tuple[FusionModel, UnimodalHeads]:
    encoders = {
        "image": {"name": "vector/mlp", "in_dim": 4, "dim": 6, **image},
        "text": {"name": "chars", "dim": 8, "num_layers": 1, "num_heads": 2},
    }
    model = create_model("gmu", encoders, 3, dim=8)
    return model, UnimodalHeads({"image": 6, "text": 8}, 8, torch.full((3,), 1 / 3))


def about(model: FusionModel, groups: list[Group], cfg: OptimConfig) -> list[dict[str, Any]]:
    return describe(groups, model, cfg, Unfreezing(model, cfg, epochs=9))


def test_every_trainable_parameter_is_in_one_group_and_norms_and_biases_are_not_decayed() -> None:
    model, heads = make()
    groups = param_groups(model, heads, OptimConfig(weight_decay=0.1))
    grouped = [id(p) for g in groups for p in g["params"]]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == {id(p) for p in (*model.parameters(), *heads.parameters())}
    for group in groups:
        (vectors,) = {p.ndim <= 1 for p in group["params"]}
        assert group["weight_decay"] == (0.0 if vectors else 0.1)
        assert group["name"].endswith("/no_decay") == vectors


@pytest.mark.parametrize(
    ("model", "listed"),
    [
        ("vit_tiny_patch16_224", {"pos_embed", "cls_token"}),
        ("swin_tiny_patch4_window7_224", {"layers.0.blocks.0.attn.relative_position_bias_table"}),
    ],
)
def test_what_a_timm_model_lists_is_not_decayed(model: str, listed: set[str]) -> None:
    encoder = {"name": f"timm/{model}", "pretrained": False, "img_size": 56, "window_size": 7}
    if model.startswith("vit"):
        encoder = {"name": f"timm/{model}", "pretrained": False, "img_size": 32, "depth": 1}
    built = create_model("concat", {"image": encoder}, 2, dim=8)
    names = {id(p): name for name, p in built.encoders["image"].net.named_parameters()}  # type: ignore[union-attr]
    groups = param_groups(built, torch.nn.ModuleDict(), OptimConfig(weight_decay=0.1))
    undecayed = {names.get(id(p)) for g in groups if not g["weight_decay"] for p in g["params"]}
    assert listed <= undecayed
    assert not any(str(name).endswith("qkv.weight") for name in undecayed)


def test_modalities_and_layers_learn_at_their_own_rates_and_the_rest_at_the_base_rate() -> None:
    model, heads = make()
    cfg = OptimConfig(lr=1e-3, modality_lr={"image": 1e-5, "fusion": 1e-2})
    optimizer = build_optimizer(param_groups(model, heads, cfg), cfg)
    set_rates(optimizer, {"": 0.5})
    found = rates(optimizer)
    assert found["image"] == found["image/no_decay"] == pytest.approx(5e-6)
    assert found["text"] == found["unimodal"] == pytest.approx(5e-4)
    assert found["fusion"] == pytest.approx(5e-3)
    cfg = OptimConfig(lr=1e-2, layer_decay={"text": 0.5, "image": 1.0})
    groups = param_groups(model, heads, cfg)  # which checks the coverage
    found = {group["name"]: group["base_lr"] for group in groups}
    assert found["text/layer1"] == found["text/layer1/no_decay"] == 1e-2
    assert found["text/layer0"] == 0.5e-2  # embedding and positions
    assert found["image/layer0"] == found["image/layer1"] == 1e-2
    assert found["fusion"] == 1e-2


def test_frozen_parameters_stand_in_the_table_and_in_no_group() -> None:
    model, heads = make(freeze="all")
    groups = param_groups(model, heads, OptimConfig())
    assert not [g for g in groups if g["name"].startswith("image")]
    rows = group_rows(about(model, groups, OptimConfig()))[1]
    (row,) = [row for row in rows if row[0] == "image (frozen)"]
    assert row[2:] == ("-", "-", "-", "the end")
    with pytest.raises(FusionZooError, match="its encoder is frozen"):
        param_groups(model, heads, OptimConfig(modality_lr={"image": 1e-5}))


def test_every_setting_is_checked_for_its_modality() -> None:
    model, heads = make()
    for setting, value in (
        ("modality_lr", 1e-5),
        ("layer_decay", 0.5),
        ("modality_weight_decay", 0.0),
        ("modality_schedule", "linear"),
        ("modality_warmup", 0.1),
        ("unfreeze_at_epoch", 1),
        ("gradual_unfreeze", 1),
    ):
        with pytest.raises(FusionZooError, match=rf"{setting}\.txt: .* Did you mean 'text'"):
            param_groups(model, heads, OptimConfig(**{setting: {"txt": value}}))
    with pytest.raises(FusionZooError, match=r"unfreeze_at_epoch\.fusion: the model has no"):
        param_groups(model, heads, OptimConfig(unfreeze_at_epoch={"fusion": 1}))


def test_the_fusion_is_a_key_too() -> None:
    model, heads = make()
    cfg = OptimConfig(
        modality_lr={"fusion": 0.5},
        modality_weight_decay={"fusion": 0.25, "text": 0.0},
        modality_schedule={"fusion": "constant"},
        modality_warmup={"fusion": 0.0},
    )
    rows = {one["group"]: one for one in about(model, param_groups(model, heads, cfg), cfg)}
    assert rows["fusion"]["lr"] == 0.5
    assert [rows[name]["weight_decay"] for name in ("fusion", "text", "image")] == [0.25, 0, 0.05]
    assert (rows["fusion"]["schedule"], rows["fusion"]["warmup"]) == ("constant", 0.0)
    assert (rows["image"]["schedule"], rows["image"]["warmup"]) == ("cosine", 0.05)


def test_the_table_says_all_and_is_plain_data() -> None:
    model, heads = make()
    cfg = OptimConfig(unfreeze_at_epoch={"image": 3}, gradual_unfreeze={"text": 2})
    made = about(model, param_groups(model, heads, cfg), cfg)
    assert json.loads(json.dumps(made)) == made
    epochs = {one["group"]: one["frozen_until"] for one in made}
    assert (epochs["image"], epochs["text"], epochs["fusion"]) == ([3, 3], [2, 4], [])
    header, rows = group_rows(made)
    assert header[-1] == "frozen\nuntil"
    last = {row[0]: row[-1] for row in rows}
    assert (last["image"], last["text"], last["fusion"]) == ("epoch 3", "epoch 2 to 4", "-")
    everything = (*model.parameters(), *heads.parameters())
    assert sum(one["parameters"] for one in made) == sum(p.numel() for p in everything)


def lowers_a_loss(cfg: OptimConfig) -> torch.optim.Optimizer:
    model, heads = make()
    optimizer = build_optimizer(param_groups(model, heads, cfg), cfg)
    losses = []
    for _ in range(20):
        loss = torch.stack([(p**2).sum() for p in model.parameters()]).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    return optimizer


TORCH = ("adamw", "Adam", "sgd", "nadam", "radam", "rmsprop", "adagrad", "adafactor", "asgd")
TIMM = ("lion", "lamb", "adan", "muon", "adopt", "cadamw", "csgdw")


@pytest.mark.parametrize("name", [*TORCH, *TIMM])
def test_each_optimiser_lowers_a_loss(name: str) -> None:
    lowers_a_loss(OptimConfig(name=name, lr=1e-2))


def test_an_optimiser_is_fused_where_it_can_be_and_takes_settings() -> None:
    assert lowers_a_loss(OptimConfig(lr=1e-2)).defaults["fused"] is True
    cfg = OptimConfig(lr=1e-2, settings={"fused": False, "betas": [0.8, 0.9], "eps": 1e-6})
    defaults = lowers_a_loss(cfg).defaults
    assert (defaults["fused"], defaults["betas"], defaults["eps"]) == (False, (0.8, 0.9), 1e-6)
    cfg = OptimConfig(name="sgd", lr=1e-2, settings={"nesterov": True, "momentum": 0.8})
    assert lowers_a_loss(cfg).defaults["momentum"] == 0.8


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("adamv", {}, "unknown optimiser 'adamv'. Did you mean 'adam"),
        ("lbfgs", {}, "lbfgs needs a closure"),
        ("adamw", {"esp": 1}, "settings.esp: adamw has no such setting. Did you mean 'eps'"),
        ("lion", {"betas": [2, 2]}, "--optim.name lion with {'betas': (2, 2)}: Invalid beta"),
    ],
)
def test_a_wrong_optimiser_is_one_clear_error(
    name: str, settings: dict[str, Any], says: str
) -> None:
    model, heads = make()
    cfg = OptimConfig(name=name, settings=settings)
    with pytest.raises(FusionZooError) as caught:
        build_optimizer(param_groups(model, heads, cfg), cfg)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


# ---- schedules


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
    monkeypatch.setattr(checkpoint, "PAUSE", 0)  # else an epoch this short is not written
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


# ---- frozen for a time


def make_trainer(**optim: Any) -> Trainer:
    torch.manual_seed(0)
    encoders = {
        "image": {"name": "timm/resnet10t", "pretrained": False, "size": 32},
        "text": {"name": "chars", "dim": 8, "num_layers": 3, "num_heads": 2},
    }
    model = create_model("gmu", encoders, 3, dim=8)
    objective = Objective(model, UnimodalHeads({}, 8, torch.full((3,), 1 / 3)))
    freeze_unused(objective)
    cfg = from_tree(RunConfig, {"optim": {"lr": 1e-2, "weight_decay": 0.1, **optim}})
    groups = param_groups(model, objective.heads, cfg.optim)
    return Trainer(objective, build_optimizer(groups, cfg.optim), cfg, World())


def make_batch() -> Batch:
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(256, (6, 5), generator=draw)
    inputs = {
        "image": {"pixels": torch.randint(256, (6, 3, 32, 32), generator=draw).to(torch.uint8)},
        "text": {"input_ids": tokens, "attention_mask": torch.ones(6, 5, dtype=torch.bool)},
    }
    present = torch.ones(6, 2, dtype=torch.bool)
    return Batch([str(row) for row in range(6)], inputs, present, torch.arange(6) % 3)


def moved(trainer: Trainer, epoch: float, steps: int = 2) -> set[str]:
    """Train some steps of an epoch; return the names of the tensors that moved."""
    model = trainer.module.model
    before: dict[str, Tensor] = {name: x.clone() for name, x in model.state_dict().items()}
    for step in range(steps):
        trainer.step([make_batch()], StepContext(epoch=epoch + step / 10))
    return {name for name, x in model.state_dict().items() if not torch.equal(x, before[name])}


def test_an_encoder_rests_until_its_epoch_with_its_running_statistics() -> None:
    trainer = make_trainer(unfreeze_at_epoch={"image": 2})
    for epoch in (0.0, 1.0):
        names = moved(trainer, epoch)
        assert not [name for name in names if name.startswith("encoders.image")]
        assert [name for name in names if name.startswith("encoders.text")]
        assert not trainer.module.model.encoders["image"].training
    assert all(p.requires_grad for p in trainer.module.model.encoders["image"].parameters())
    names = moved(trainer, 2.0)
    image = {f"encoders.image.{n}" for n in trainer.module.model.encoders["image"].state_dict()}
    assert image <= names  # weights and running statistics alike
    assert trainer.module.model.encoders["image"].training


def test_an_encoder_that_has_thawed_learns_as_without_the_setting() -> None:
    plain, waits = make_trainer(), make_trainer(unfreeze_at_epoch={"image": 1})
    for trainer in (plain, waits):
        torch.manual_seed(1)  # of dropout
        for step in range(2):
            trainer.step([make_batch()], StepContext(epoch=1 + step / 10))
    theirs = waits.module.state_dict()
    for name, tensor in plain.module.state_dict().items():
        assert torch.equal(tensor, theirs[name]), name


def test_layers_thaw_one_after_another_from_the_last_one_down() -> None:
    trainer = make_trainer(gradual_unfreeze={"text": 2})
    text = trainer.module.model.encoders["text"]
    numbers = {f"encoders.text.{name}": n for name, n in layer_numbers(text).items()}
    for epoch, lowest in ((0, 4), (1, 4), (2, 3), (3, 3), (4, 2), (6, 1), (8, 0)):
        names = moved(trainer, epoch)
        layers = {numbers[name] for name in names & numbers.keys()}
        assert layers == set(range(lowest, 4)), epoch
    assert all(module.training for module in text.modules())


def test_both_settings_count_from_the_epoch_and_what_is_frozen_for_good_stays_so() -> None:
    trainer = make_trainer(gradual_unfreeze={"image": 1}, unfreeze_at_epoch={"image": 3})
    top = list(trainer.module.model.encoders["image"].parameters())[-1]
    first = next(trainer.module.model.encoders["image"].parameters())
    assert trainer.freeze_plan.unfreezing.span([top]) == [3, 3]
    assert trainer.freeze_plan.unfreezing.span([first, top]) == [3, 7]  # five layers
    encoders = {"text": {"name": "chars", "num_layers": 3, "freeze": "all_but_last_2"}}
    model = create_model("concat", encoders, 3)
    text = model.encoders["text"]
    resting = Unfreezing(model, OptimConfig(gradual_unfreeze={"text": 1}), epochs=4)
    counts = []
    for epoch in range(4):
        assert resting.enter(epoch)
        assert not resting.enter(epoch)
        text.train()
        assert not text.embed.training
        counts.append(len(resting.resting))
    assert counts == [26, 12, 0, 0]  # two layers of 12 tensors and the last norm
    assert not text.transformer.layers.layers[0].training
    assert text.transformer.layers.layers[1].training


@pytest.mark.parametrize("setting", ["unfreeze_at_epoch", "gradual_unfreeze"])
def test_an_encoder_that_would_never_learn_is_an_error(setting: str) -> None:
    with pytest.raises(FusionZooError, match=rf"{setting}\.text 12: the run ends after 12"):
        make_trainer(**{setting: {"text": 12}})


def held_bytes(trainer: Trainer, epoch: float) -> int:
    """Return the size of the activations that a step holds for its backward pass."""
    sizes: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        trainer.step([make_batch()], StepContext(epoch=epoch))
    parameters = {p.untyped_storage().data_ptr() for p in trainer.module.parameters()}
    return sum(size for pointer, size in sizes.items() if pointer not in parameters)


@pytest.mark.parametrize("name", ["image", "text"])
def test_layers_below_the_first_trained_one_hold_no_activations(name: str) -> None:
    waits, plain = make_trainer(gradual_unfreeze={name: 1}), make_trainer()
    by_epoch = [held_bytes(waits, epoch) for epoch in range(6)]
    assert by_epoch == sorted(by_epoch)
    assert by_epoch[0] < by_epoch[1] < by_epoch[2] < by_epoch[-1]
    assert by_epoch[-1] == held_bytes(plain, 0.0)


def test_a_copy_thaws_by_itself() -> None:
    """Some strategies train a copy of the model for a while."""
    trainer = make_trainer(gradual_unfreeze={"image": 1})
    moved(trainer, 1.0)
    copy = trainer.copy(lambda module: None)
    image = copy.module.model.encoders["image"]
    assert {f"encoders.image.{name}" for name, _ in image.named_parameters()} <= moved(copy, 9.0)
    still = [n for n in moved(trainer, 1.0) if n.startswith("encoders.image.net.conv1")]
    assert still == []
