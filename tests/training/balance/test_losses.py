"""The strategies that add a loss or edit the batch, held to their formulas."""

from __future__ import annotations

import math
from itertools import pairwise, permutations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fusionzoo as fz
from fusionzoo.config import RunConfig, from_settings
from fusionzoo.errors import FusionZooError
from fusionzoo.machine.distributed import World
from fusionzoo.structures import Batch, FusionOutput, StepContext, keep_only
from fusionzoo.training.balance import BALANCE, LossTerm, MeanLoss, StrategyInputs
from fusionzoo.training.balance._shared import SubsetDraws, hidden_except, nt_xent
from fusionzoo.training.balance.curriculum_dropout import hidden_shares, solve_rates
from fusionzoo.training.balance.gblend import GBlend, blend
from fusionzoo.training.balance.matryoshka import halves, prefix_sizes, with_matryoshka
from fusionzoo.training.balance.modality_dropout import ModalityDropout
from fusionzoo.training.balance.more_fewer import average
from fusionzoo.training.balance.opm import hiding_rates
from fusionzoo.training.balance.subset_distill import divergence, margin_aware
from helpers.strategies import (
    ALONE,
    CLASSES,
    ROWS,
    SOME,
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
    save_teachers,
    see,
)

# ---- modality_dropout


def dropped(present: torch.Tensor, rate: Any, rows: torch.Tensor, epoch: float = 0) -> torch.Tensor:
    names = dict.fromkeys(["image", "text", "audio"][: present.shape[1]], 2)
    setting = StrategyInputs(make_model("mean", names), torch.zeros(len(present)), 0, World())
    one = ModalityDropout(setting, rate=rate)
    batch = Batch([], {}, present[rows], None)
    return one.edit_batch(batch, rows, StepContext(0, epoch)).present


def test_each_modality_stays_as_often_as_redrawing_says_by_sample_and_epoch() -> None:
    count = 20000
    for modalities, q in ((3, 0.5), (2, 0.3)):
        every = torch.ones(count, modalities, dtype=torch.bool)
        kept = dropped(every, q, torch.arange(count))
        wanted = (1 - q) / (1 - q**modalities)
        error = math.sqrt(wanted * (1 - wanted) / count)
        assert kept.any(1).all()
        assert ((kept.double().mean(0) - wanted).abs() < 4 * error).all()
    draw = torch.Generator().manual_seed(0)
    present = torch.rand(500, 3, generator=draw) < 0.6
    rows = torch.randperm(500, generator=draw)
    whole = dropped(present, 0.5, torch.arange(500))
    assert not (whole & ~present).any()
    assert torch.equal(whole.any(1), present.any(1))
    assert torch.equal(dropped(present, 0.5, rows), whole[rows])
    assert not torch.equal(dropped(present, 0.5, torch.arange(500), 1.0), whole)
    one = dropped(present, {"text": 0.5}, torch.arange(500))
    assert torch.equal(one[:, [0, 2]] & present.any(1)[:, None], present[:, [0, 2]])


# ---- unimodal_aux, umt


def gradients(loss: torch.Tensor, parameters: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    found = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters, strict=True)]


def test_auxiliary_losses_add_each_head_s_gradient_over_the_rows_that_count() -> None:
    weights = {"image": 0.5, "audio": 2.0}
    objective = make_objective("unimodal_aux", {"weight": weights})
    one, seen = only(objective), see(objective, make_batch())
    terms = one.extra_losses(seen)
    assert set(terms) == {"unimodal_aux/image", "unimodal_aux/audio"}
    for name, weight in weights.items():
        wanted, rows = torch.zeros(()).double(), 0
        head, own = one.heads.heads[name], seen.features[name]  # type: ignore[union-attr, index]
        for row in range(ROWS):
            if own.mask[row].any():
                z = head.weight @ own.pooled[row] + head.bias  # type: ignore[union-attr, operator]
                wanted = wanted + weight * (z.logsumexp(0) - z[TARGETS[row]])
                rows += 1
        term = mean(terms[f"unimodal_aux/{name}"])
        close(term, wanted / rows)
        parameters = list(objective.model.encoders[name].parameters())
        theirs = gradients(wanted / rows, parameters)
        for x, y in zip(gradients(term, parameters), theirs, strict=True):
            close(x, y)


def test_nobody_there_means_no_loss(tmp_path: Path) -> None:
    absent = [(row, 1) for row in range(ROWS)]
    for name in ("unimodal_aux", "umt"):
        settings = save_teachers(tmp_path) if name == "umt" else {}
        objective = make_objective(name, settings)
        term = only(objective).extra_losses(see(objective, make_batch(absent)))[f"{name}/text"]
        close(mean(term), 0.0)


