"""Calibration and selective prediction of a classifier."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .metrics import row_mean

BINS = 15  # of equal width, as most papers have them since Guo et al. 2017, arXiv:1706.04599
DRAWS = 1000  # simulated calibrated models
LEVEL = 0.95  # quantile of their calibration errors that is reported as `limit`


class Reliability(NamedTuple):
    """A reliability diagram: non-empty confidence bins of width 1 / 15."""

    confidence: Tensor  # (bins,) mean confidence in each bin
    accuracy: Tensor  # (bins,)
    size: Tensor  # (bins,) number of samples


class CalibrationError(NamedTuple):
    """The expected calibration error (ECE), compared with simulated calibrated models."""

    ece: float
    debiased: float  # sqrt(max(ece^2 - mean ece^2 of calibrated models, 0))
    if_calibrated: float  # mean over calibrated models with the same confidences
    limit: float  # 95 % of those models get at most this
    within_noise: bool  # whether `ece` is at most `limit`


def reliability(
    probabilities: Tensor, target: Tensor, weights: Tensor | None = None
) -> Reliability:
    """Bin predictions by confidence; equal widths, closed above as in Guo et al. 2017.

    Rows count by their `weights` (N,), of which `size` is then the sum.
    """
    confidence, correct, bin_index = _answers(probabilities, target)
    if weights is not None:
        weights = weights.double()
        confidence, correct = weights * confidence, weights * correct
    size, confidence_sum, correct_sum = (
        torch.bincount(bin_index, x, minlength=BINS) for x in (weights, confidence, correct)
    )
    filled = size > 0
    return Reliability((confidence_sum / size)[filled], (correct_sum / size)[filled], size[filled])


def calibration(logits: Tensor, target: Tensor, weights: Tensor | None = None) -> dict[str, float]:
    """Return `ece`, `brier` and `nll` in nats; rows count by their `weights` (N,).

    `ece` is the mean over samples of |accuracy - confidence| of the sample's bin. `brier` is the
    sum over classes of squared errors, so it lies in [0, 2].
    """
    probabilities = logits.double().softmax(-1)
    bins = reliability(probabilities, target, weights)
    gaps = (bins.confidence - bins.accuracy).abs()
    one_hot = F.one_hot(target, logits.shape[-1])
    losses = F.cross_entropy(logits.double(), target, reduction="none")
    return {
        "ece": float((gaps * bins.size).sum() / bins.size.sum()),
        "brier": float(row_mean(((probabilities - one_hot) ** 2).sum(-1), weights)),
        "nll": float(row_mean(losses, weights)),
    }


def calibration_error(logits: Tensor, target: Tensor) -> CalibrationError:
    """Return the mean ECE of (S, N, K) logits over S seeds, and the ECE of calibrated models.

    On N samples even a calibrated model has an ECE above 0, because bin accuracies are estimates.
    Calibrated models are simulated by drawing "correct" with probability equal to the confidence.
    All seeds share the same draws because they are tested on the same samples; independent draws
    would underestimate the variance of their mean.
    """
    binned = [_answers(x.double().softmax(-1), target) for x in logits]
    samples = len(target)
    measured = torch.stack([_error(correct, c, bin_index) for c, correct, bin_index in binned])
    draw = torch.Generator().manual_seed(0)
    chunk = max(1, 2**22 // samples)  # 32 MB at a time
    parts = []
    for first in range(0, DRAWS, chunk):
        size = (min(chunk, DRAWS - first), samples)
        uniform = torch.rand(size, generator=draw, dtype=torch.float64)
        errors = [_error((uniform < c).double(), c, bin_index) for c, _, bin_index in binned]
        parts.append(torch.stack(errors, dim=1))
    simulated = torch.cat(parts)  # (draws, S)
    debiased = (measured.square() - simulated.square().mean(0)).clamp(min=0).sqrt()
    means, ece = simulated.mean(1), float(measured.mean())
    limit = float(means.quantile(LEVEL))
    figures = (ece, float(debiased.mean()), float(means.mean()), limit)
    return CalibrationError(*figures, within_noise=ece <= limit + 1e-9)


def risk_coverage(logits: Tensor, target: Tensor) -> Tensor:
    """Return the error rate among the k most confident predictions, for k = 1 to N: (N,).

    Its mean is the area under the risk-coverage curve (Geifman and El-Yaniv 2017).
    """
    confidence, predicted = logits.double().softmax(-1).max(-1)
    wrong = (predicted != target)[confidence.argsort(descending=True, stable=True)].double()
    return wrong.cumsum(0) / torch.arange(1, len(wrong) + 1)


def _answers(probabilities: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return confidence, correctness (0 or 1) and bin index of each prediction, (N,)."""
    confidence, predicted = probabilities.double().max(-1)
    bin_index = (confidence * BINS).ceil().long().clamp(1, BINS) - 1
    return confidence, (predicted == target).double(), bin_index


def _error(correct: Tensor, confidence: Tensor, bin_index: Tensor) -> Tensor:
    """Return the ECE of (..., N) predictions that share confidences and bins."""
    membership = F.one_hot(bin_index, BINS).double()
    return ((correct - confidence) @ membership).abs().sum(-1) / len(bin_index)
