"""cggm and relearn, held to their formulas."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from fusionzoo.config import OptimConfig
from fusionzoo.structures import Phase, StepContext
from fusionzoo.targets import AnyOf, Level, Number, OneOf
from fusionzoo.training.balance.cggm import misdirection, modulation, points_of
from fusionzoo.training.balance.relearn import Rows, purity
from fusionzoo.training.optim import rates, set_rates
from fusionzoo.training.schedules import phased
from helpers.strategies import (
    WIDTHS,
    close,
    make_batch,
    make_loaders,
    make_model,
    make_objective,
    make_trainer,
    only,
    see,
)

SGD = {"optim": {"name": "sgd", "lr": 0.1, "clip": None}}


def draws(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).double()


def after_steps(objective: Any, count: int = 1) -> dict[str, torch.Tensor]:
    trainer = make_trainer(objective, SGD)
    for step in range(count):
        trainer.step([make_batch()], StepContext(step, step / 2))
    return {n: p.detach().clone() for n, p in objective.model.named_parameters()}


# ---- cggm


@pytest.mark.parametrize("modalities", [2, 3, 5])
def test_the_factors_add_up_to_one_less_than_the_modalities(modalities: int) -> None:
    close(modulation(draws(modalities), clamp=False).sum(), modalities - 1)
    equal = torch.full((modalities,), 0.3).double()
    close(modulation(equal, clamp=True), [(modalities - 1) / modalities] * modalities)
    noise = torch.tensor([0.01, -0.0099], dtype=torch.float64)  # of which the quotient is clipped
    close(modulation(noise, clamp=False), [-99.0, 100.0], 1e-9)
    close(modulation(noise, clamp=True), [0.0, 1.0])


def test_the_direction_loss_is_0_where_gradients_agree_in_the_sign_of_their_factor() -> None:
    fused = draws(4, 6)
    factors = torch.tensor([0.5, -2.0, 0.0]).double()
    close(misdirection(factors, torch.stack([3 * fused, -fused, draws(4, 6)]), fused), 0.0)
    single = draws(3, 4, 6) + 0.1
    assert misdirection(factors, single, fused) > 0.01
    cosines = [float((g * fused).sum() / (g.norm() * fused.norm())) for g in single]
    values = [abs(b) - b * c for b, c in zip(factors.tolist(), cosines, strict=True)]
    close(misdirection(factors, single, fused), sum(values) / 3)
    silent = torch.zeros(3, 4, 6).double().requires_grad_()
    loss = misdirection(factors, silent, fused)
    loss.backward()
    assert loss == 0
    assert silent.grad is not None
    assert silent.grad.isfinite().all()


def test_factors_of_one_and_no_direction_are_a_plain_step() -> None:
    plain = after_steps(make_objective(model=make_model("mean")))
    settings = {"rho": 3 / 2, "direction": 0.0}
    found = after_steps(make_objective("cggm", settings, model=make_model("mean")))
    for name, wanted in plain.items():
        close(found[name], wanted, 1e-12)


def test_an_encoder_gets_its_gradient_times_rho_and_what_the_others_gained() -> None:
    settings = {"rho": 1.1, "direction": 0.0, "window": 2}
    objective = make_objective("cggm", settings, model=make_model("mean"))
    strategy: Any = only(objective)
    encoders = {n: list(e.parameters()) for n, e in objective.model.encoders.items()}
    points = [[2, 1, 0], [4, 1, 2], [6, 3, 2], [5, 4, 6]]  # by update and modality, of 10 rows
    for step, right in enumerate(points):
        context = StepContext(step)
        strategy.tally.add(torch.tensor([right, [10.0] * 3]).double(), context)
        for parameters in encoders.values():
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
        strategy.edit_gradients(encoders, context)
    gains = [(11 - 6) / 20, (7 - 2) / 20, (8 - 2) / 20]
    for gain, parameters in zip(gains, encoders.values(), strict=True):
        for parameter in parameters:
            close(parameter.grad, torch.full_like(parameter, 1.1 * (1 - gain / sum(gains))))


def test_the_gradients_that_are_compared_are_those_of_linear_layers_of_one_width() -> None:
    objective = make_objective("cggm", model=make_model("mean", dim=6))
    seen = see(objective, make_batch([]))
    terms = only(objective).extra_losses(seen)
    assert [name for name in terms if name.endswith("direction")] == ["cggm/direction"]
    head: Any = objective.balance["cggm"].heads["image"]  # type: ignore[union-attr, index]
    mean = sum(term.values.mean() for name, term in terms.items() if name == "cggm/image")
    (single,) = torch.autograd.grad(mean, head.weight)  # type: ignore[arg-type]
    layer = torch.zeros(4, 6, dtype=torch.float64, requires_grad=True)
    embedding = seen.output.embedding.detach()
    logits = seen.output.logits.detach() + embedding @ layer.T
    (fused,) = torch.autograd.grad(seen.criterion(logits, seen.batch.target).mean(), layer)
    factor = torch.tensor([2 / 3], dtype=torch.float64)
    wanted = misdirection(factor, single[None], fused)
    close(terms["cggm/direction"].values[0], wanted, 1e-9)
    objective = make_objective("cggm", model=make_model("mean"))  # 8 wide; encoders 6, 5, 4
    terms = only(objective).extra_losses(see(objective, make_batch()))
    assert list(terms) == [f"cggm/{name}" for name in WIDTHS]


def test_any_kind_of_target_is_scored() -> None:
    nan = math.nan
    targets = [OneOf("a", ("x", "y")), AnyOf("b", ("p", "q")), Number("c"), Level("d", (*"123",))]
    logits = torch.tensor([[2.0, 1.0, 1.0, -1.0, -0.5, 3.0, -3.0], [2, 1, 1, -1, -0.5, 3, 3]])
    labels = torch.tensor([[0.0, 1.0, 1.0, -2.0, 1.0], [nan, nan, nan, 1.0, 1.0]])
    points, labelled = points_of(logits, labels, targets)
    close(points, [(1 + 0.5 + 1 + 1) / 4, 0.0])
    assert labelled.tolist() == [True, True]
    points, labelled = points_of(logits, torch.full((2, 5), nan), targets)
    assert not labelled.any()
    assert (points == 0).all()


# ---- relearn


def rows(features: Any, target: Any, present: Any = None, weights: Any = None) -> Rows:
    count = len(target)
    present = np.ones(count, dtype=bool) if present is None else present
    return Rows(features, present, target, np.ones(count) if weights is None else weights)


def test_purity_is_that_of_the_clusters_and_counts_each_row_by_its_weight() -> None:
    generator = np.random.default_rng(0)
    target = generator.integers(3, size=60)
    apart = np.eye(3)[target] + 0.01 * generator.normal(size=(60, 3))
    assert purity(rows(apart, target), 3, 0) == 1.0
    mixed = purity(rows(generator.normal(size=(60, 3)), target), 3, 0)
    assert np.bincount(target).max() / 60 <= mixed < 0.8
    target, apart = np.array([0, 0, 1, 1, 0]), np.array([[0.0], [0.1], [1.0], [0.9], [0.95]])
    assert purity(rows(apart, target), 2, 0) == 0.8
    weights = np.array([1.0, 0, 1, 1, 2])  # in the upper cluster the classes weigh the same
    assert purity(rows(apart, target, weights=weights).used(), 2, 0) == pytest.approx(3 / 5)


def relearner(**settings: Any) -> tuple[Any, Any]:
    """A strategy after three steps with momentum and a moving average, and its trainer."""
    objective = make_objective("relearn", settings, model=make_model("mean"))
    trainer = make_trainer(objective, {**SGD, "train": {"ema": 0.9}})
    for step in range(3):
        trainer.step([make_batch()], StepContext(step))
    return only(objective), trainer


def distance(strategy: Any, weights: Any) -> torch.Tensor:
    flat = torch.cat([p.detach().flatten() for p in weights])
    return (flat - strategy.initial).norm()


def test_moving_back_shrinks_the_distance_to_the_start_every_so_many_epochs() -> None:
    strategy, trainer = relearner()
    share = math.tanh(0.6)
    assert share == pytest.approx(0.537, abs=5e-4)
    parameters = list(trainer.module.model.encoders.parameters())
    fusion = [p.clone() for p in trainer.module.model.fusion.parameters()]
    means = [trainer.ema.means[f"model.encoders.{name}"] for name, _ in named(trainer)]
    before, average_before = distance(strategy, parameters), distance(strategy, means)
    momentum = trainer.optimizer.state[parameters[0]]["momentum_buffer"].clone()
    assert before > 0.01
    for times in (1, 2):
        strategy.move(dict.fromkeys(WIDTHS, share), trainer)
        close(distance(strategy, parameters), (1 - share) ** times * before, 1e-9)
        close(distance(strategy, means), (1 - share) ** times * average_before, 1e-9)
    found = trainer.optimizer.state[parameters[0]]["momentum_buffer"]
    close(found, (1 - share) ** 2 * momentum, 1e-9)
    for weight, same in zip(trainer.module.model.fusion.parameters(), fusion, strict=True):
        assert torch.equal(weight, same)
    strategy, trainer = relearner(every=2, times=2)
    due = []
    for epoch in range(9):
        before = int(strategy.resets)
        strategy.begin_epoch(trainer, make_loaders(), StepContext(epoch=float(epoch)))
        due += [epoch] * (int(strategy.resets) > before)
    assert due == [2, 4]


def named(trainer: Any) -> list[tuple[str, torch.nn.Parameter]]:
    return list(trainer.module.model.encoders.named_parameters())


def test_only_the_encoder_with_a_gap_moves_and_equal_purities_move_none() -> None:
    strategy, trainer = relearner(every=1, times=1)
    before = {name: p.detach().clone() for name, p in named(trainer)}
    strategy.move({"image": 0.0, "text": 0.5, "audio": 0.0}, trainer)
    for name, parameter in named(trainer):
        assert torch.equal(parameter, before[name]) == (not name.startswith("text."))
    loaders = make_loaders()
    loaders["val"] = loaders["train"]  # equal rows, equal purities
    before = {name: p.detach().clone() for name, p in named(trainer)}
    strategy.begin_epoch(trainer, loaders, StepContext(epoch=1.0))
    assert strategy.resets == 1
    assert all(torch.equal(parameter, before[name]) for name, parameter in named(trainer))


def test_the_share_follows_from_both_purities_and_is_0_with_too_few_rows() -> None:
    strategy, _ = relearner(strength=3.0, clusters=2)
    generator = np.random.default_rng(0)
    target = generator.integers(2, size=40)
    train = rows(np.eye(2)[target], target)
    val = rows(generator.normal(size=(40, 2)), target)
    seed = strategy.draw(0, 0).initial_seed() % 2**32
    gap = 1.0 - purity(val, 2, seed)
    assert gap > 0.1
    assert strategy.share(train, val) == pytest.approx(math.tanh(3 * gap))
    few = np.arange(40) < 3
    assert strategy.share(train, val._replace(present=few)) == 0.0
    assert strategy.share(train, val._replace(weights=1.0 * few)) == 0.0


def test_only_the_moved_encoders_schedule_restarts_and_a_checkpoint_keeps_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for restart in (False, True):
        strategy, trainer = relearner(every=2, restart=restart)
        assert trainer.restarts() == {}
        before = {key: x.clone() for key, x in trainer.module.state_dict().items()}
        monkeypatch.setattr(strategy, "share", lambda *_, seed: [0.0, 0.4, 0.0][seed])
        strategy.begin_epoch(trainer, make_loaders(), StepContext(epoch=2.0))
        assert trainer.restarts() == ({"text": 2} if restart else {})
        plan = phased(OptimConfig(warmup=0.0), [Phase("train", 1.0)], 12, 3)
        set_rates(trainer.optimizer, plan(6, (), trainer.restarts())[1])
        found = rates(trainer.optimizer)
        assert found["image"] == pytest.approx(0.05)
        assert found["text"] == pytest.approx(0.1 if restart else 0.05)
        state = {key: x.clone() for key, x in trainer.module.state_dict().items()}
        key = next(key for key in state if key.endswith("_extra_state"))
        assert len(state[key]) == len(strategy.initial) + 3 * restart
        _, other = relearner(every=2, restart=restart)
        other.module.load_state_dict(state)
        assert other.restarts() == trainer.restarts()
        assert torch.equal(only(other.module).initial, strategy.initial)  # type: ignore[arg-type]
        other.module.load_state_dict(before)
        assert other.restarts() == {}
