"""`dynmm`: its gate, its branches and their price."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusionzoo.fusion.hybrid import dynmm
from fusionzoo.structures import keep_only
from fusionzoo.testing.fusions import features, full, patterns
from helpers.oracle import WIDTHS, close, context, made

TARGET = torch.arange(8) % 4
TRIPLE = [["image", "text", "audio"]]


def authors_gate(scores: Tensor, temperature: float) -> Tensor:
    """Transcribe the authors' straight-through softmax (ModalityDynMM, DiffSoftmax)."""
    soft = (scores / temperature).softmax(-1)
    index = soft.max(-1, keepdim=True)[1]
    return torch.zeros_like(scores).scatter_(-1, index, 1.0) - soft.detach() + soft


def test_the_straight_through_gate_has_the_gradient_of_the_softmax() -> None:
    torch.manual_seed(0)
    scores = torch.randn(6, 4).double().requires_grad_()
    values = torch.randn(6, 4).double()
    hard = dynmm.straight_through((scores / 0.7).softmax(-1))
    close(hard.detach(), F.one_hot(scores.argmax(1), 4).double(), 1e-15)
    (soft_slope,) = torch.autograd.grad(((scores / 0.7).softmax(-1) * values).sum(), scores)
    (hard_slope,) = torch.autograd.grad((hard * values).sum(), scores)
    close(hard_slope, soft_slope)


@pytest.mark.parametrize("training", [True, False])
def test_on_complete_samples_it_is_the_authors_weighted_sum(training: bool) -> None:
    fusion, x = made("dynmm", temperature=0.5).train(training), features(full(16))
    aligned, present = fusion.aligned(x)
    scores = fusion.gate(torch.cat([aligned.flatten(1), present.double()], dim=1))
    weight = authors_gate(scores, 0.5)
    joint = fusion.joint["image+text+audio"](aligned.flatten(1)).relu()
    answers = [fusion.heads[m](aligned[:, k]) for k, m in enumerate(WIDTHS)]
    answers.append(fusion.joint_heads["image+text+audio"](joint))
    wanted = sum(weight[:, k : k + 1] * answers[k] for k in range(4))
    assert len(weight.argmax(1).unique()) > 1
    close(fusion(x).logits, wanted)


def test_a_single_branch_answers_alone_and_heads_where_it_cannot() -> None:
    fusion, x = made("dynmm", branches=TRIPLE), features(full(4))
    aligned, _ = fusion.aligned(x)
    hidden = fusion.joint["image+text+audio"](aligned.flatten(1)).relu()
    close(fusion(x).embedding, hidden)
    close(fusion(x).logits, fusion.joint_heads["image+text+audio"](hidden))
    fewer = fusion(keep_only(x, "image", "audio"))
    heads = [fusion.heads[m](aligned[:, k]) for k, m in ((0, "image"), (2, "audio"))]
    close(fewer.logits, sum(heads) / 2)
    close(fewer.embedding, aligned[:, [0, 2]].mean(1))
    assert not fewer.extra["branch_weights"].any()


@pytest.mark.parametrize("branches", [None, [["text"], ["image", "audio"]]])
def test_without_gradients_each_row_runs_through_its_own_branch_only(branches: Any) -> None:
    fusion = made("dynmm", branches=branches)
    x = features(torch.cat([full(16), patterns(3)]))
    aligned, present = fusion.aligned(x)
    scores = fusion.gate(torch.cat([aligned.flatten(1), present.double()], dim=1))[:16].detach()
    with torch.no_grad():  # let half of the complete rows choose the last branch
        fusion.gate[-1].bias[-1] += (scores[:, :-1].max(1).values - scores[:, -1]).median() + 1e-3
    wanted = fusion(x)
    layers = {(m,): fusion.heads[m] for m in WIDTHS}
    layers |= {tuple(key.split("+")): layer for key, layer in fusion.joint.items()}
    rows = dict.fromkeys(layers, 0)
    for key, layer in layers.items():
        layer.register_forward_hook(
            lambda _, inputs, __, key=key: rows.update({key: rows[key] + len(inputs[0])})
        )
    with torch.no_grad():
        found = fusion(x)
    close(found.logits, wanted.logits.detach())
    close(found.embedding, wanted.embedding.detach())
    weights = found.extra["branch_weights"]
    close(weights, wanted.extra["branch_weights"].detach(), 1e-15)
    without_branch = int((weights.sum(1) == 0).sum())  # all heads answer these
    chosen = {names: int(weights[:, k].sum()) for k, names in enumerate(fusion.subsets)}
    assert all(count > 0 for count in chosen.values())
    for key, count in rows.items():
        assert count == chosen.get(key, 0) + (without_branch if len(key) == 1 else 0)


