"""Do probabilities mean what they say? Calibration and selective prediction of a classifier.

Shapes: probabilities (N, K), target (N,).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BINS = 15


class Reliability(NamedTuple):
    """Equally filled bins of the confidence of the answer."""

    confidence: Tensor  # (bins,) mean of each
    accuracy: Tensor
    size: Tensor  # samples


def reliability(probabilities: Tensor, target: Tensor, bins: int = BINS) -> Reliability:
    """Sort by confidence into bins of equal size, as far as N allows: at least 10 samples each."""
    confidence, guess = probabilities.max(-1)
    right = (guess == target).double()
    order = confidence.argsort()
    parts = order.tensor_split(max(1, min(bins, len(order) // 10)))
    return Reliability(
        torch.stack([confidence[part].double().mean() for part in parts]),
        torch.stack([right[part].mean() for part in parts]),
        torch.tensor([len(part) for part in parts]),
    )


def calibration(logits: Tensor, target: Tensor) -> dict[str, float]:
    """Return `ece` (adaptive bins, Nguyen and O'Connor 2015), `brier` and `nll` in nats.

    `brier` is the sum over classes of squared errors, so it lies in [0, 2].
    """
    probabilities = logits.double().softmax(-1)
    found = reliability(probabilities, target)
    gaps = (found.confidence - found.accuracy).abs()
    wanted = F.one_hot(target, logits.shape[-1])
    return {
        "ece": float((gaps * found.size).sum() / found.size.sum()),
        "brier": float(((probabilities - wanted) ** 2).sum(-1).mean()),
        "nll": float(F.cross_entropy(logits.double(), target)),
    }


def risk_coverage(logits: Tensor, target: Tensor) -> Tensor:
    """Return the error of the k most confident answers, for k = 1 to N: (N,).

    Its mean is the area under the risk-coverage curve (Geifman and El-Yaniv 2017).
    """
    confidence, guess = logits.double().softmax(-1).max(-1)
    order = confidence.argsort(descending=True, stable=True)
    wrong = (guess != target)[order].double()
    return wrong.cumsum(0) / torch.arange(1, len(wrong) + 1)
