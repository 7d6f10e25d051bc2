"""The strategies that decide how fast each encoder learns, held to their formulas."""

from __future__ import annotations

import math
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fusionzoo.config import OptimConfig
from fusionzoo.structures import Features, Phase, StepContext, keep_only
from fusionzoo.targets import AnyOf, Level, Number, OneOf
from fusionzoo.training.balance import LossTerm
from fusionzoo.training.balance.cggm import misdirection, modulation, points_of
from fusionzoo.training.balance.mla import shrink
from fusionzoo.training.balance.mmpareto import weigh
from fusionzoo.training.balance.ogm_ge import damping, unimodal_logits
from fusionzoo.training.balance.pmr import PMR, distances, lag
from fusionzoo.training.balance.relearn import Rows, purity
from fusionzoo.training.objective import Objective
from fusionzoo.training.optim import rates, set_rates
from fusionzoo.training.schedules import phased
from fusionzoo.training.trainer import Trainer
from helpers.strategies import (
    CLASSES,
    ROWS,
    TARGETS,
    WIDTHS,
    close,
    criterion,
    make_batch,
    make_loaders,
    make_model,
    make_objective,
    make_trainer,
    mean,
    only,
    see,
    take,
)

Gradients = dict[str, torch.Tensor]


def step_gradients(objective: Objective, steps: int = 1, absent: Any = ()) -> Gradients:
    """What gradient descent at rate 1 changes in the last of some steps."""
    objective.criterion = criterion  # type: ignore[method-assign, assignment]
    optim = {"name": "sgd", "lr": 1.0, "settings": {"momentum": 0}, "weight_decay": 0, "clip": None}
    trainer = make_trainer(objective, {"optim": optim})
    for step in range(steps):
        before = {n: p.detach().clone() for n, p in objective.model.named_parameters()}
        trainer.step([make_batch(list(absent))], StepContext(step, step / 10))
    return {n: before[n] - p.detach() for n, p in objective.model.named_parameters()}


# ---- ogm_ge


@pytest.mark.parametrize(
    "fusion", [("concat", {"hidden": ()}), ("sum", {}), ("mean", {}), ("late_mean", {"own": True})]
)
def test_what_each_modality_adds_makes_up_the_logits_of_a_linear_fusion(fusion: Any) -> None:
    name, settings = fusion
    own = settings.pop("own", False)
    objective = make_objective("ogm_ge", model=make_model(name, **settings))
    for parameter in objective.model.fusion.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    seen = see(objective, make_batch([(0, 0), (1, 1), (1, 2), (3, 2)]))
    alone: Any = unimodal_logits(objective.model.fusion, seen)
    if own:
        wanted = torch.stack(list(seen.output.unimodal.values()), dim=1)
        close(alone, wanted)
        return
    present = seen.batch.present
    close(alone.masked_fill(~present[..., None], 0).sum(1), seen.output.logits)


def test_only_who_is_ahead_is_damped() -> None:
    scores, alpha = [0.9, 0.3, 0.45], 0.7
    wanted = []
    for m, own in enumerate(scores):
        rest = [x for n, x in enumerate(scores) if n != m]
        ratio = own / (sum(rest) / len(rest))
        wanted.append(1 - math.tanh(alpha * ratio) if ratio > 1 else 1.0)
    every = torch.ones(3, dtype=torch.bool)
    close(damping(torch.tensor(scores, dtype=torch.float64), every, alpha), wanted)
    close(damping(torch.full((3,), 0.4).double(), every, alpha), [1.0] * 3)
    unseen = torch.tensor([True, False, False])
    close(damping(torch.tensor([0.9, 5.0, 1.0]).double(), unseen, alpha), [1.0] * 3)


def test_the_encoder_that_is_ahead_gets_its_gradient_times_kappa_and_the_fusion_its_own() -> None:
    plain = step_gradients(make_objective(model=make_model("mean")))
    objective = make_objective("ogm_ge", {"noise": False, "alpha": 0.8}, model=make_model("mean"))
    seen = see(objective, make_batch([]))
    shares = unimodal_logits(objective.model.fusion, seen).softmax(-1)
    scores = [sum(float(shares[r, m, TARGETS[r]]) for r in range(ROWS)) for m in range(3)]
    found = step_gradients(objective)
    damped = 0
    for m, name in enumerate(WIDTHS):
        ratio = scores[m] / (sum(scores[:m] + scores[m + 1 :]) / 2)
        kappa = 1 - math.tanh(0.8 * ratio) if ratio > 1 else 1.0
        damped += kappa < 1
        for key in (k for k in found if k.startswith(f"encoders.{name}.")):
            close(found[key], kappa * plain[key])
    assert damped
    for key in (k for k in found if k.startswith("fusion.")):
        assert torch.equal(found[key], plain[key])


