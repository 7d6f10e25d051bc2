"""`simmlm`: its mixture, its nested subsets and its hinge."""

from __future__ import annotations

import pytest
import torch

from fusionzoo.errors import FusionZooError
from fusionzoo.fusion import create_fusion
from fusionzoo.fusion.base import Draws
from fusionzoo.fusion.late.simmlm import more_beats_fewer, nested_subsets
from fusionzoo.structures import keep_only
from fusionzoo.testing.fusions import features, full, patterns
from helpers.oracle import WIDTHS, close, context, copy, made

TARGET = torch.arange(8) % 4


def silent(mix: str) -> torch.nn.Module:
    fusion = made("simmlm", mix=mix)
    for parameter in fusion.router[-1].parameters():
        torch.nn.init.zeros_(parameter)
    return fusion


def test_without_router_weights_it_is_the_mean_of_what_it_mixes() -> None:
    x = features(patterns(3)[:-1])
    fusion = silent("logit")
    close(fusion(x).logits, copy(fusion, made("late_mean"), strict=False)(x).logits)
    fusion = silent("prob")
    close(fusion(x).logits, copy(fusion, made("late_mean", space="prob"), strict=False)(x).logits)
    fusion = silent("log_prob")
    mean = copy(fusion, made("late_mean"), strict=False)(x).logits
    close(fusion(x).logits.softmax(-1), mean.softmax(-1))


@pytest.mark.parametrize("mix", ["log_prob", "logit", "prob", "feature"])
def test_a_single_modality_is_its_own_answer_and_weights_add_up_to_one(mix: str) -> None:
    fusion = made("simmlm", mix=mix)
    output = fusion(keep_only(features(full(3)), "text"))
    close(output.logits.softmax(-1), output.unimodal["text"].softmax(-1))
    aligned, present = fusion.aligned(x := features(full(3)))
    votes = torch.stack([*fusion(x).unimodal.values()], dim=1)
    _, weights = fusion._mixture(aligned, votes, present)
    close(weights.sum(1), torch.ones(3).double())


@pytest.mark.parametrize(("mix", "same"), [("log_prob", True), ("logit", False)])
def test_a_constant_added_to_a_modalitys_logits_matters_only_if_they_are_not_normalised(
    mix: str, same: bool
) -> None:
    fusion, x = made("simmlm", mix=mix), features(full(3))
    before = fusion(x).logits.softmax(-1)
    with torch.no_grad():
        fusion.heads["text"].bias += 3
    assert torch.allclose(fusion(x).logits.softmax(-1), before) == same


def test_the_hinge_shifts_the_gradient_to_more_modalities() -> None:
    more = torch.tensor([2.0, 1.0], requires_grad=True)
    fewer = torch.tensor([1.0, 2.0], requires_grad=True)
    more_beats_fewer(more, fewer, 0.1).sum().backward()
    close(more.grad, torch.tensor([0.6, 0.5]))
    close(fewer.grad, torch.tensor([0.4, 0.5]))
    fewer.grad = None
    more_beats_fewer(more, fewer, 2.0, detach_fewer=True).sum().backward()
    close(fewer.grad, torch.tensor([0.5, 0.5]))


def test_subsets_are_nested_of_any_size_and_do_not_depend_on_other_rows() -> None:
    torch.manual_seed(0)
    present = patterns(4).repeat(600, 1)
    more, fewer = nested_subsets(present, Draws())
    assert (fewer <= more).all() and (more <= present).all()
    count = present.sum(1)
    assert (fewer.sum(1) < more.sum(1))[count > 1].all()
    alone = count == 1
    assert torch.equal(more[alone], present[alone]) and torch.equal(fewer[alone], present[alone])
    complete = count == 4
    sizes = more[complete].sum(1)
    for size in (2, 3, 4):
        assert abs((sizes == size).double().mean() - 1 / 3) < 4 * (2 / 9 / 600) ** 0.5
    assert not more[count == 0].any()
    torch.manual_seed(0)
    draws = Draws()
    start = draws.state.clone()
    first = nested_subsets(full(8), draws)
    draws.state.copy_(start)
    second = nested_subsets(torch.cat([full(4), patterns(3)[:4]]), draws)
    for x, y in zip(first, second, strict=True):
        assert torch.equal(x[:4], y[:4])


def test_the_last_phase_compares_nested_subsets_and_the_first_trains_each_expert() -> None:
    fusion, x = made("simmlm", alpha=0.2).train(), features(patterns(3))
    output, criterion = fusion(x), context(8).criterion
    more, fewer = criterion(output.logits, TARGET), criterion(output.extra["fewer"], TARGET)
    wanted = (more + fewer) / 2 + 0.2 * (more - fewer).clamp(min=0)
    found = fusion.loss(output, TARGET, context(8, phase=1))
    close(found[:-1], wanted[:-1])
    alone = patterns(3).sum(1) == 1
    close(found[alone], more[alone])
    own = torch.stack([criterion(z, TARGET) for z in output.unimodal.values()], dim=1)
    first = fusion.loss(output, TARGET, context(8, phase=0))
    close(first[:-1], (own * patterns(3)).sum(1)[:-1])
    assert [phase.name for phase in fusion.phases] == ["experts", "all"]
    assert len(made("simmlm", expert_share=0.0).phases) == 1
    assert "fewer" not in fusion.eval()(x).extra


def test_settings_that_reward_failure_are_refused() -> None:
    for settings in ({"alpha": 0.6}, {"alpha": -0.1}, {"expert_share": 1.0}):
        with pytest.raises(FusionZooError, match=r"alpha is 0 to 0\.5, or more with"):
            create_fusion("simmlm", WIDTHS, 8, 4, **settings)
    assert create_fusion("simmlm", WIDTHS, 8, 4, alpha=0.6, detach_fewer=True).classes_only
    assert not create_fusion("simmlm", WIDTHS, 8, 4, mix="logit").classes_only
