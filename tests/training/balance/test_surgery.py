"""The strategies that decide how fast each encoder learns, held to their formulas."""

from __future__ import annotations

import math
from itertools import permutations
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fusionzoo.structures import Features, StepContext, keep_only
from fusionzoo.training.balance.mmpareto import weigh
from fusionzoo.training.balance.ogm_ge import damping, unimodal_logits
from fusionzoo.training.balance.pmr import PMR, distances, lag
from fusionzoo.training.objective import Objective
from helpers.strategies import (
    CLASSES,
    ROWS,
    TARGETS,
    WIDTHS,
    close,
    criterion,
    make_batch,
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
