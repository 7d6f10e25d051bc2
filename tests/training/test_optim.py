"""Every parameter in one group, at the rate that was asked for."""

from __future__ import annotations

import pytest
import torch

from fusionzoo.config import OptimConfig
from fusionzoo.errors import FusionZooError
from fusionzoo.model import FusionModel, create_model
from fusionzoo.training.objectives import UnimodalHeads
from fusionzoo.training.optim import (
    build_optimizer,
    group_rows,
    param_groups,
    rates,
    schedule,
    set_rates,
)


def make(**image: object) -> tuple[FusionModel, UnimodalHeads]:
    encoders = {
        "image": {"name": "vector/mlp", "in_dim": 4, "dim": 6, **image},
        "text": {"name": "chars", "dim": 8, "num_layers": 1, "num_heads": 2},
    }
    model = create_model("gmu", encoders, 3, dim=8)
    return model, UnimodalHeads({"image": 6, "text": 8}, 8, torch.full((3,), 1 / 3))


def test_every_trainable_parameter_is_in_exactly_one_group() -> None:
    model, heads = make()
    groups = param_groups(model, heads, OptimConfig())
    grouped = [id(p) for g in groups for p in g["params"]]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == {id(p) for p in (*model.parameters(), *heads.parameters())}


def test_norms_and_biases_are_never_decayed() -> None:
    model, heads = make()
    for group in param_groups(model, heads, OptimConfig(weight_decay=0.1)):
        vectors = all(p.ndim <= 1 for p in group["params"])
        assert group["weight_decay"] == (0.0 if vectors else 0.1)
        assert group["name"].endswith("/no_decay") == vectors


def test_a_modality_learns_at_its_own_rate_and_the_rest_at_the_base_rate() -> None:
    model, heads = make()
    cfg = OptimConfig(lr=1e-3, modality_lr={"image": 1e-5}, fusion_lr=1e-2)
    optimizer = build_optimizer(param_groups(model, heads, cfg), cfg)
    set_rates(optimizer, 0.5)
    found = rates(optimizer)
    assert found["image"] == found["image/no_decay"] == pytest.approx(5e-6)
    assert found["text"] == found["unimodal"] == pytest.approx(5e-4)
    assert found["fusion"] == pytest.approx(5e-3)


def test_frozen_parameters_stand_in_the_table_and_in_no_group() -> None:
    model, heads = make(freeze="all")
    groups = param_groups(model, heads, OptimConfig())
    assert not [g for g in groups if g["name"].startswith("image")]
    names = [row[0] for row in group_rows(groups, model)[1]]
    assert "image (frozen)" in names


def test_a_rate_for_a_modality_that_is_not_there_is_an_error() -> None:
    model, heads = make()
    with pytest.raises(FusionZooError, match=r"modality_lr\.imag: .* Did you mean 'image'"):
        param_groups(model, heads, OptimConfig(modality_lr={"imag": 1e-5}))


def test_a_rate_for_a_frozen_encoder_is_an_error() -> None:
    model, heads = make(freeze="all")
    with pytest.raises(FusionZooError, match="its encoder is frozen"):
        param_groups(model, heads, OptimConfig(modality_lr={"image": 1e-5}))


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
def test_each_optimiser_lowers_a_loss(name: str) -> None:
    model, heads = make()
    cfg = OptimConfig(name=name, lr=1e-2)  # type: ignore[arg-type]
    optimizer = build_optimizer(param_groups(model, heads, cfg), cfg)
    losses = []
    for _ in range(20):
        loss = torch.stack([(p**2).sum() for p in model.parameters()]).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


def test_schedules_warm_up_and_then_fall_as_named() -> None:
    step = schedule(OptimConfig(schedule="step", warmup=0.1, step_epochs=2, gamma=0.5), 100, 10)
    assert [step(i) for i in (0, 4, 9, 10, 19, 20, 39, 40, 99)] == pytest.approx(
        [0.1, 0.5, 1, 1, 1, 0.5, 0.5, 0.25, 0.0625]
    )
    cosine = schedule(OptimConfig(schedule="cosine", warmup=0.0), 100, 10)
    assert cosine(0) == 1
    assert cosine(50) == pytest.approx(0.5)
    assert 0 < cosine(99) < 0.001
    assert {schedule(OptimConfig(schedule="constant", warmup=0), 9, 3)(i) for i in range(9)} == {1}