def test_a_student_is_pulled_to_its_frozen_teacher(tmp_path: Path) -> None:
    settings = save_teachers(tmp_path)
    objective = make_objective("umt", {**settings, "weight": 3.0})
    one, batch = only(objective), make_batch()
    teachers: Any = one.teachers
    before = {n: [p.clone() for p in t.parameters()] for n, t in teachers.items()}
    assert not list(one.parameters())
    assert not one.state_dict()
    seen = see(objective, batch)
    for name, term in one.extra_losses(seen).items():
        m = name.removeprefix("umt/")
        rows = [r for r in range(ROWS) if batch.present[r, list(WIDTHS).index(m)]]
        taught = teachers[m].net(batch.inputs[m]["values"])
        gaps = [((seen.features[m].pooled[r] - taught[r]) ** 2).mean() for r in rows]
        close(mean(term), 3 * sum(gaps) / len(rows))
    make_trainer(objective).step([batch], StepContext())
    for name, teacher in teachers.items():
        assert all(map(torch.equal, before[name], teacher.parameters()))
        objective.model.encoders[name].load_state_dict(teacher.state_dict())
    for term in one.extra_losses(see(objective, batch)).values():
        close(mean(term), 0.0)


# ---- contrastive_align


def aligner(mode: str = "clip", **settings: Any) -> Any:
    return only(make_objective("contrastive_align", {"mode": mode, "dim": 4, **settings}))


def test_contrastive_losses_of_matched_orthonormal_rows_have_a_closed_form() -> None:
    count, basis = 4, torch.eye(4).double()
    for s in (1.0, 7.0, 100.0):
        clip, sigmoid = aligner(), aligner("siglip")
        for one in (clip, sigmoid):
            one.scale.data.fill_(math.log(s))
        close(clip.loss(basis, basis), [math.log(math.exp(s) + count - 1) - s] * count)
        sigmoid.bias.data.fill_(-3.0)
        softplus = torch.nn.functional.softplus
        wanted = softplus(torch.tensor(-(s - 3.0)).double())
        wanted = wanted + (count - 1) * softplus(torch.tensor(-3.0).double())
        close(sigmoid.loss(basis, basis), wanted.expand(count))
    same = basis[:1].expand(count, -1)
    close(aligner().loss(same, same), [math.log(count)] * count)


def test_a_temperature_at_its_limit_still_learns_and_a_step_never_leaves_it_above() -> None:
    one = aligner()
    limit = math.log(100)
    with torch.no_grad():
        one.scale.fill_(limit + 1)
    left = torch.eye(4).double()
    one.loss(left, left.flip(0)).sum().backward()  # all wrong: a lower scale costs less
    assert one.scale.grad > 0
    objective = make_objective("contrastive_align", {"dim": 4})
    trained = only(objective)
    with torch.no_grad():
        trained.scale.fill_(limit + 1)
    trainer = make_trainer(objective, {"train": {"ema": 0.5}})
    trainer.step([make_batch()])
    assert trained.scale.item() == pytest.approx(limit)
    trainer.step([make_batch()])
    assert trained.scale.item() <= limit


def test_contrastive_losses_do_not_depend_on_rotation_order_or_side() -> None:
    draw = torch.Generator().manual_seed(0)
    left, right = torch.randn(2, 6, 4, generator=draw).double()
    turn = torch.linalg.qr(torch.randn(4, 4, generator=draw).double())[0]
    order = torch.randperm(6, generator=draw)
    for mode in ("clip", "siglip"):
        one = aligner(mode)
        loss = one.loss(left, right)
        close(one.loss(left @ turn, right @ turn), loss)
        close(one.loss(left[order], right[order]), loss[order])
        close(one.loss(right, left).mean(), loss.mean())
        few = one.loss(left[:0], right[:0])
        close(few, [0.0])
        few.sum().backward()
        assert one.scale.grad is not None


def test_pairs_are_rows_that_have_both_and_an_anchor_has_a_part_in_all() -> None:
    objective = make_objective("contrastive_align", {"dim": 4, "mode": "imagebind"})
    one, seen = only(objective), see(objective, make_batch())
    terms = one.extra_losses(seen)
    assert set(terms) == {"contrastive_align/image-text", "contrastive_align/image-audio"}
    both = seen.batch.present[:, 0] & seen.batch.present[:, 1]
    vectors = one.embed(seen.features)  # type: ignore[operator]
    assert (vectors["image"][~seen.batch.present[:, 0]] == 0).all()
    s = one.scale.exp()  # type: ignore[operator]
    scores = s * vectors["image"][both] @ vectors["text"][both].T
    n = int(both.sum())
    wanted = -sum(
        x[i, i] - x[i].exp().sum().log() for x in (scores, scores.T) for i in range(n)
    ) / (2 * n)
    close(mean(terms["contrastive_align/image-text"]), wanted)


# ---- cca_loss


def correlator(ridge: float, **settings: Any) -> Any:
    return only(make_objective("cca_loss", {"dim": 3, "ridge": ridge, **settings}))


def classical(x: np.ndarray, y: np.ndarray) -> float:
    """The sum of canonical correlations by QR and SVD of the centred data (Bjorck and Golub)."""
    q, p = (np.linalg.qr(z - z.mean(0))[0] for z in (x, y))
    return float(np.linalg.svd(q.T @ p, compute_uv=False).sum())


