"""Every parameter in one group, at the rate that was asked for."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from fusionzoo.config import OptimConfig
from fusionzoo.errors import FusionZooError
from fusionzoo.model import FusionModel, UnimodalHeads, create_model
from fusionzoo.training.freezing import Unfreezing
from fusionzoo.training.optim import (
    Group,
    build_optimizer,
    describe,
    group_rows,
    param_groups,
    rates,
    set_rates,
)


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
    assert row[3:] == ("-", "-", "-", "-", "the end")
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
    assert header[-1] == "frozen until"
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