def test_noise_has_the_spread_of_the_gradient_and_no_mean() -> None:
    plain = step_gradients(make_objective(model=make_model("mean")))
    objective = make_objective("ogm_ge", {"alpha": 0.0}, model=make_model("mean"))
    one = only(objective)
    names = {n: list(e.parameters()) for n, e in objective.model.encoders.items()}
    key = "encoders.text.net.1.weight"
    weight = objective.model.get_parameter(key)
    draws, times = [], 400
    for step in range(times):
        one.tally.add(torch.ones(2, 3).double(), StepContext(step))  # type: ignore[operator, union-attr]
        for path, parameter in objective.model.named_parameters():
            parameter.grad = plain[path].clone()
        one.edit_gradients(names, StepContext(step))
        assert weight.grad is not None
        draws.append(weight.grad - plain[key])
    noise, spread = torch.stack(draws), plain[key].std()
    assert (noise.mean(0).abs() < 5 * spread / math.sqrt(times)).all()
    assert abs(noise.std() / spread - 1) < 0.02


# ---- agm


def coalition(objective: Objective, features: dict[str, Features], some: set[str]) -> torch.Tensor:
    return objective.model.fusion(keep_only(features, *some)).logits


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_shapley_shares_add_up_to_the_logits(count: int) -> None:
    names = {f"m{i}": 3 + i for i in range(count)}
    objective = make_objective("agm", {"samples": 3}, model=make_model("gmu", names)).eval()
    absent = [(0, 0), (1, count - 1), *((2, c) for c in range(count))]
    seen = see(objective, make_batch(absent, names))
    shares: Any = only(objective).shapley(seen)  # type: ignore[operator]
    nothing = coalition(objective, seen.features, set())
    close(shares.sum(1) + nothing, seen.output.logits)
    assert (shares.masked_select(~seen.batch.present[..., None]) == 0).all()


def test_shapley_shares_are_the_means_over_all_orders_and_terms_of_a_sum() -> None:
    objective = make_objective("agm").eval()
    seen = see(objective, make_batch([]))
    wanted = torch.zeros(ROWS, 3, CLASSES).double()
    for order in permutations(WIDTHS):
        for place, name in enumerate(order):
            before = coalition(objective, seen.features, set(order[:place]))
            after = coalition(objective, seen.features, set(order[: place + 1]))
            wanted[:, list(WIDTHS).index(name)] += (after - before) / 6
    close(only(objective).shapley(seen), wanted)  # type: ignore[operator]
    objective = make_objective("agm", model=make_model("sum")).eval()
    fusion: Any = objective.model.fusion
    seen = see(objective, make_batch([]))
    shares: Any = only(objective).shapley(seen)  # type: ignore[operator]
    nothing = coalition(objective, seen.features, set())
    for m, name in enumerate(WIDTHS):
        close(shares[:, m], coalition(objective, seen.features, {name}) - nothing)
    assert (fusion.null == 0).all()


def test_the_first_batch_is_its_own_reference_and_learns_as_plain_training_does() -> None:
    plain = step_gradients(make_objective())
    found = step_gradients(make_objective("agm"))
    for key, gradient in plain.items():
        close(found[key], gradient)


@pytest.mark.parametrize("restart", [True, False])
def test_running_means_begin_anew_in_an_epoch_unless_they_run_on(restart: bool) -> None:
    objective = make_objective("agm", {"restart": restart})
    strategy: Any = only(objective)
    seen = see(objective, make_batch([]))
    for epoch in (0.0, 1.0):
        strategy.edit_output(seen._replace(epoch=epoch))
    assert strategy.losses[1].tolist() == [ROWS if restart else 2 * ROWS] * len(WIDTHS)