def test_correlations_are_the_classical_ones_and_ignore_invertible_maps() -> None:
    draw = torch.Generator().manual_seed(0)
    x, noise = torch.randn(2, 40, 3, generator=draw).double()
    first, second = torch.randn(2, 3, 3, generator=draw).double()
    y = x @ first + 2 * noise
    one = correlator(0.0)
    close(one.correlation(x, y), classical(x.numpy(), y.numpy()))
    close(one.correlation(x @ second + 5, y @ first), one.correlation(x, y), 1e-8)
    close(one.correlation(x, x @ first), 3.0)
    assert 0 <= one.correlation(x, noise) <= 3
    close(correlator(0.0, top=1).correlation(x, x @ first), 1.0)
    assert correlator(1e-3).correlation(x, y) < one.correlation(x, y)


def test_correlation_has_gradients_where_values_repeat_and_is_nan_where_not_finite() -> None:
    x = torch.randn(10, 3).double().requires_grad_()
    one = correlator(1e-3)
    one.correlation(x, x * 1.0).backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert torch.autograd.gradcheck(one.correlation, (x, torch.randn(10, 3).double()))
    few = one.correlation(x[:3], x[:3])
    close(few, 0.0)
    assert few.requires_grad
    x = torch.randn(9, 3)
    x[4, 1] = torch.inf
    assert correlator(0.0).correlation(x, torch.randn(9, 3)).isnan()


def test_cca_takes_the_rows_that_have_both() -> None:
    objective = make_objective("cca_loss", {"dim": 2, "ridge": 0.0})
    one, seen = only(objective), see(objective, make_batch(SOME))
    rows = seen.batch.present[:, 0] & seen.batch.present[:, 2]
    maps: Any = one.project
    x, y = (maps[m](seen.features[m].pooled[rows]).detach().numpy() for m in ("image", "audio"))
    close(mean(one.extra_losses(seen)["cca_loss/image-audio"]), -0.1 * classical(x, y), 1e-8)


# ---- gblend


def test_blending_weights_are_the_best_there_are_for_the_fusion_and_each_head() -> None:
    draw = torch.Generator().manual_seed(0)
    gains, overfits = torch.rand(2, 4, generator=draw).double() + 0.2

    def worth(w: torch.Tensor) -> torch.Tensor:
        return (w @ gains) ** 2 / (w.square() @ overfits.square())

    found = blend(gains, overfits, 0.01)
    close(found.sum(), 1.0)
    tried = torch.rand(5000, 4, generator=draw).double()
    assert all(worth(w) <= worth(found) + 1e-12 for w in tried)
    close(blend(torch.ones(3).double(), torch.ones(3).double(), 0.1), [1 / 3] * 3)
    close(blend(torch.tensor([-1.0, 0.0]), torch.tensor([1.0, 1.0]), 0.1), [0.5, 0.5])
    close(blend(torch.tensor([1.0, 3.0]), torch.tensor([-1.0, -2.0]), 0.1), [0.25, 0.75])
    floored = blend(torch.tensor([1.0, 1.0]).double(), torch.tensor([-5.0, 1.0]).double(), 0.5)
    close(floored, [4 / 5, 1 / 5])
    for order in permutations(range(4)):
        close(blend(gains[list(order)], overfits[list(order)], 0.01), found[list(order)])
    objective = make_objective("gblend")
    one, seen = only(objective), see(objective, make_batch())
    assert isinstance(one, GBlend)
    one.weights.copy_(torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64))
    from fusionzoo.training.balance import LossTerm

    values = criterion(seen.output.logits, TARGETS)
    whole = LossTerm(values, torch.ones(ROWS, dtype=torch.bool))
    close(mean(one.main_loss(seen, whole)), 0.4 * values.mean())
    weights = [float(term.weight) for term in one.extra_losses(seen).values()]
    close(weights, [0.1, 0.2, 0.3])
    assert one.heads.heads["text"].out_features == CLASSES


def build(name: str, size: int = ROWS, modalities: int = 3, **settings: Any) -> Any:
    names = dict.fromkeys(["image", "text", "audio"][:modalities], 2)
    inputs = StrategyInputs(make_model("mean", names), torch.zeros(size).long(), 0, ALONE)
    return BALANCE[name].cls(inputs, **settings)


def draws(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).double()


# ---- curriculum_dropout


@pytest.mark.parametrize("modalities", [2, 3, 5])
def test_the_share_hidden_is_that_of_all_draws_with_something_left(modalities: int) -> None:
    rates = [0.5, 0.3, 0.2, 0.6, 0.4][:modalities]
    hidden, kept = torch.zeros(modalities), 0.0
    for hides in product([0, 1], repeat=modalities):
        chance = math.prod(q if h else 1 - q for q, h in zip(rates, hides, strict=True))
        if not all(hides):
            kept += chance
            hidden += chance * torch.tensor(hides)
    close(hidden_shares(rates), hidden / kept, 1e-6)
    close(solve_rates(hidden_shares(rates)), rates, 1e-6)


def test_a_target_is_met_and_one_that_cannot_be_is_refused() -> None:
    count = 20000
    one = build("curriculum_dropout", count, 2, target=0.4, ramp=0)
    close(list(one.rates.values()), [0.4 / 0.6] * 2, 1e-9)
    batch = Batch([], {}, torch.ones(count, 2, dtype=torch.bool), None)
    kept = one.edit_batch(batch, torch.arange(count), StepContext()).present
    error = math.sqrt(0.24 / count)
    assert ((kept.double().mean(0) - 0.6).abs() < 4 * error).all()
    with pytest.raises(FusionZooError, match="no sample loses all 2 modalities"):
        build("curriculum_dropout", 4, 2, target=0.5)


