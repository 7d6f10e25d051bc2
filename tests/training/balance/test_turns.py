"""The strategies in which modalities take turns, held to their formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fusionzoo.structures import StepContext, keep_only
from fusionzoo.training.balance import LossTerm
from fusionzoo.training.balance.mla import shrink
from fusionzoo.training.trainer import Trainer
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
    only,
    see,
)


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
