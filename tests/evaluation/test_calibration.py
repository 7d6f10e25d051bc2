"""Calibration figures on cases with known answers."""

from __future__ import annotations

import pytest
import torch
from sklearn.metrics import brier_score_loss, log_loss

from fusionzoo.evaluation.calibration import (
    calibration,
    calibration_error,
    reliability,
    risk_coverage,
)


def test_a_model_that_says_what_it_knows_is_calibrated() -> None:
    draw = torch.Generator().manual_seed(0)
    chance = torch.rand(20_000, generator=draw, dtype=torch.float64)
    target = (torch.rand(20_000, generator=draw) < chance).long()
    logits = torch.stack([(1 - chance).log(), chance.log()], dim=1)
    assert calibration(logits, target)["ece"] < 0.01
    assert calibration(3 * logits, target)["ece"] > 0.1  # overconfident


def test_brier_and_likelihood_agree_with_sklearn() -> None:
    draw = torch.Generator().manual_seed(1)
    logits = torch.randn(50, 2, generator=draw)
    target = torch.randint(2, (50,), generator=draw)
    probabilities = logits.double().softmax(-1)
    found = calibration(logits, target)
    # sklearn's is that of one of the two classes.
    assert found["brier"] == pytest.approx(2 * brier_score_loss(target, probabilities[:, 1]))
    assert found["nll"] == pytest.approx(log_loss(target, probabilities))


def test_bins_are_of_equal_width_and_cover_everything() -> None:
    bins = reliability(torch.rand(155, 4).softmax(-1), torch.zeros(155, dtype=torch.int64))
    assert bins.size.sum() == 155
    assert (bins.size > 0).all()  # empty bins are left out
    assert (bins.confidence.diff() > 0).all()
    assert (bins.confidence * 15).ceil().unique().numel() == len(bins.size)


def test_ece_is_that_of_a_plain_loop_over_fifteen_bins() -> None:
    draw = torch.Generator().manual_seed(2)
    logits, target = 2 * torch.randn(300, 5, generator=draw), torch.arange(300) % 5
    confidence, guess = logits.double().softmax(-1).max(-1)
    expected = 0.0
    for k in range(15):
        inside = (confidence > k / 15) & (confidence <= (k + 1) / 15)
        if inside.any():
            accuracy = (guess == target)[inside].double().mean()
            expected += inside.sum().item() / 300 * (accuracy - confidence[inside].mean()).abs()
    assert calibration(logits, target)["ece"] == pytest.approx(float(expected))


@pytest.mark.parametrize("order", ["right first", "wrong first"])
def test_a_calibrated_constant_has_no_calibration_error_in_any_order(order: str) -> None:
    target = torch.arange(200) % 2  # the first class is right for half of the samples
    target = target.sort(descending=order == "wrong first").values
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log().expand(200, -1)
    assert calibration(logits, target)["ece"] == pytest.approx(0, abs=1e-6)  # logits are float32


def calibrated(samples: int, seed: int, seeds: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (seeds, N, 12) and labels drawn from their very probabilities."""
    draw = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(samples, 12, generator=draw, dtype=torch.float64)
    target = logits.softmax(-1).multinomial(1, generator=draw)[:, 0]
    return logits.expand(seeds, -1, -1), target


def test_small_test_splits_of_calibrated_models_cannot_be_told_from_calibrated() -> None:
    cases = [calibration_error(*calibrated(184, seed)) for seed in range(60)]
    assert sum(case.ece for case in cases) / 60 == pytest.approx(0.09, abs=0.01)  # all of it noise
    assert sum(case.if_calibrated for case in cases) / 60 == pytest.approx(0.09, abs=0.01)
    assert sum(case.debiased for case in cases) / 60 < 0.04
    # 57 of 60 are expected; fewer than 51 has a chance of 0.2 %.
    assert sum(case.within_noise for case in cases) >= 51


def test_an_overconfident_model_is_told_from_calibrated_and_keeps_its_error() -> None:
    logits, target = calibrated(20_000, 0)
    truth = calibration((3 * logits)[0], target)["ece"]  # next to no noise
    measured = [calibration_error(3 * x, y) for x, y in (calibrated(184, s) for s in range(20))]
    assert not any(case.within_noise for case in measured)
    assert sum(case.debiased for case in measured) / 20 == pytest.approx(truth, abs=0.02)


def test_seeds_that_answer_alike_do_not_make_the_noise_smaller() -> None:
    once, thrice = (calibration_error(*calibrated(184, 5, seeds)) for seeds in (1, 3))
    assert thrice == pytest.approx(once)


def test_a_sure_model_that_is_always_right_is_calibrated() -> None:
    target = torch.arange(30) % 3
    sure = calibration_error(100.0 * torch.nn.functional.one_hot(target)[None], target)
    assert (sure.ece, sure.debiased, sure.within_noise) == (0, 0, True)


def test_the_simulation_is_the_same_each_time_and_leaves_the_random_state_alone() -> None:
    logits, target = calibrated(50, 0)
    state = torch.get_rng_state()
    assert calibration_error(logits, target) == calibration_error(logits, target)
    assert torch.equal(state, torch.get_rng_state())


def test_confident_answers_first() -> None:
    logits = torch.tensor([[9.0, 0.0], [0.1, 0.0], [5.0, 0.0]])
    target = torch.tensor([0, 1, 0])  # only the least confident answer is wrong
    assert risk_coverage(logits, target).tolist() == [0, 0, pytest.approx(1 / 3)]
