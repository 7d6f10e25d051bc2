"""The strategies that add a loss or edit the batch, held to their formulas."""

from __future__ import annotations

import math
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fusionzoo.distributed import World
from fusionzoo.structures import Batch, StepContext
from fusionzoo.training.balance import StrategyInputs
from fusionzoo.training.balance.gblend import GBlend, blend
from fusionzoo.training.balance.modality_dropout import ModalityDropout
from helpers.strategies import (
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