@pytest.mark.parametrize("schedule", ["linear", "exp", "step"])
def test_the_rate_rises_from_nothing_to_that_of_modality_dropout(schedule: str) -> None:
    one = build("curriculum_dropout", 100, rate=0.5, ramp=4, schedule=schedule)
    rates = [one.rates_at(StepContext(epoch=x / 2))[0] for x in range(11)]
    assert rates[0] == 0
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(0.5, abs=1e-4)
    batch, rows = Batch([], {}, torch.ones(100, 3, dtype=torch.bool), None), torch.arange(100)
    assert one.edit_batch(batch, rows, StepContext()) is batch
    at_once = build("curriculum_dropout", 100, rate=0.5, ramp=0, schedule=schedule)
    dropout = build("modality_dropout", 100, rate=0.5)
    for epoch in (0.0, 0.5, 3.0):
        now = StepContext(epoch=epoch)
        ours, theirs = (x.edit_batch(batch, rows, now).present for x in (at_once, dropout))
        assert torch.equal(ours, theirs)
        assert not ours.all()


def test_more_missing_in_validation_than_in_training_is_a_warning() -> None:
    class Loader:
        class dataset:
            present = torch.tensor([[True, False, True]] * 3 + [[True, True, True]])

    one = build("curriculum_dropout", 100, target=0.3, ramp=1)
    with pytest.warns(UserWarning, match=r"lacks text in 75% .* at most 30%"):
        one.begin_epoch(None, {"val": Loader}, StepContext())
    one.begin_epoch(None, {"val": Loader}, StepContext(epoch=1.0))  # said once


# ---- subsets