def test_the_gradient_of_each_share_is_scaled_and_the_answer_is_not() -> None:
    objective = make_objective("agm")
    one: Any = only(objective)
    one.losses.copy_(torch.tensor([[9.0, 5.0, 2.0], [4.0, 4.0, 4.0]]))
    one.epoch.fill_(0)
    batch = make_batch([(0, 0), (1, 2)])
    seen = see(objective, batch)
    state = torch.get_rng_state()
    objective.train()
    answer = one.edit_output(seen)
    assert torch.equal(answer.logits, seen.output.logits)
    assert torch.equal(state, torch.get_rng_state())
    assert all(module.training for module in objective.model.fusion.modules())
    # By hand: running means with this batch in them, against this batch.
    shares = one.shapley(seen)
    own = torch.stack([criterion(x, TARGETS) for x in shares.detach().unbind(1)], 1)
    sums, rows = own.masked_fill(~batch.present, 0).sum(0), batch.present.sum(0)
    now = sums / rows
    run = (sums + torch.tensor([9.0, 5.0, 2.0])) / (rows + 4)
    kappa = []
    for m in range(3):
        r, ran = (math.exp((sum(x.tolist()) - float(x[m])) / 2 - float(x[m])) for x in (now, run))
        kappa.append(math.exp(min(ran - r, 10)))
    assert max(abs(k - 1) for k in kappa) > 0.05
    parameters = [p for p in objective.model.parameters() if p.requires_grad]
    loss = criterion(answer.logits, TARGETS).mean()
    ours = torch.autograd.grad(loss, parameters, retain_graph=True)
    nothing = coalition(objective, seen.features, set())
    parts = [k * shares[:, m] + (1 - k) * shares[:, m].detach() for m, k in enumerate(kappa)]
    mixed = nothing + sum(parts)
    wanted = torch.autograd.grad(criterion(mixed, TARGETS).mean(), parameters)
    for x, y in zip(ours, wanted, strict=True):
        close(x, y)


# ---- pmr


def test_prototypes_are_class_means_with_momentum_whatever_the_batches() -> None:
    found = []
    for parts in ([slice(None)], [slice(5, None), slice(0, 5)]):
        objective = make_objective("pmr", {"momentum": 0.8})
        one: Any = only(objective)
        old = torch.full((CLASSES, 5), 2.0).double()
        one.prototypes_text.copy_(old)
        one.known_text[:2] = True
        batch = make_batch([(0, 1), (4, 1), (8, 1)])  # all of class 0 lack text
        for part in parts:
            one.extra_losses(see(objective, take(batch, part)))
        one.begin_epoch(None, {}, StepContext())
        found.append(one.prototypes_text.clone())
    text = see(objective, batch).features["text"].pooled
    means = torch.stack([text[k::CLASSES].mean(0) for k in range(CLASSES)])
    close(found[0], found[1])
    close(found[0][0], old[0])  # not seen: the old one
    close(found[0][1], 0.8 * means[1] + 0.2 * old[1])
    close(found[0][2], means[2])  # the first time
    assert one.known_text.all()


def test_the_modality_that_lags_gets_a_prototype_loss_and_equal_ones_nothing() -> None:
    objective = make_objective("pmr", {"alpha": 0.5})
    one: Any = only(objective)
    batch = make_batch([(0, 1), (5, 0)])
    one.extra_losses(see(objective, batch))
    one.begin_epoch(None, {}, StepContext())
    for name in WIDTHS:
        one.get_buffer(f"prototypes_{name}").add_(0.3 * torch.randn(CLASSES, one.widths[name]))
    seen = see(objective, batch)
    losses, scores = [], []
    for m, name in enumerate(WIDTHS):
        rows = [r for r in range(ROWS) if batch.present[r, m]]
        x, c = seen.features[name].pooled, one.get_buffer(f"prototypes_{name}")
        logits = -((x[rows, None] - c).square().sum(-1) + 1e-6).sqrt()
        losses.append(F.cross_entropy(logits, TARGETS[rows]))
        scores.append(logits.softmax(1)[range(len(rows)), TARGETS[rows]].mean())
    terms, chances = one.extra_losses(seen), [x.item() for x in scores]
    weights = []
    for m, name in enumerate(WIDTHS):
        ratio = chances[m] / ((sum(chances) - chances[m]) / 2)
        weight = 0.5 * min(max(1 / ratio - 1, 0), 1)
        weights.append(weight)
        close(mean(terms[f"pmr/{name}"]), weight * losses[m])
    assert max(weights) > 0
    assert min(weights) == 0
    close(lag(torch.tensor([[3.0, 3.0, 3.0], [4.0, 4.0, 4.0]])), [0.0] * 3)
    close(lag(torch.tensor([[3.0, 0.0], [4.0, 0.0]])), [0.0] * 2)
    centres = torch.randn(3, 4).double()
    x = centres[:1].clone().requires_grad_()
    distances(x, centres)[0, 0].backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    objective = make_objective("pmr")
    assert isinstance(only(objective), PMR)
    terms = only(objective).extra_losses(see(objective, make_batch()))  # no prototypes yet
    assert all(mean(term).item() == 0 for term in terms.values())


