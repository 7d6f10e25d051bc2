"""Calibration figures on cases with known answers."""

from __future__ import annotations

import pytest
import torch
from sklearn.metrics import brier_score_loss, log_loss

from fusionzoo.evaluation.calibration import calibration, reliability, risk_coverage


def test_a_model_that_says_what_it_knows_is_calibrated() -> None:
    draw = torch.Generator().manual_seed(0)
    chance = torch.rand(20_000, generator=draw, dtype=torch.float64)
    target = (torch.rand(20_000, generator=draw) < chance).long()
    logits = torch.stack([(1 - chance).log(), chance.log()], dim=1)
    honest = calibration(logits, target)
    assert honest["ece"] < 0.01
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


def test_bins_are_equally_full_and_cover_everything() -> None:
    probabilities = torch.rand(155, 4).softmax(-1)
    found = reliability(probabilities, torch.zeros(155, dtype=torch.int64))
    assert found.size.sum() == 155
    assert found.size.max() - found.size.min() <= 1
    assert (found.confidence.diff() >= 0).all()


def test_few_samples_make_few_bins() -> None:
    assert len(reliability(torch.rand(12, 3), torch.zeros(12, dtype=torch.int64)).size) == 1


def test_confident_answers_first() -> None:
    logits = torch.tensor([[9.0, 0.0], [0.1, 0.0], [5.0, 0.0]])
    target = torch.tensor([0, 1, 0])  # only the least confident answer is wrong
    assert risk_coverage(logits, target).tolist() == [0, 0, pytest.approx(1 / 3)]