def test_proper_subsets_are_uniform_and_depend_on_row_and_epoch_alone() -> None:
    count = 12000
    present = torch.ones(count, 3, dtype=torch.bool)
    present[: count // 2, 2] = False
    present[0] = torch.tensor([True, False, False])
    chosen = SubsetDraws(count, 3, seed=4)
    subset, drawable = chosen.proper(present, torch.arange(count), 0)
    assert not drawable[0]
    assert drawable[1:].all()
    assert torch.equal(subset[0], present[0])
    assert not (subset & ~present).any()
    assert (subset.sum(1) < present.sum(1))[1:].all()
    for rows, possible in ((slice(1, count // 2), 2), (slice(count // 2, None), 6)):
        patterns, counts = subset[rows].unique(dim=0, return_counts=True)
        assert len(patterns) == possible
        error = math.sqrt(counts.sum() / possible)
        assert (counts - counts.sum() / possible).abs().max() < 4.5 * error
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    again, _ = SubsetDraws(count, 3, seed=4).proper(present[order], order, 0)
    assert torch.equal(again, subset[order])


# ---- subset_distill


def test_the_gradient_of_the_divergence_is_the_scaled_difference_of_probabilities() -> None:
    z, goal, tau = draws(5, 4).requires_grad_(), draws(4, 5).T, 2.5
    divergence("classification", z, goal, tau).sum().backward()
    close(z.grad, tau * ((z / tau).softmax(-1) - (goal / tau).softmax(-1)))
    close(divergence("classification", goal + 3.0, goal, tau), torch.zeros(5))
    large = 1e5
    centred = (z - goal) - (z - goal).mean(1, keepdim=True)
    close(divergence("classification", z, goal, large), centred.square().sum(1) / 8, 1e-4)
    yes = z.detach().requires_grad_()
    divergence("multilabel", yes, goal, tau).sum().backward()
    close(yes.grad, tau * ((yes / tau).sigmoid() - (goal / tau).sigmoid()))
    close(divergence("regression", z, goal, tau), (z - goal).square().mean(1))


def test_similarities_do_not_know_rotation_or_scale() -> None:
    x, logits = draws(6, 4), draws(6, 3)
    rotation = torch.linalg.qr(draws(4, 4)).Q
    close(margin_aware(x, 3 * x @ rotation, logits), torch.zeros(6))
    other = draws(4, 6).T
    values = margin_aware(x, other, torch.zeros(6, 3).double())
    close(values, margin_aware(2 * x @ rotation, other, torch.zeros(6, 3).double()))
    grams = [v @ v.T for v in (x, other)]
    left, right = (v / v.norm(dim=1, keepdim=True) for v in grams)
    close(values, (left - right).square().sum(1) / 6)  # all rows weigh the same
    certain = torch.full((6, 3), -1e4).double()
    certain[:, 0] = 1e4
    close(margin_aware(x, other, certain), values)


def test_a_student_hears_its_teacher_and_the_teacher_nothing() -> None:
    objective = make_objective("subset_distill", {"temperature": 2.0}, model=make_model("mean"))
    one: Any = only(objective)
    context = see(objective, make_batch())
    terms = one.extra_losses(context)
    assert set(terms) == {"subset_distill/labels", "subset_distill/teacher"}
    keep, drawable = one.draws.proper(context.batch.present, context.rows, 0)
    assert torch.equal(terms["subset_distill/teacher"].mask, drawable)
    student = objective.model.fusion(hidden_except(context.features, keep)).logits
    goal = context.output.logits.detach()
    wanted = 4 * (
        (goal / 2).softmax(1) * ((goal / 2).log_softmax(1) - (student / 2).log_softmax(1))
    )
    close(terms["subset_distill/teacher"].values, wanted.sum(1))
    assert not one.teach(context).logits.requires_grad
    right = make_objective("subset_distill", {"right_only": True}, model=make_model("mean"))
    mask = only(right).extra_losses(see(right, make_batch()))["subset_distill/teacher"].mask
    assert torch.equal(mask, drawable & (goal.argmax(1) == TARGETS))


def test_the_average_teacher_follows_the_fusion_and_a_loaded_one_stays(tmp_path: Path) -> None:
    objective = make_objective("subset_distill", {"teacher": "ema", "decay": 0.5})
    trainer = make_trainer(objective)
    before = [p.clone() for p in objective.model.fusion.parameters()]
    trainer.step([make_batch()], StepContext())
    average: Any = only(objective).average
    pairs = zip(before, average.parameters(), objective.model.fusion.parameters(), strict=True)
    for old, kept, new in pairs:
        close(kept, (old + new) / 2)
    make_model().save(tmp_path / "teacher")
    loaded = make_objective("subset_distill", {"teacher": str(tmp_path / "teacher")})
    make_trainer(loaded).step([make_batch()], StepContext())
    assert not [name for name in loaded.state_dict() if "teacher" in name or "loaded" in name]
    with pytest.raises(FusionZooError, match=r"has modalities .*, the model"):
        two = make_model("mean", {"image": 5, "text": 7})
        make_objective("subset_distill", {"teacher": str(tmp_path / "teacher")}, model=two)


# ---- more_fewer


def test_only_rows_that_more_modalities_make_worse_are_penalised_or_less_sure() -> None:
    settings = {"stop_subset": False}
    objective = make_objective("more_fewer", settings, model=make_model("mean"))
    one: Any = only(objective)
    context = see(objective, make_batch())
    fewer, more = draws(ROWS, CLASSES).requires_grad_(), draws(CLASSES, ROWS).T.requires_grad_()
    values, mask = one.violation(fewer, more, context)
    less, greater = (context.criterion(x, TARGETS) for x in (fewer, more))
    close(values, (greater - less).clamp(min=0))
    assert mask.all()
    assert 0 < (values > 0).sum() < ROWS
    close(one.violation(fewer, fewer, context)[0], torch.zeros(ROWS))
    gradients = torch.autograd.grad(values.sum(), [less, greater], allow_unused=True)
    if gradients[0] is not None:
        close(gradients[0], -(values > 0).double())
    kept: Any = only(make_objective("more_fewer", model=make_model("mean")))
    loss = kept.violation(fewer, more, context)[0].sum()
    assert torch.autograd.grad(loss, fewer, allow_unused=True) == (None,)
    one: Any = only(make_objective("more_fewer", {"on": "confidence"}, model=make_model("mean")))
    logits = torch.eye(CLASSES).double()
    context = StepContext(batch=Batch([], {}, torch.ones(2, 3).bool(), torch.tensor([0, 1])))
    fewer, more = 3 * logits[[0, 0]], logits[[1, 1]]
    values, mask = one.violation(fewer, more, context)
    assert mask.tolist() == [False, True]
    close(values, (fewer.softmax(1).amax(1) - more.softmax(1).amax(1)))


def test_a_chain_adds_one_modality_at_a_time_and_averages_its_steps() -> None:
    objective = make_objective("more_fewer", {"chain": True}, model=make_model("mean"))
    one: Any = only(objective)
    context, present = see(objective, make_batch()), make_batch().present
    nested, steps = one.nested(present, context)
    for size, (smaller, larger) in enumerate(pairwise(nested), start=1):
        assert not (smaller & ~larger).any()
        assert torch.equal(smaller.sum(1), present.sum(1).clamp(max=size))
        assert torch.equal(steps[size - 1], present.sum(1) > size)
    assert torch.equal(nested[-1], present)
    values = [torch.tensor([2.0, 2.0, 2.0]), torch.tensor([4.0, 4.0, 4.0])]
    chosen = torch.tensor([[True, True, False], [True, False, False]])
    close(average(values, chosen), [3.0, 2.0, 0.0])
    terms = one.extra_losses(context)
    ranks = terms["more_fewer/ranking"]
    losses = [
        context.criterion(
            objective.model.fusion(hidden_except(context.features, x)).logits, TARGETS
        )
        for x in nested
    ]
    end_to_end = (losses[-1] - losses[0]).clamp(min=0)
    total = ranks.values * steps.sum(0)
    assert (total >= end_to_end.where(steps.any(0), 0) - 1e-12).all()


# ---- opm


def test_the_leader_is_hidden_as_often_as_its_rate_says_and_who_lags_most_never() -> None:
    draw = torch.Generator().manual_seed(0)
    for _ in range(200):
        sums = torch.stack([torch.rand(4, generator=draw), torch.ones(4)]).double()
        rates = hiding_rates(sums, 0.5, 0.5)
        assert rates.min() == 0
        assert rates.max() <= 0.75
    scores = torch.tensor([[0.9, 0.3, 0.3], [1.0, 1.0, 1.0]]).double()
    close(hiding_rates(scores, 0.5, 0.5), [0.5 * (1 + 0.5 * math.tanh(2)), 0, 0], 1e-6)
    equal = torch.tensor([[0.5, 0.5], [1.0, 1.0]]).double()
    close(hiding_rates(equal, 0.5, 0.5), [0, 0])
    alone = torch.tensor([[0.9, 0.0], [1.0, 0.0]]).double()
    close(hiding_rates(alone, 0.5, 0.5), [0, 0])
    count = 20000
    one = build("opm", count, 2, start=0.0, steps=1.0)
    one.sums[0] = torch.tensor([[0.9, 0.3], [1.0, 1.0]])
    present = torch.ones(count, 2, dtype=torch.bool)
    present[:100, 1] = False
    batch = Batch([], {}, present, None)
    kept = one.edit_batch(batch, torch.arange(count), StepContext()).present
    assert kept.any(1).all()
    assert kept[:100, 0].all()
    rate = 0.5 * (1 + 0.5 * math.tanh(2))
    hidden = (~kept[100:, 0]).double().mean()
    assert abs(hidden - rate) < 4 * math.sqrt(rate * (1 - rate) / count)
    assert kept[100:, 1].all()
    never = build("opm", count, 2, start=0.0, steps=0.0)
    assert not never.active(StepContext())


# ---- uncertainty


def weighed(one: Any, losses: dict[str, torch.Tensor], rows: float = 3.0) -> torch.Tensor:
    one.main_loss(StepContext(), LossTerm(torch.zeros(1), torch.ones(1).bool()))
    means = {n: MeanLoss(x, torch.tensor(rows).double()) for n, x in losses.items()}
    return torch.stack([mean.value for mean in one.weigh(means).values()]).sum()


def test_losses_are_weighed_by_their_s_which_at_the_optimum_is_the_logarithm() -> None:
    one = build("uncertainty", free_main=True).double()
    losses = {name: torch.tensor(x).double() for name, x in (("", 0.7), ("a", 1.9), ("b", 0.2))}
    leaves = {name: x.clone().requires_grad_() for name, x in losses.items()}
    with torch.no_grad():
        for name, loss in losses.items():
            one.log_variances[one.place(name)] = (2 * loss).log()
    total = weighed(one, leaves)
    close(total, 0.5 * sum(1 + (2 * x).log() for x in losses.values()))
    total.backward()
    close(one.log_variances.grad, torch.zeros_like(one.log_variances))
    for name, leaf in leaves.items():
        close(leaf.grad, 0.5 / losses[name])
    close(list(one.weights(["a"]).values()), [1 / 3.8], 1e-6)
    one = build("uncertainty").double()
    losses = {"": torch.tensor(2.0).double(), "a": torch.tensor(0.5).double()}
    with torch.no_grad():
        one.log_variances.fill_(1.0)
    close(weighed(one, losses), 2.0 + 0.5 * math.exp(-1) + 0.5)
    nobody = weighed(one, {**losses, "a": torch.tensor(0.0).double()}, rows=0.0)
    close(nobody, 2.0)
    close(torch.autograd.grad(nobody, one.log_variances)[0], torch.zeros(64))
    soft = build("uncertainty", penalty="log1p", gaussian=True).double()
    close(weighed(soft, losses), 2.0 + 0.25 + math.log(2))
    single = {"": torch.tensor(2.0).double()}
    close(weighed(build("uncertainty").double(), single), 2.0)  # s = 0
    with pytest.raises(FusionZooError, match=r"'a' is -0\.5, and a negative loss"):
        weighed(one, {**losses, "a": torch.tensor(-0.5).double()})


def test_each_loss_keeps_its_place_and_moves_ten_times_as_fast_within_its_limit() -> None:
    objective = make_objective("unimodal_aux,uncertainty", model=make_model("mean"))
    trainer = make_trainer(objective)
    rates = {group["name"]: group["lr"] for group in trainer.optimizer.param_groups}
    assert rates["balance/uncertainty/no_decay"] == pytest.approx(10 * rates["fusion"])
    one: Any = objective.balance["uncertainty"]
    for step in range(3):
        trainer.step([make_batch()], StepContext(step))
    assert int((one.keys != 0).sum()) == 3
    moved = one.log_variances.detach() != 0
    assert torch.equal(moved, one.keys != 0)
    with torch.no_grad():
        one.log_variances.fill_(9.0)
    one.after_step()
    close(one.log_variances, torch.full((64,), 3.0))


# ---- comm


def test_the_contrastive_loss_has_its_known_values() -> None:
    n, tau = 6, 0.2
    same = torch.eye(n).double()
    close(nt_xent(same, same, tau), [math.log(math.exp(1 / tau) + 2 * n - 2) - 5] * n)
    constant = torch.ones(n, 1).double()
    close(nt_xent(constant, constant, tau), [math.log(2 * n - 1)] * n)
    left, right = (torch.nn.functional.normalize(draws(*s).reshape(n, 4)) for s in ((n, 4), (4, n)))
    rotation = torch.linalg.qr(draws(4, 4)).Q
    close(nt_xent(left @ rotation, right @ rotation, tau), nt_xent(left, right, tau))
    close(nt_xent(right, left, tau), nt_xent(left, right, tau))
    vectors = torch.cat([left, right])
    wanted = []
    for i in range(2 * n):
        others = [j for j in range(2 * n) if j != i]
        logits = vectors[others] @ vectors[i] / tau
        wanted.append(logits.logsumexp(0) - vectors[(i + n) % (2 * n)] @ vectors[i] / tau)
    close(nt_xent(left, right, tau), (torch.stack(wanted[:n]) + torch.stack(wanted[n:])) / 2)
    assert nt_xent(left[:1], right[:1], tau).tolist() == [0.0]


def test_comm_contrasts_what_is_fused_alone_with_what_is_fused_together() -> None:
    objective = make_objective("comm", {"weight": 1.0, "dim": 5}, model=make_model("mean"))
    one: Any = only(objective)
    batch = make_batch()
    context = see(objective, batch)
    other = {
        n: x._replace(tokens=2 * x.tokens, pooled=x.pooled - 0.3)
        for n, x in context.features.items()
    }
    context = context._replace(views=(context.features, other))
    terms = one.extra_losses(context)
    assert list(terms) == ["comm/all", "comm/image", "comm/text", "comm/audio"]

    def vectors(features: Any, *names: str) -> torch.Tensor:
        fused: FusionOutput = objective.model.fusion(keep_only(features, *names))
        return torch.nn.functional.normalize(one.head(fused.embedding))

    first, second = context.views
    whole = [vectors(x, *x) for x in (first, second)]
    for column, name in enumerate(batch.inputs):
        rows = batch.present[:, column] & (batch.present.sum(1) > 1)
        halves = [
            nt_xent(vectors(x, name)[rows], y[rows], 0.1)
            for x, y in zip((first, second), reversed(whole), strict=True)
        ]
        close(mean(terms[f"comm/{name}"]), torch.stack(halves).mean() / 4)
    rows = batch.present.any(1)
    close(mean(terms["comm/all"]), nt_xent(whole[0][rows], whole[1][rows], 0.1).mean() / 4)
    swapped = one.extra_losses(context._replace(views=(second, first)))
    for name, term in swapped.items():
        close(mean(term), mean(terms[name]))


def test_views_depend_on_sample_and_epoch_alone_and_need_something_random() -> None:
    objective = make_objective("comm", model=make_model("mean"))
    one: Any = only(objective)
    batch, rows = make_batch(), torch.arange(ROWS)
    first, second = one.views(batch, rows, StepContext())
    dropped = first.inputs["image"]["values"] == 0
    assert 0 < dropped.double().mean() < 0.5
    assert not torch.equal(dropped, second.inputs["image"]["values"] == 0)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))
    again, _ = one.views(batch.take(order), order, StepContext(step=9))
    assert torch.equal(again.inputs["image"]["values"], first.inputs["image"]["values"][order])
    assert torch.equal(batch.inputs["image"]["values"], make_batch().inputs["image"]["values"])  # type: ignore[call-overload]
    model = make_model("mean")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    with pytest.raises(FusionZooError, match="two views of 'image' would be equal"):
        BALANCE["comm"].cls(StrategyInputs(model, TARGETS, 0, ALONE), drop=0.0)  # type: ignore[call-arg]


# ---- gmc, symile


def test_gmc_contrasts_the_fusion_with_each_modality() -> None:
    objective = make_objective("gmc", {"dim": 5, "weight": 2.0}, model=make_model("mean"))
    one: Any = only(objective)
    batch = make_batch()
    context = see(objective, batch)
    joint = one.embed_in_common(one.fused(context.output.embedding))
    for column, (name, features) in enumerate(context.features.items()):
        rows = batch.present[:, column] & (batch.present.sum(1) > 1)
        single = one.embed_in_common(one.project[name](features.pooled))
        term = one.extra_losses(context)[f"gmc/{name}"]
        close(mean(term), 2 * nt_xent(joint[rows], single[rows], 0.3).mean())
        close(term.values, nt_xent(single[rows], joint[rows], 0.3))


def unit(*shape: int) -> torch.Tensor:
    return torch.nn.functional.normalize(draws(*shape), dim=-1)


def symile(modalities: int, **settings: Any) -> Any:
    return build("symile", modalities=modalities, **settings).double()


def test_symile_of_two_with_all_tuples_is_clip() -> None:
    one, vectors = symile(2, negatives="all", dim=4), unit(2, 6, 4)
    logits = vectors[0] @ vectors[1].T / 0.07
    diagonal = torch.arange(6)
    losses = [torch.nn.functional.cross_entropy(x, diagonal) for x in (logits, logits.T)]
    close(one.loss(vectors, torch.Generator()).mean(), sum(losses) / 2, 1e-6)


@pytest.mark.parametrize("negatives", ["n", "all"])
def test_symile_knows_its_constant_and_no_order_of_modalities(negatives: str) -> None:
    one, n = symile(3, negatives=negatives, dim=4), 5
    constant = torch.full((3, n, 4), 0.5).double()
    tuples = n if negatives == "n" else n**2
    close(one.loss(constant, torch.Generator()), [math.log(tuples)] * n)
    if negatives == "all":
        vectors = unit(3, n, 4)
        values = one.loss(vectors, torch.Generator())
        close(one.loss(vectors[[2, 0, 1]], torch.Generator()), values)
        flipped = vectors * torch.tensor([[[1.0, 1, 1, -1]], [[1.0, 1, 1, -1]], [[1.0, 1, 1, 1]]])
        close(one.loss(flipped, torch.Generator()), values)


def test_only_the_product_of_three_sees_an_exclusive_or() -> None:
    states = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]]).double()
    vectors = torch.stack([states[:, :1], states[:, 1:], states.prod(1, keepdim=True)])
    one = symile(3, negatives="all", dim=1)
    with torch.no_grad():
        one.scale.fill_(0.0)
    assert one.loss(vectors, torch.Generator()).mean() < math.log(16)
    with torch.no_grad():
        one.scale.fill_(6.0)
    close(one.loss(vectors, torch.Generator()), [math.log(8)] * 4, 1e-9)
    many = unit(3, 1500, 1)
    with pytest.raises(FusionZooError, match="2,250,000 tuples for each row"):
        one.loss(many, torch.Generator())