# ---- mmpareto


def pair(cosine: float, lengths: tuple[float, float]) -> tuple[list[Any], list[Any]]:
    draw = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(10, 2, generator=draw).double())[0]
    joint = lengths[0] * basis[:, 0]
    own = lengths[1] * (cosine * basis[:, 0] + math.sqrt(1 - cosine**2) * basis[:, 1])
    return [joint[:6].reshape(2, 3), joint[6:]], [own[:6].reshape(2, 3), own[6:]]


def flat(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([x.reshape(-1) for x in parts])


def test_gradients_that_agree_are_added_and_one_of_zero_leaves_the_other() -> None:
    joint, own = pair(0.3, (2.0, 0.5))
    one = only(make_objective("mmpareto", {"gamma": 1.0}))
    close(flat(one.combine_gradients(joint, own)), flat(joint) + flat(own))
    gamma = only(make_objective("mmpareto"))
    close(flat(gamma.combine_gradients(joint, own)), 1.5 * (flat(joint) + flat(own)))
    nothing = [torch.zeros_like(x) for x in joint]
    close(flat(one.combine_gradients(joint, nothing)), flat(joint))
    close(flat(one.combine_gradients(nothing, joint)), flat(joint))
    close(flat(one.combine_gradients(nothing, nothing)), flat(nothing))


@pytest.mark.parametrize("lengths", [(1.0, 1.0), (2.0, 1.5), (1.0, 20.0)])
@pytest.mark.parametrize("cosine", [-0.3, -0.9])
def test_gradients_that_conflict_make_a_direction_that_hurts_neither(
    cosine: float, lengths: tuple[float, float]
) -> None:
    joint, own = pair(cosine, lengths)
    j, u, _ = weigh(joint, own)
    close(j + u, 2.0)
    shortest = (j * flat(joint) + u * flat(own)) / 2
    tried = [k * flat(joint) + (1 - k) * flat(own) for k in torch.linspace(0, 1, 1001).double()]
    assert all(shortest.norm() <= x.norm() + 1e-12 for x in tried)
    if 0 < j < 2:
        close(shortest @ flat(joint), shortest @ shortest)
        close(shortest @ flat(own), shortest @ shortest)
    found = flat(only(make_objective("mmpareto", {"gamma": 1.0})).combine_gradients(joint, own))
    assert found @ flat(joint) >= -1e-12
    assert found @ flat(own) >= -1e-12
    assert found.norm() >= (flat(joint) + flat(own)).norm() - 1e-12
    close(found / found.norm(), shortest / shortest.norm())
    doubled = only(make_objective("mmpareto", {"gamma": 1.0}))
    scaled = doubled.combine_gradients([8 * x for x in joint], [8 * x for x in own])
    close(flat(scaled), 8 * found)


def test_encoders_without_conflict_learn_as_with_auxiliary_losses() -> None:
    aux = make_objective("unimodal_aux", {"weight": 0.7})
    pareto = make_objective("mmpareto", {"gamma": 1.0, "weight": 0.7})
    heads: Any = only(pareto).heads
    heads.load_state_dict(only(aux).heads.state_dict())  # type: ignore[union-attr, operator]
    seen = see(aux, make_batch([]))
    fused = criterion(seen.output.logits, TARGETS).mean()
    agree = []
    for name, term in only(aux).extra_losses(seen).items():
        own = list(aux.model.encoders[name.removeprefix("unimodal_aux/")].parameters())
        grads = [
            flat(list(torch.autograd.grad(x, own, retain_graph=True))) for x in (fused, mean(term))
        ]
        if grads[0] @ grads[1] > 0:
            agree.append(name.removeprefix("unimodal_aux/"))
    assert agree
    ours, theirs = step_gradients(pareto), step_gradients(aux)
    for key in ours:
        if key.startswith("fusion.") or key.split(".")[1] in agree:
            close(ours[key], theirs[key])


def every(values: torch.Tensor) -> LossTerm:
    return LossTerm(values, torch.ones(len(values), dtype=torch.bool))


# ---- mla


def test_the_projector_is_that_of_recursive_least_squares() -> None:
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(6, 4, generator=draw).double()
    alpha, projector = 0.3, torch.eye(4).double()
    for r in rows:
        projector = shrink(projector, r, alpha)
    wanted = torch.linalg.inv(torch.eye(4).double() + rows.T @ rows / alpha)
    close(projector, wanted)
    close(projector, projector.T)
    assert (torch.linalg.eigvalsh(projector) >= -1e-12).all()
    gradient = torch.randn(3, 4, generator=draw).double()
    for r in rows:
        assert (gradient @ projector @ r).norm() < (gradient @ r).norm()


def heads_of_turns(
    trainer: Trainer, context: StepContext
) -> list[tuple[str | None, dict[str, Any]]]:
    """Make a step, and return the model's weights after each of its turns."""
    seen: list[tuple[str | None, dict[str, Any]]] = []
    update = trainer._update_weights

    def noted(context: StepContext, *rest: Any) -> Any:
        done = update(context, *rest)
        state = {n: p.detach().clone() for n, p in trainer.module.named_parameters()}
        seen.append((context.turn, state))
        return done

    trainer._update_weights = noted  # type: ignore[method-assign]
    trainer.step([make_batch()], context)
    trainer._update_weights = update  # type: ignore[method-assign]
    return seen


def moved(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    return {name for name, x in before.items() if not torch.equal(x, after[name])}


@pytest.mark.parametrize("joint", [False, True])
def test_in_a_turn_nothing_moves_that_belongs_to_the_other_modalities(joint: bool) -> None:
    objective = make_objective("mla", {"joint": joint}, model=make_model("mean"))
    trainer = make_trainer(objective)  # AdamW: momentum and decay
    trainer.step([make_batch()], StepContext(0))
    before = {n: p.detach().clone() for n, p in objective.named_parameters()}
    turns = heads_of_turns(trainer, StepContext(1))
    assert [turn for turn, _ in turns] == [*WIDTHS, *([None] if joint else [])]
    for turn, after in turns:
        changed = moved(before, after)
        assert "model.fusion.head.weight" in changed
        assert any(f"encoders.{turn}." in name for name in changed) or turn is None
        for other in WIDTHS:
            if turn not in (None, other):
                assert not any(other in name.split(".") for name in changed)
        before = after


def test_the_head_learns_along_the_projection_of_its_gradient() -> None:
    optim = {"name": "sgd", "lr": 1.0, "settings": {"momentum": 0}, "weight_decay": 0, "clip": None}
    objective = make_objective("mla", {"alpha": 0.2}, model=make_model("mean"))
    objective.criterion = criterion  # type: ignore[method-assign, assignment]
    trainer = make_trainer(objective, {"optim": optim})
    fusion: Any = objective.model.fusion
    projector, batch = torch.eye(8).double(), make_batch()
    weight = fusion.head.weight.detach().clone()
    twin = make_objective(model=make_model("mean"))
    twin.load_state_dict(objective.state_dict(), strict=False)
    for name, state in heads_of_turns(trainer, StepContext(0)):
        column = list(WIDTHS).index(str(name))
        rows = batch.present[:, column].nonzero()[:, 0]
        some = batch._replace(present=batch.present & (torch.arange(3) == column)).take(rows)
        output = twin.model(some)
        loss = criterion(output.logits, TARGETS[rows]).mean()
        (gradient,) = torch.autograd.grad(loss, twin.model.fusion.head.weight)  # type: ignore[union-attr]
        close(weight - state["model.fusion.head.weight"], gradient @ projector)
        r = output.embedding.detach().mean(0)
        along = projector @ r
        projector = projector - along[:, None] * along[None] / (0.2 + r @ along)
        twin.load_state_dict(state, strict=False)
        weight = state["model.fusion.head.weight"]
    close(only(objective).projector, projector)
    assert trainer.rows == ROWS  # not once for each turn


# ---- reconboost


def boosted(context: StepContext, **settings: Any) -> tuple[Any, Any, LossTerm]:
    objective = make_objective("reconboost", settings, model=make_model("mean")).eval()
    one: Any = only(objective)
    context = context._replace(turn=one.turns(context)[0])
    seen = see(objective, make_batch(), context)
    return objective, seen, one.main_loss(seen, every(criterion(seen.output.logits, TARGETS)))


def alone(objective: Any, seen: Any, name: str) -> torch.Tensor:
    return objective.model.fusion(keep_only(seen.features, name)).logits


@pytest.mark.parametrize("epoch", [0.0, 2.5, 5.0])
def test_a_stage_learns_what_the_others_get_wrong(epoch: float) -> None:
    objective, seen, term = boosted(StepContext(0, epoch), epochs=1, rectify=1)
    if seen.turn is None:
        close(term.values, criterion(seen.output.logits, TARGETS))
        return
    stage, present = int(epoch / 2), seen.batch.present
    m = stage % 3
    assert seen.turn == list(WIDTHS)[m]
    z = [alone(objective, seen, name) for name in WIDTHS]
    for row in range(ROWS):
        if not present[row, m]:
            assert not term.mask[row]
            continue
        others = [z[n][row] for n in range(3) if n != m and present[row, n]]
        rest = sum(others, torch.zeros(CLASSES))
        factor = 5 - 1 * rest.softmax(0)[TARGETS[row]]
        wanted = -factor * z[m][row].log_softmax(0)[TARGETS[row]] / CLASSES
        before = (stage - 1) % 3
        if stage and present[row, before]:
            gap = z[m][row].softmax(0) - z[before][row].softmax(0)
            wanted = wanted + 0.5 * (gap**2).mean()
        close(term.values[row], wanted)


def test_agreement_has_a_gradient_for_the_modality_that_learns_alone() -> None:
    grads = []
    for agreement in (0.0, 0.5):
        objective, _, term = boosted(StepContext(0, 2.0), epochs=1, rectify=1, agreement=agreement)
        term.values[term.mask].mean().backward()
        encoders = objective.model.encoders
        grads.append([p.grad.clone() for p in encoders["text"].parameters()])
        for other in ("image", "audio"):
            assert all((p.grad == 0).all() for p in encoders[other].parameters())
    assert any(not torch.allclose(x, y) for x, y in zip(*grads, strict=True))


def test_a_confident_rest_changes_the_weight_by_lambda2() -> None:
    objective = make_objective("reconboost", model=make_model("late_mean")).eval()
    one: Any = only(objective)
    now = StepContext(0, 0.0, turn="image")
    heads: Any = objective.model.fusion.heads
    for right in (True, False):
        for name in ("text", "audio"):
            heads[name].weight.data.zero_()
            heads[name].bias.data.copy_(50.0 * F.one_hot(torch.tensor(1), CLASSES))
        batch = make_batch([])
        batch = batch._replace(target=torch.full((ROWS,), 1 if right else 2))
        seen = see(objective, batch, now)
        term = one.main_loss(seen, every(torch.zeros(ROWS).double()))
        own = F.cross_entropy(alone(objective, seen, "image"), batch.target, reduction="none")
        close(term.values * CLASSES / own, [4.0 if right else 5.0] * ROWS)


def test_a_stage_leaves_the_other_encoders_bit_for_bit_and_then_everything_learns() -> None:
    objective = make_objective("reconboost", model=make_model("mean"))
    trainer = make_trainer(objective)
    names = iter([*WIDTHS, "image"])
    for half in range(8):
        before = {n: p.detach().clone() for n, p in objective.named_parameters()}
        trainer.step([make_batch()], StepContext(half, float(half)))
        after = dict(objective.named_parameters())
        learnt = {n.split(".")[2] for n in moved(before, after) if n.startswith("model.encoders.")}
        assert learnt == ({next(names)} if half % 2 == 0 else set(WIDTHS))


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
