"""Do probabilities mean what they say? Calibration and selective prediction of a classifier.

Shapes: probabilities (N, K), target (N,).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BINS = 15  # of equal width, as most papers have them since Guo et al. 2017, arXiv:1706.04599
DRAWS = 1000  # simulated calibrated models
LEVEL = 0.95  # of them get a calibration error up to the limit


class Reliability(NamedTuple):
    """Bins of the confidence of the answer, each of width 1 / 15; empty ones are left out."""

    confidence: Tensor  # (bins,) mean of each
    accuracy: Tensor
    size: Tensor  # samples


class CalibrationError(NamedTuple):
    """The expected calibration error, beside that of perfectly calibrated models."""

    ece: float
    debiased: float  # without what chance adds: sqrt(max(ece^2 - mean square if calibrated, 0))
    if_calibrated: float  # mean over calibrated models with the same confidences
    limit: float  # 95 % of those models get at most this
    within_noise: bool  # whether the model cannot be told from a calibrated one


def reliability(probabilities: Tensor, target: Tensor) -> Reliability:
    """Sort answers by confidence into bins of equal width, closed above as in Guo et al. 2017."""
    confidence, correct, place = _answers(probabilities, target)
    size, confidence_sum, correct_sum = (
        torch.bincount(place, weights, minlength=BINS) for weights in (None, confidence, correct)
    )
    filled = size > 0
    return Reliability((confidence_sum / size)[filled], (correct_sum / size)[filled], size[filled])


def calibration(logits: Tensor, target: Tensor) -> dict[str, float]:
    """Return `ece`, `brier` and `nll` in nats.

    `ece` is the mean over samples of |accuracy - confidence| of the sample's bin. `brier` is the
    sum over classes of squared errors, so it lies in [0, 2].
    """
    probabilities = logits.double().softmax(-1)
    bins = reliability(probabilities, target)
    gaps = (bins.confidence - bins.accuracy).abs()
    wanted = F.one_hot(target, logits.shape[-1])
    return {
        "ece": float((gaps * bins.size).sum() / bins.size.sum()),
        "brier": float(((probabilities - wanted) ** 2).sum(-1).mean()),
        "nll": float(F.cross_entropy(logits.double(), target)),
    }


def calibration_error(logits: Tensor, target: Tensor) -> CalibrationError:
    """Return the mean ECE of (S, N, K) logits over seeds, and what calibrated models would get.

    The ECE of N samples is above 0 for every model, since the accuracy of a bin is a sample's. A
    calibrated model is simulated by drawing "correct" with the chance that each confidence states.
    All seeds read the same draws, because they answer the same samples: independent draws would
    make the noise of their mean too small.
    """
    binned = [_answers(x.double().softmax(-1), target) for x in logits]
    samples = len(target)
    measured = torch.stack([_error(correct, c, place) for c, correct, place in binned])
    draw = torch.Generator().manual_seed(0)
    chunk = max(1, 2**22 // samples)  # 32 MB at a time
    parts = []
    for first in range(0, DRAWS, chunk):
        size = (min(chunk, DRAWS - first), samples)
        uniform = torch.rand(size, generator=draw, dtype=torch.float64)
        parts.append(
            torch.stack([_error((uniform < c).double(), c, place) for c, _, place in binned], dim=1)
        )
    simulated = torch.cat(parts)  # (draws, S)
    debiased = (measured.square() - simulated.square().mean(0)).clamp(min=0).sqrt()
    means = simulated.mean(1)
    limit = float(means.quantile(LEVEL))
    ece = float(measured.mean())
    return CalibrationError(
        ece, float(debiased.mean()), float(means.mean()), limit, ece <= limit + 1e-9
    )


def risk_coverage(logits: Tensor, target: Tensor) -> Tensor:
    """Return the error of the k most confident answers, for k = 1 to N: (N,).

    Its mean is the area under the risk-coverage curve (Geifman and El-Yaniv 2017).
    """
    confidence, guess = logits.double().softmax(-1).max(-1)
    order = confidence.argsort(descending=True, stable=True)
    wrong = (guess != target)[order].double()
    return wrong.cumsum(0) / torch.arange(1, len(wrong) + 1)


def _answers(probabilities: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return confidence, whether it is correct (0 or 1) and the bin of each answer, (N,)."""
    confidence, guess = probabilities.double().max(-1)
    place = (confidence * BINS).ceil().long().clamp(1, BINS) - 1
    return confidence, (guess == target).double(), place


def _error(correct: Tensor, confidence: Tensor, place: Tensor) -> Tensor:
    """Return the ECE of (..., N) answers that share confidences and bins."""
    inside = F.one_hot(place, BINS).double()
    return ((correct - confidence) @ inside).abs().sum(-1) / len(place)