# ---- matryoshka


def test_the_loss_is_that_of_a_linear_head_on_each_prefix() -> None:
    objective = make_objective("matryoshka", {"sizes": [5, 2], "weight": 0.5})
    strategy, batch = only(objective), make_batch()
    context = see(objective, batch)
    terms = strategy.extra_losses(context)
    assert list(terms) == ["matryoshka/2", "matryoshka/5"]
    for size in (2, 5):
        head: Any = strategy.heads[str(size)]  # type: ignore[index]
        logits = context.output.embedding[:, :size] @ head.weight.T + head.bias
        close(mean(terms[f"matryoshka/{size}"]), 0.5 * F.cross_entropy(logits, batch.target))
    gradient = torch.autograd.grad(terms["matryoshka/2"].values.sum(), context.output.embedding)[0]
    assert gradient[:, :2].abs().min() > 0
    assert not gradient[:, 2:].any()  # entries beyond the prefix learn nothing from it


def test_aligned_prefixes_are_cut_and_scaled_to_unit_length() -> None:
    objective = make_objective("contrastive_align", {"dim": 4, "prefixes": [2]})
    strategy: Any = only(objective)
    context = see(objective, make_batch())
    terms = strategy.extra_losses(context)
    vectors = strategy.embed(context.features)
    both = vectors["image"].any(1) & vectors["text"].any(1)
    left, right = (F.normalize(vectors[name][both][:, :2], dim=1) for name in ("image", "text"))
    close(terms["contrastive_align/image-text/2"].values, strategy.loss(left, right))
    assert sum(name.endswith("/2") for name in terms) == len(strategy.pairs) == 3