def test_no_branch_meets_an_absent_modality() -> None:
    fusion, x = made("dynmm"), features(patterns(3))
    chosen = fusion(x).extra["branch_weights"].argmax(1)
    for row, here in enumerate(patterns(3)[:-1].tolist()):
        branch = fusion.subsets[chosen[row]]
        assert all(here[[*WIDTHS].index(name)] for name in branch)
    alone = fusion(keep_only(x, "text"))
    has_text = patterns(3)[:, 1]
    aligned, _ = fusion.aligned(x)
    close(alone.logits[has_text], fusion.heads["text"](aligned[:, 1])[has_text])
    close(alone.logits[~has_text], fusion.prior_logits.expand(4, -1))
    assert [*fusion.shares(alone)] == ["image", "text", "audio", "image+text+audio"]
    close(fusion.shares(alone)["text"], has_text.double(), 1e-15)


def test_phases_train_branches_then_the_gate_softly_then_as_it_answers() -> None:
    fusion, x = made("dynmm", budget=1.0).train(), features(patterns(3))
    output, criterion = fusion(x), context(8).criterion
    heads, joint = output.extra["heads"], output.extra["branch_logits"][:, 3]
    for row, here in enumerate(patterns(3)[:-1]):
        answers = [heads[row, k] for k in range(3) if here[k]] + [joint[row]] * bool(here.all())
        losses = [criterion(z[None], TARGET[row : row + 1])[0] for z in answers]
        first = fusion.loss(output, TARGET, context(8, phase=0))
        close(first[row], torch.stack(losses).mean())
    soft = criterion(output.extra["soft_logits"], TARGET)
    close(fusion.loss(output, TARGET, context(8, phase=1))[:-1], soft[:-1])
    hard = criterion(output.logits, TARGET)
    close(fusion.loss(output, TARGET, context(8, phase=2)), hard)
    assert [phase.name for phase in fusion.phases] == ["branches", "soft", "hard"]
    assert [phase.encoders for phase in fusion.phases] == [True, False, False]
    free = made("dynmm", freeze=False, hard=False).phases
    found = [(phase.name, phase.trains[0], phase.encoders) for phase in free]
    assert found == [("branches", "project", True), ("soft", "", True)]


def test_the_penalty_is_the_mean_cost_above_the_budget() -> None:
    costs = [0.1, 0.2, 0.4, 1.0]
    fusion = made("dynmm", costs=costs, budget=0.1, cost=2.0).train()
    output = fusion(features(full(8)))
    spent = output.extra["branch_weights"] @ torch.tensor(costs).double()
    task = context(8).criterion(output.logits, TARGET)
    assert spent.mean() > 0.1
    loss = fusion.loss(output, TARGET, context(8, phase=2))
    close((loss - task).mean(), 2.0 * (spent.mean() - 0.1), 1e-6)
    fusion.budget = 0.999
    close(fusion.loss(output, TARGET, context(8, phase=2)), task)


def test_the_penalty_of_two_processes_is_that_of_all_their_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fusion = made("dynmm", budget=0.5).train()
    halves = torch.tensor([[0.25, 0.5], [0.75, 1.0]]).double()
    whole = fusion._above_budget(halves.flatten())
    close(whole.mean(), torch.tensor(0.125).double())
    monkeypatch.setattr(dynmm.distributed, "is_initialized", lambda: True)
    for number, half in enumerate(halves):
        other = halves[1 - number]
        total = torch.stack([other.sum(), other.new_tensor(2)])
        monkeypatch.setattr(dynmm.distributed, "all_reduce", lambda x, y=total: x.add_(y))
        close(fusion._above_budget(half), whole.view(2, 2)[number])


def test_equal_branches_leave_the_gate_without_a_gradient_of_the_task() -> None:
    fusion = made("dynmm", budget=1.0).train()
    for layer in [*fusion.heads.values(), *fusion.joint_heads.values()]:
        nn.init.zeros_(layer.weight)
        nn.init.ones_(layer.bias)
    output = fusion(features(full(8)))
    for phase in (1, 2):
        loss = fusion.loss(output, TARGET, context(8, phase=phase)).sum()
        slopes = torch.autograd.grad(loss, [*fusion.gate.parameters()], retain_graph=True)
        assert all(slope.abs().max() < 1e-12 for slope in slopes)
