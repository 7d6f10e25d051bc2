"""The hybrid fusions are what their formulas say."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusionzoo.errors import FusionZooError
from fusionzoo.fusion import create_fusion
from fusionzoo.fusion.base import Draws, RunningMeans
from fusionzoo.fusion.hybrid import dynmm
from fusionzoo.fusion.hybrid.drfuse import divergence, pooled_logit, random_part, ranking
from fusionzoo.fusion.hybrid.i2moe import RunningMoments, interaction_losses
from fusionzoo.fusion.hybrid.misa import moment_discrepancy, overlap
from fusionzoo.fusion.hybrid.mmin import random_subset, squared_error
from fusionzoo.fusion.hybrid.mvae_poe import multiply
from fusionzoo.model.fusion_model import create_model
from fusionzoo.structures import StepContext, keep_only
from fusionzoo.testing.fusions import features, full, patterns
from helpers.oracle import WIDTHS, aligned, close, context, copy, made

ALL = torch.ones(12, dtype=torch.bool)
TARGET = torch.arange(8) % 4


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).double()


# ---- misa


def test_discrepancy_is_symmetric_and_of_equal_samples_nothing_with_a_finite_gradient() -> None:
    x, y = draw(12, 5).requires_grad_(), draw(12, 4)[:, :1] + draw(12, 5)
    found = moment_discrepancy(x, x, ALL)
    assert found.abs() < 1e-9
    (gradient,) = torch.autograd.grad(found, x)
    assert torch.isfinite(gradient).all()
    close(moment_discrepancy(x, y, ALL), moment_discrepancy(y, x, ALL))
    shifted = moment_discrepancy(x, x + 0.5, ALL)  # by its first moment only
    close(shifted, torch.tensor(0.5 * 5**0.5).double(), 1e-5)


def test_discrepancy_is_the_sum_over_moments_of_rows_that_have_both() -> None:
    x, y = draw(12, 3), draw(12, 2) @ draw(2, 3)
    wanted = (x.mean(0) - y.mean(0)).norm()
    for order in range(2, 6):
        c = ((x - x.mean(0)) ** order).mean(0) - ((y - y.mean(0)) ** order).mean(0)
        wanted = wanted + c.norm()
    close(moment_discrepancy(x, y, ALL), wanted, 1e-5)
    x, one = draw(12, 5), torch.arange(12) == 3
    assert moment_discrepancy(x, x + 1, one) == 0
    assert overlap(x, x, one) == 0
    some = torch.arange(12) % 2 == 0
    close(moment_discrepancy(x, 2 * x, some), moment_discrepancy(x[::2], 2 * x[::2], ALL[::2]))


def test_orthogonal_columns_do_not_overlap_and_equal_rows_overlap_wholly() -> None:
    x, y = torch.zeros(2, 4, 2).double()
    x[:, 0] = torch.tensor([1.0, -1.0, 1.0, -1.0])
    y[:, 1] = torch.tensor([1.0, 1.0, -1.0, -1.0])
    rows = torch.ones(4, dtype=torch.bool)
    assert overlap(x, y, rows) < 1e-12
    close(overlap(x, x, rows), torch.tensor(1.0).double(), 1e-6)


def test_reconstruction_cannot_be_lowered_by_shrinking_its_target() -> None:
    fusion = made("misa", similarity=0.0, difference=0.0)
    output = fusion(features(full(4)))
    target = output.extra["aligned"].detach().requires_grad_()
    output = output._replace(extra={**output.extra, "aligned": target})
    context = StepContext(criterion=lambda logits, _: logits.sum(1) * 0)
    loss = fusion.loss(output, TARGET[:4], context).sum()
    loss.backward()
    assert loss > 0
    assert target.grad is None
    assert all(decode.weight.grad.abs().sum() > 0 for decode in fusion.decode.values())


# ---- mvae_poe


def test_experts_multiply_as_gaussians_do() -> None:
    means, precision = draw(6, 3, 4), draw(3, 6, 4).transpose(0, 1).exp()
    present = patterns(3)[:6]
    mean, variance = multiply(means, precision, present)
    for row in range(6):
        there = present[row]
        t = 1 + precision[row][there].sum(0)
        close(variance[row], 1 / t)
        close(mean[row], (precision[row] * means[row])[there].sum(0) / t)


def test_nothing_is_the_prior_an_expert_only_sharpens_and_equal_ones_add_their_precision() -> None:
    means, precision = draw(1, 3, 4), draw(3, 1, 4).transpose(0, 1).exp()
    mean, variance = multiply(means, precision, torch.zeros(1, 3, dtype=torch.bool))
    assert (mean == 0).all()
    assert (variance == 1).all()
    two, three = torch.tensor([[True, True, False]]), full(1)
    assert (multiply(means, precision, three)[1] <= multiply(means, precision, two)[1]).all()
    equal = draw(1, 1, 4).expand(1, 3, 4)
    mean, variance = multiply(equal, torch.full((1, 3, 4), 2.0).double(), full(1))
    close(variance, torch.full((1, 4), 1 / 7, dtype=torch.float64))
    close(mean, equal[:, 0] * 6 / 7)


def test_the_embedding_is_the_mean_in_evaluation_and_a_draw_in_training() -> None:
    fusion, x = made("mvae_poe", decoders=True), features(full(4))
    output = fusion(x)
    close(output.embedding, output.extra["mean"])
    torch.manual_seed(0)
    drawn = torch.stack([fusion.train()(x).embedding for _ in range(400)])
    error = 4 * (output.extra["variance"] / 400).sqrt()
    assert ((drawn.mean(0) - output.extra["mean"]).abs() < error).float().mean() > 0.98
    loss = fusion.loss(fusion(x), TARGET[:4], context(4))
    loss.sum().backward()
    assert all(p.grad is not None for p in fusion.parameters())


def test_a_subset_decodes_its_own_modalities_and_no_others() -> None:
    """As the sub-sampled ELBO of Wu and Goodman 2018: each term rebuilds what it was given."""
    fusion, x = made("mvae_poe", decoders=True, beta=0.0, random_subsets=0), features(full(4))
    output = fusion(x)
    wanted = torch.zeros(4).double()
    every = set(WIDTHS)
    for subset in (every, *({m} for m in WIDTHS)):
        columns = torch.tensor([m in subset for m in WIDTHS]).expand(4, 3)
        sample, _ = multiply(output.extra["means"], output.extra["precision"], columns)
        wanted += context(4).criterion(fusion.head(sample), TARGET[:4])
        for m in subset:
            wanted += (fusion.decoders[m](sample) - x[m].pooled).square().mean(-1)
    close(fusion.loss(output, TARGET[:4], context(4)), wanted)


# ---- missing_tokens


@pytest.mark.parametrize("base", ["concat", "mbt", "late_mean", "mmtm"])
@pytest.mark.parametrize("bank", ["modality", "pattern"])
def test_complete_samples_pass_as_if_there_were_no_stand_ins(base: str, bank: str) -> None:
    fusion, x = made("missing_tokens", base=base, bank=bank), features(full(4))
    inner = {
        m: f._replace(tokens=fusion.project[m](f.tokens), pooled=fusion.project[m](f.pooled))
        for m, f in x.items()
    }
    close(fusion(x).logits, fusion.base(inner).logits)


def test_a_stand_in_learns_where_its_modality_lacks_and_patterns_correct_it() -> None:
    fusion = made("missing_tokens", base="concat")
    x = features(torch.tensor([[True, True, True], [True, False, True]]))
    fusion(x).logits.sum().backward()
    moved = (fusion.stand_in.grad != 0).any(-1).any(-1)
    assert moved.tolist() == [False, True, False]
    pattern = copy(fusion, made("missing_tokens", base="concat", bank="pattern"), strict=False)
    torch.nn.init.zeros_(pattern.correction)
    x = features(patterns(3))
    close(pattern(x).logits, fusion(x).logits)


def test_a_wrapped_strategy_keeps_its_own_loss_and_phases() -> None:
    fusion, x = made("missing_tokens", base="late_stacking"), features(patterns(3))
    assert [phase.name for phase in fusion.phases] == ["base", "stack"]
    assert "base.joiner" in fusion.phases[1].trains
    target = torch.arange(8) % 4
    later = context(8, phase=1, memory=fusion.prepare(target))
    assert torch.isfinite(fusion.loss(fusion(x), target, later)).all()
    with pytest.raises(FusionZooError, match="unknown fusion 'mbtt'"):
        create_fusion("missing_tokens", WIDTHS, 8, 4, base="mbtt")
    with pytest.raises(FusionZooError, match="has no setting 'layers'"):
        create_fusion("missing_tokens", WIDTHS, 8, 4, base="mbt", layers=2)


# ---- shaspec


def test_shaspec_is_the_shared_vector_of_which_an_absent_modality_gets_the_mean() -> None:
    fusion, x = made("shaspec"), features(full(3))
    torch.nn.init.zeros_(fusion.mix.weight)
    torch.nn.init.zeros_(fusion.mix.bias)
    shared = [fusion.shared(a) for a in aligned(fusion, x).values()]
    close(fusion(x).embedding, fusion.join(torch.cat(shared, dim=1)))
    fusion, seen = made("shaspec"), []
    fusion.join.register_forward_hook(lambda _m, i, _o: seen.append(i[0]))
    x = features(torch.tensor([[True, False, True]]))
    fusion(x)
    a = aligned(fusion, x)
    wanted = (fusion.shared(a["image"]) + fusion.shared(a["audio"])) / 2
    close(seen[0][:, 8:16], wanted)


def test_alignment_is_nothing_only_where_shared_vectors_are_equal() -> None:
    fusion, x = made("shaspec", alignment=1.0, domain=0.0), features(full(4))
    output = fusion(x)
    extra = fusion.loss(output, TARGET[:4], context(4)) - context(4).criterion(
        output.logits, TARGET[:4]
    )
    assert (extra > 0).all()
    same = output.extra["shared"][:, :1].expand_as(output.extra["shared"])
    output = output._replace(extra={**output.extra, "shared": same})
    extra = fusion.loss(output, TARGET[:4], context(4)) - context(4).criterion(
        output.logits, TARGET[:4]
    )
    close(extra, torch.zeros(4).double())


# ---- mmin


def test_imagination_is_the_identity_at_the_start_and_complete_samples_bypass_it() -> None:
    fusion = create_fusion("mmin", WIDTHS, 8, 4).double()
    seen = draw(2, 3, 8)
    close(fusion.imagine(seen, full(2)), seen)
    trained, x = made("mmin"), features(full(3))
    before = trained(x).logits
    with torch.no_grad():
        for parameter in trained.forth.parameters():
            parameter.add_(1)
    assert torch.equal(trained(x).logits, before)


def test_what_is_hidden_is_a_proper_subset_and_never_everything() -> None:
    torch.manual_seed(0)
    present = patterns(3).repeat(200, 1)
    kept = random_subset(present)
    assert (kept <= present).all()
    several = present.sum(1) > 1
    assert (kept[several].sum(1) < present[several].sum(1)).all()
    assert (kept[present.any(1)].sum(1) >= 1).all()
    of_three = kept[present.all(1)]
    assert set(of_three.sum(1).tolist()) == {1, 2}


def test_errors_count_only_what_was_hidden() -> None:
    found, wanted = draw(2, 3, 4), draw(2, 3, 5)[..., :4]
    hidden = torch.tensor([[True, False, False], [False, False, False]])
    by_hand = (found - wanted)[0, 0].square().mean()
    close(squared_error(found, wanted, hidden)[0].double(), by_hand, 1e-6)
    assert squared_error(found, wanted, hidden)[1] == 0


def test_the_teacher_gets_no_gradient_from_the_imagination() -> None:
    fusion, x = made("mmin"), features(full(4))
    fusion.loss(fusion(x), TARGET[:4], context(4, phase=1)).sum().backward()
    assert all(p.grad is None for p in fusion.project.parameters())
    assert all(p.grad is not None for p in fusion.forth.parameters())
    assert all(p.grad is not None for p in fusion.back.parameters())


def test_mmin_needs_two_modalities() -> None:
    with pytest.raises(FusionZooError, match="'mmin' needs at least 2 modalities; there is only"):
        create_fusion("mmin", {"image": 4}, 8, 4)


# ---- drfuse


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).double()


def test_the_pool_is_the_logit_of_the_mean_probability_as_in_the_paper() -> None:
    x, present = randn(8, 3, 5), patterns(3)
    found = pooled_logit(x, present)
    for row in range(7):
        mean = x[row, present[row]].sigmoid().mean(0)
        close(found[row], mean.logit())
        assert (found[row] <= x[row, present[row]].amax(0) + 1e-12).all()
        assert (found[row] >= x[row, present[row]].amin(0) - 1e-12).all()
    assert (found[-1] == 0).all()
    assert pooled_logit(torch.tensor([[[800.0], [-800.0]]]), full(1, 2)).isfinite().all()
    x = randn(6, 2, 5)
    h1, h2 = x.unbind(1)
    top = torch.stack([h1 + h2, h1 + h2, h1, h2]).logsumexp(0)
    bottom = torch.stack([0 * h1, 0 * h1, h1, h2]).logsumexp(0)
    close(pooled_logit(x, full(6, 2)), top - bottom)


def test_divergence_is_nothing_only_where_shared_parts_are_equal() -> None:
    x, present = randn(8, 3, 5), patterns(3)
    found = divergence(x, present)
    several = present.sum(1) > 1
    assert (found[several] > 0).all()
    close(found[~several], torch.zeros(4).double())
    close(divergence(x[:, :1].expand(8, 3, 5), present), torch.zeros(8).double())
    p = x[0].sigmoid()
    close(found[0], (p * (p / p.mean(0)).log()).sum() / 3)


@pytest.mark.parametrize("per_class", ["key", "query"])
def test_each_class_attends_by_itself(per_class: str) -> None:
    fusion, x = made("drfuse", per_class=per_class), features(full(4))
    output = fusion(x)
    shared = pooled_logit(output.extra["shared"], full(4))
    tokens = torch.stack([*output.extra["distinct"].unbind(1), shared], dim=1)
    q, v, *k = fusion.attention(tokens).split(8, dim=-1)
    for c in range(4):
        query = q.mean(1) + (fusion.class_query[c] if per_class == "query" else 0)
        scores = torch.einsum("bd,bnd->bn", query, k[c if per_class == "key" else 0])
        weights = (scores / 8**0.5).softmax(-1)
        close(output.extra["attention"][:, c], weights)
        f = torch.einsum("bn,bnd->bd", weights, v)
        close(output.logits[:, c], f @ fusion.head.weight[c] + fusion.head.bias[c])
    share = output.extra["attention"].mean(1)[:, :3]
    close(output.weights, share / share.sum(1, keepdim=True))


def test_attention_without_weights_is_uniform_over_what_is_present() -> None:
    fusion, x = made("drfuse"), features(patterns(3)[:-1])
    torch.nn.init.zeros_(fusion.attention.weight)
    torch.nn.init.zeros_(fusion.attention.bias)
    tokens = torch.cat([patterns(3)[:-1], torch.ones(7, 1, dtype=torch.bool)], dim=1).double()
    wanted = tokens / tokens.sum(1, keepdim=True)
    close(fusion(x).extra["attention"], wanted[:, None].expand(-1, 4, -1))


def test_ranking_charges_attention_to_the_token_with_the_larger_loss() -> None:
    attention, votes = randn(5, 4, 3).softmax(-1), randn(5, 3, 4)
    target = torch.arange(5) % 4
    present = torch.tensor([[True, True]] * 3 + [[True, False], [False, False]])
    found = ranking(attention, votes, target, present)
    for row in range(5):
        here = [n for n, bit in enumerate(present[row]) if bit] + [2] * bool(present[row].any())
        terms = []
        for i in here:
            for j in here:
                if i < j:
                    labels = F.one_hot(target[row], 4).double()
                    losses = [
                        F.binary_cross_entropy_with_logits(votes[row, n], labels, reduction="none")
                        for n in (i, j)
                    ]
                    better = torch.where(losses[0] < losses[1], 1, -1)
                    gap = attention[row, :, i] - attention[row, :, j]
                    terms.append((-better * gap).clamp(min=0).mean())
        close(found[row], torch.stack(terms).mean() if terms else torch.tensor(0.0).double())


def test_ranking_leaves_unknown_labels_out_and_numbers_alone() -> None:
    attention, votes = randn(5, 4, 3).softmax(-1), randn(5, 3, 4)
    one_hot = F.one_hot(torch.arange(5) % 4, 4).double()
    both = full(5, 2)
    found = ranking(attention, votes, one_hot, both)
    close(found, ranking(attention, votes, torch.arange(5) % 4, both))
    unknown = one_hot.clone()
    unknown[:, 1] = float("nan")
    kept = [0, 2, 3]
    wanted = ranking(attention[:, kept], votes[..., kept], one_hot[:, kept], both)
    close(ranking(attention, votes, unknown, both), wanted)
    for width in (4, 2):
        assert (ranking(attention, votes, randn(5, width), both) == 0).all()


def test_the_loss_adds_up_its_terms_over_what_is_present() -> None:
    fusion, x = made("drfuse", disentangle=0.5, rank=0.3), features(patterns(3))
    output, criterion, present = fusion(x), context(8).criterion, patterns(3)
    extra = output.extra
    wanted = criterion(extra["shared_logits"], TARGET) + 0.5 * divergence(extra["shared"], present)
    for column, logits in enumerate(output.unimodal.values()):
        pair = extra["shared"][:, column], extra["distinct"][:, column]
        term = criterion(logits, TARGET) + 0.5 * F.cosine_similarity(*pair).abs()
        wanted += term * present[:, column]
    votes = torch.stack([*output.unimodal.values(), extra["shared_logits"]], dim=1)
    wanted += 0.3 * ranking(extra["attention"], votes, TARGET, present)
    total = criterion(output.logits, TARGET)
    found = fusion.loss(output, TARGET, context(8))
    close(found[:-1], (total + wanted)[:-1], 1e-5)
    close(found[-1], total[-1], 1e-6)


def test_a_share_of_the_training_rows_loses_some_modalities() -> None:
    torch.manual_seed(0)
    part = random_part(full(4000), 0.3, Draws())
    assert part.any(1).all()
    fewer = ~part.all(1)
    assert abs(fewer.double().mean() - 0.3) < 4 * (0.21 / 4000) ** 0.5
    for size in (1, 2):
        assert abs((part[fewer].sum(1) == size).double().mean() - 0.5) < 0.06
    assert torch.equal(random_part(patterns(3), 0.0, Draws()), patterns(3))
    fusion, x = made("drfuse", aug_missing=1.0), features(full(4))
    assert fusion(x).extra["present"].all()
    assert not fusion.train()(x).extra["present"].all(1).any()


# ---- multimodn


def test_a_prediction_depends_on_the_present_modalities_before_it_only() -> None:
    fusion, x = made("multimodn"), features(full(2))
    leaves = {m: f._replace(pooled=f.pooled.requires_grad_()) for m, f in x.items()}
    steps = fusion(leaves).extra["steps"]
    inputs = [f.pooled for f in leaves.values()]
    for k in range(4):
        slopes = torch.autograd.grad(
            steps[:, k].square().sum(), inputs, retain_graph=True, allow_unused=True
        )
        reached = [g is not None and bool((g != 0).any()) for g in slopes]
        assert reached == [n < k for n in range(3)]
    fusion, x = made("multimodn"), features(full(3))
    before_last = fusion(x).extra["steps"][:, 2]
    assert torch.equal(fusion(keep_only(x, "image", "text")).logits, before_last)
    fewer = made("multimodn", {m: WIDTHS[m] for m in ("image", "audio")})
    fewer.load_state_dict({k: fusion.state_dict()[k] for k in fewer.state_dict()})
    close(fusion(keep_only(x, "image", "audio")).logits, fewer(x).logits)
    nothing = fusion(keep_only(x))
    close(nothing.embedding, fusion.state.expand(3, -1))


def test_updates_that_keep_the_state_are_a_sum_in_any_order() -> None:
    fusion = made("multimodn")
    for name, update in fusion.update.items():
        with torch.no_grad():
            update.weight[:, 32:] = torch.eye(8)
            fusion.read[name].bias.fill_(100.0)  # its ReLU is linear
    x = features(full(4))
    wanted = fusion.state
    for name, update in fusion.update.items():
        read = fusion.read[name](x[name].pooled)
        wanted = wanted + read @ update.weight[:, :32].T + update.bias
    close(fusion(x).embedding, wanted)
    other = copy(fusion, made("multimodn", dict(reversed(WIDTHS.items()))))
    close(other(x).embedding, wanted)


def test_training_draws_an_order_for_each_sample_and_evaluation_does_not() -> None:
    fusion, x = made("multimodn", dropout=0.0), features(patterns(3))
    fixed = made("multimodn", dropout=0.0, shuffle=False)
    copy(fusion, fixed)
    wanted = fusion(x).extra["steps"]
    close(fixed.train()(x).extra["steps"], wanted)
    torch.manual_seed(0)
    same = torch.stack([(fusion.train()(x).logits == wanted[:, -1]).all(1) for _ in range(40)])
    several = patterns(3).sum(1) > 1
    assert same[:, ~several].all()
    assert not same[:, several].all(0).any() and same[:, several].any(0).all()
    assert torch.equal(fusion.eval()(x).extra["steps"], wanted)


@pytest.mark.parametrize("training", [False, True])
def test_the_loss_is_the_mean_over_the_steps_that_happened(training: bool) -> None:
    fusion, x = made("multimodn", dropout=0.0, encode=0.7, change=0.3), features(patterns(3))
    output = fusion.train(training)(x)
    steps, states = output.extra["steps"], output.extra["states"]
    found, criterion = fusion.loss(output, TARGET, context(8)), context(1).criterion
    for row in range(8):
        here = [0, *(k + 1 for k in range(3) if output.extra["happened"][row, k])]
        losses = [criterion(steps[row, k][None], TARGET[row : row + 1])[0] for k in here]
        moves = [(states[row, k] - states[row, k - 1]).square().mean() for k in here[1:]]
        wanted = 0.7 * torch.stack(losses).mean()
        wanted = wanted + (0.003 * torch.stack(moves).mean() if moves else 0)
        close(found[row], wanted, 1e-6)


# ---- medfuse


def test_the_masked_lstm_is_an_lstm_on_the_shortened_sequence_in_its_order() -> None:
    fusion, x = made("medfuse"), features(patterns(3)[:-1])
    lstm = nn.LSTM(8, 8, batch_first=True).double()
    lstm.load_state_dict({f"{k}_l0": v for k, v in fusion.cell.state_dict().items()})
    a = torch.stack([*aligned(fusion, x).values()], dim=1)
    for row, here in enumerate(patterns(3)[:-1]):
        close(fusion(x).embedding[row], lstm(a[row : row + 1, here])[1][0][0, 0])
    fusion, x = made("medfuse"), features(full(3))
    other = copy(fusion, made("medfuse", dict(reversed(WIDTHS.items()))))
    assert not torch.allclose(other(x).logits, fusion(x).logits, atol=1e-4)


def test_an_lstm_without_memory_shows_the_last_present_modality() -> None:
    fusion = made("medfuse")
    with torch.no_grad():
        fusion.cell.weight_hh.zero_()
        fusion.cell.bias_ih[8:16] = -1e9  # the forget gate
    x = features(full(3))
    for names in (("image", "text"), ("text",)):
        close(fusion(keep_only(x, *names)).logits, fusion(keep_only(x, names[-1])).logits)


# ---- dynmm


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


# ---- i2moe


KINDS = dict.fromkeys(("a", "b"), "vector")
BASES = ["concat", "late_mean", "mbt", "tmc"]


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).double()


@pytest.mark.parametrize("base", BASES)
def test_equal_experts_are_the_base_whatever_the_router_says(base: str) -> None:
    fusion, x = made("i2moe", base=base), features(patterns(3))
    for expert in fusion.experts[1:]:
        copy(fusion.experts[0], expert)
    answer, plain = fusion(x), fusion.experts[0](x)
    close(answer.logits, plain.logits)
    close(answer.embedding, plain.embedding)


def test_experts_start_differently_and_a_router_without_weights_averages_them() -> None:
    fusion, x = made("i2moe", base="mbt"), features(patterns(3))
    for parameter in fusion.router[-1].parameters():
        torch.nn.init.zeros_(parameter)
    close(fusion(x).logits, torch.stack([expert(x).logits for expert in fusion.experts]).mean(0))
    close(fusion(x).extra["expert_weights"], torch.full((8, 5), 0.2, dtype=torch.float64))
    fusion = create_fusion("i2moe", WIDTHS, 8, 4)
    first, second = (dict(fusion.experts[n].named_parameters()) for n in (0, 1))
    assert any(not torch.equal(x, second[name]) for name, x in first.items())


def test_synergy_and_redundancy_of_the_same_answers_add_up_to_one_and_ignore_their_scale() -> None:
    answers, perturbed = normal(6, 1, 4).expand(6, 5, 4), normal(6, 1, 3, 4).expand(6, 5, 3, 4)
    losses = interaction_losses(answers, perturbed, full(6))
    close(losses[:, 3] + losses[:, 4], torch.ones(6).double())
    scaled = interaction_losses(3 * answers, 0.2 * perturbed, full(6))
    close(scaled[:, 3:], losses[:, 3:])
    assert not torch.allclose(scaled[:, :3], losses[:, :3])


def test_an_expert_that_reads_one_modality_is_judged_by_losing_it() -> None:
    answers, perturbed = normal(6, 5, 4), normal(6, 5, 3, 4).clone()
    for i in range(3):
        for n in range(3):
            if n != i:
                perturbed[:, i, n] = answers[:, i]  # the others change nothing
    losses = interaction_losses(answers, perturbed, full(6))
    for i in range(3):
        gap = (answers[:, i] - perturbed[:, i, i]).norm(dim=-1)
        close(losses[:, i], (1 - gap).clamp(min=0), 1e-6)


def test_losses_leave_out_what_is_absent_and_are_squares_of_a_single_number() -> None:
    present = patterns(3)
    answers, perturbed = normal(8, 5, 4), normal(8, 5, 3, 4)
    losses = interaction_losses(answers, perturbed, present)
    other = perturbed.masked_fill(~present[:, None, :, None], 7.0)
    close(interaction_losses(answers, other, present), losses)
    alone = present.sum(1) < 2
    assert (losses[alone, :3] == 0).all()
    assert (losses[-1] == 0).all()
    answers, perturbed = normal(6, 5, 1), normal(6, 5, 3, 1)
    losses = interaction_losses(answers, perturbed, full(6))
    change = (answers[:, :, None] - perturbed)[..., 0].square()
    close(losses[:, 3], -change[:, 3].clamp(max=1).mean(1))
    close(losses[:, 4], change[:, 4].mean(1))
    hinge = (change[:, 0, 1:] - change[:, 0, :1] + 1).clamp(min=0)
    close(losses[:, 0], hinge.mean(1))


def test_noise_replaces_one_modality_at_a_time_and_only_in_training() -> None:
    fusion, x = made("i2moe", base="late_mean"), features(full(4))
    assert "perturbed" not in fusion(x).extra
    output = fusion.train()(x)
    assert output.extra["perturbed"].shape == (4, 5, 3, 4)
    expert = fusion.experts[0]
    change = 3 * (output.extra["perturbed"][:, 0] - output.extra["expert_logits"][:, 0, None])
    noise = fusion._noise(x)  # another normal; its own votes are not those of the features
    assert not torch.allclose(noise["text"].pooled, x["text"].pooled)
    votes = expert(x).unimodal
    for column, name in enumerate(WIDTHS):  # a mean of three votes: one of them was replaced
        seen = change[:, column] + votes[name]
        weight = expert.heads[name].weight @ expert.project[name].weight
        assert torch.linalg.matrix_rank(torch.cat([weight, seen.T], dim=1)) <= 4


def test_the_noise_has_the_moments_of_real_tokens_and_present_rows() -> None:
    torch.manual_seed(0)
    fusion = create_fusion("i2moe", {"a": 3, "b": 2}, 8, 4).double()
    x = features(full(4000, 2))
    shifted = {
        name: f._replace(tokens=5 + 2 * f.tokens[..., :w], pooled=3 - 4 * f.pooled[..., :w])
        for (name, w), f in zip({"a": 3, "b": 2}.items(), x.values(), strict=True)
    }
    for _ in range(3):
        noise = fusion._noise(shifted)
    close(noise["a"].tokens.mean(), torch.tensor(5.0).double(), 0.05)
    close(noise["a"].tokens.std(), torch.tensor(2.0).double(), 0.05)
    close(noise["b"].pooled.mean(), torch.tensor(3.0).double(), 0.2)
    close(noise["b"].pooled.std(), torch.tensor(4.0).double(), 0.2)
    x = features(patterns(3))
    moments = RunningMoments(WIDTHS).double()
    tokens = {m: f.tokens.masked_fill(~f.mask[..., None], 0) for m, f in x.items()}
    pooled = {m: f.pooled.masked_fill(~f.mask.any(1)[:, None], 0) for m, f in x.items()}
    moments.observe(tokens, pooled, x)
    for name, f in x.items():
        for kind, rows in (("tokens", f.tokens[f.mask]), ("pooled", f.pooled[f.mask.any(1)])):
            mean, std = moments.of(f"{name}_{kind}")
            close(mean, rows.mean(0))
            close(std, rows.std(0, unbiased=False))


def test_running_means_of_the_base_learn_from_features_and_not_from_noise() -> None:
    fusion, x = made("i2moe", base="mlb").train(), features(full(4))
    fusion(x)
    plain = made("mlb").train()
    plain(x)
    (wanted,) = (m for m in plain.modules() if isinstance(m, RunningMeans))
    for expert in fusion.experts:
        (means,) = (m for m in expert.modules() if isinstance(m, RunningMeans))
        assert means.training
        close(means.mean("text"), wanted.mean("text"))


@pytest.mark.parametrize("base", ["tmc", "qmf", "fuse_moe", "misa"])
def test_the_loss_of_the_base_is_added_for_each_expert(base: str) -> None:
    fusion, x = made("i2moe", base=base, interaction=0.0), features(patterns(3))
    memory = fusion.prepare(TARGET)
    output, wanted = fusion(x), torch.zeros(8).double()
    for number, expert in enumerate(fusion.experts):
        own = None if memory is None else memory[number]
        wanted += expert.loss(expert(x), TARGET, context(8, memory=own)) / 5
    wanted += context(8).criterion(output.logits, TARGET)
    close(fusion.loss(output, TARGET, context(8, memory=memory)), wanted, 1e-6)
    assert fusion.classes_only == fusion.experts[0].classes_only


def test_the_loss_is_the_task_and_a_share_of_every_experts() -> None:
    fusion, x = made("i2moe", interaction=0.5).train(), features(patterns(3))
    output = fusion(x)
    extra = output.extra
    parts = interaction_losses(extra["expert_logits"], extra["perturbed"], extra["present"])
    wanted = context(8).criterion(output.logits, TARGET) + 0.1 * parts.sum(1)
    close(fusion.loss(output, TARGET, context(8)), wanted, 1e-6)


def test_a_model_shows_the_weights_of_each_sample() -> None:
    encoders = {name: {"name": "vector/identity", "in_dim": 3} for name in ("a", "b")}
    samples = [{"a": [1.0, 2.0, 3.0], "b": [0.5, 0.0, 1.0]}, {"a": [3.0, 2.0, 1.0]}]

    def shown(fusion: str) -> dict[str, Tensor]:
        model = create_model({"name": fusion, "dim": 8}, encoders, 2, kinds=KINDS)
        return model.weights(samples)

    experts = shown("i2moe")
    assert [*experts] == ["uniqueness of a", "uniqueness of b", "synergy", "redundancy"]
    close(torch.stack([*experts.values()]).sum(0), torch.ones(2), 1e-6)
    assert shown("gmu")["b"][1] == 0
    with pytest.raises(FusionZooError, match="fusion 'mbt' has no weights of its modalities"):
        shown("mbt")


def test_draws_are_uniform_and_normal_and_unrelated_to_one_another() -> None:
    torch.manual_seed(0)
    draws = Draws()
    first, second = draws.uniform(20_000), draws.uniform(20_000)
    assert first.min() > 0 and first.max() < 1
    for x in (first, second):
        assert abs(x.mean() - 0.5) < 4 / math.sqrt(12 * 20_000)
        counts = torch.histc(x, 20, 0, 1)
        assert ((counts - 1000).square() / 1000).sum() < 43.8  # chi-square, 19 degrees, p = 0.001
    pairs = torch.stack([first[:-1], first[1:], second[:-1]])
    assert (torch.corrcoef(pairs) - torch.eye(3)).abs().max() < 4 / math.sqrt(20_000)
    normal = draws.normal(20_000).double()
    assert abs(normal.mean()) < 4 / math.sqrt(20_000)
    assert abs(normal.square().mean() - 1) < 4 * math.sqrt(2 / 20_000)
    assert abs(normal.pow(4).mean() - 3) < 4 * math.sqrt(96 / 20_000)


def test_draws_neither_read_nor_move_the_global_generator_and_a_checkpoint_restores_them() -> None:
    draws = Draws()
    draws.normal(3)
    state = {name: x.clone() for name, x in draws.state_dict().items()}
    before = torch.get_rng_state()
    wanted = draws.normal(2, 5)
    assert torch.equal(torch.get_rng_state(), before)
    other = Draws()
    other.load_state_dict(state)
    assert torch.equal(other.normal(2, 5), wanted)