FUSED, ALIGNED = {"matryoshka": {"sizes": [2, 4]}}, {"contrastive_align": {"prefixes": [2, 4]}}


@pytest.mark.parametrize(
    ("balance", "has_target", "expected"),
    [
        ("", True, FUSED),
        ("contrastive_align", False, ALIGNED),
        (["contrastive_align", "ogm_ge"], True, {**FUSED, **ALIGNED}),
    ],
)
def test_the_flag_sets_up_the_strategies(
    balance: Any, has_target: bool, expected: dict[str, Any]
) -> None:
    cfg = from_settings(RunConfig, {"matryoshka": "4,2", "balance": balance})
    names, settings = with_matryoshka(cfg, has_target)
    assert settings == expected
    assert {*settings} <= {*names}


def test_wrong_sizes_are_one_line() -> None:
    with pytest.raises(fz.FusionZooError, match="sizes: 9, and the fused vector has 8 entries"):
        make_objective("matryoshka", {"sizes": [9]})
    with pytest.raises(fz.FusionZooError, match=r"--matryoshka 'a,2': expected sizes such as"):
        prefix_sizes("a,2")
    with pytest.raises(fz.FusionZooError, match="prefixes: 5, and dim=4"):
        make_objective("contrastive_align", {"dim": 4, "prefixes": [5]})
    assert halves(256) == [8, 16, 32, 64, 128]


def test_a_run_records_what_it_trained_and_embedding_warns_of_other_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = {"name": "interactions", "samples": 90}
    run = fz.train(data, matryoshka="4,8", epochs=1, out=tmp_path / "run", log="none")
    model = fz.load(run.folder)
    assert model.spec["matryoshka"] == [4, 8]
    capsys.readouterr()
    for sizes, warned in (("4,8", False), ("4,6", True)):
        fz.embed(model, data, matryoshka=sizes, out=tmp_path / "e.parquet")
        text = "warning: the model was not trained with --matryoshka 6"
        assert (text in capsys.readouterr().out) is warned
    assert fz.read_embeddings(tmp_path / "e.parquet", "fused_6").vectors.shape == (90, 6)
