"""The hybrid fusions are what their formulas say."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusionzoo.errors import FusionZooError
from fusionzoo.fusion import create_fusion
from fusionzoo.fusion.hybrid.misa import moment_discrepancy, overlap
from fusionzoo.fusion.hybrid.mmin import random_subset, squared_error
from fusionzoo.fusion.hybrid.mvae_poe import multiply
from fusionzoo.structures import StepContext
from fusionzoo.testing.fusions import features, full, patterns
from helpers.oracle import WIDTHS, aligned, close, context, copy, made

ALL = torch.ones(12, dtype=torch.bool)
TARGET = torch.tensor([0, 1, 2, 3])


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
    loss = fusion.loss(output, TARGET, context).sum()
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
    loss = fusion.loss(fusion(x), TARGET, context(4))
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
        wanted += context(4).criterion(fusion.head(sample), TARGET)
        for m in subset:
            wanted += (fusion.decoders[m](sample) - x[m].pooled).square().mean(-1)
    close(fusion.loss(output, TARGET, context(4)), wanted)


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
    extra = fusion.loss(output, TARGET, context(4)) - context(4).criterion(output.logits, TARGET)
    assert (extra > 0).all()
    same = output.extra["shared"][:, :1].expand_as(output.extra["shared"])
    output = output._replace(extra={**output.extra, "shared": same})
    extra = fusion.loss(output, TARGET, context(4)) - context(4).criterion(output.logits, TARGET)
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
    fusion.loss(fusion(x), TARGET, context(4, phase=1)).sum().backward()
    assert all(p.grad is None for p in fusion.project.parameters())
    assert all(p.grad is not None for p in fusion.forth.parameters())
    assert all(p.grad is not None for p in fusion.back.parameters())


def test_mmin_needs_two_modalities() -> None:
    with pytest.raises(FusionZooError, match="'mmin' needs at least 2 modalities; there is only"):
        create_fusion("mmin", {"image": 4}, 8, 4)
