"""Metrics by task, ranks, and the per-sample scores that the significance tests compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


def classification(logits: Tensor, target: Tensor) -> dict[str, float]:
    """Return accuracy, macro F1 over the classes in `target`, and cross-entropy in nats."""
    predicted, classes = logits.argmax(-1), logits.shape[-1]
    # Not scikit-learn's F1, which takes 10 ms: a benchmark calls this thousands of times.
    hits = torch.bincount(target[predicted == target], minlength=classes)
    num_true, num_predicted = (torch.bincount(x, minlength=classes) for x in (target, predicted))
    f1 = 2 * hits / (num_true + num_predicted).clamp(min=1)
    return {
        "accuracy": (predicted == target).double().mean().item(),
        "macro_f1": f1[num_true > 0].double().mean().item(),
        "loss": F.cross_entropy(logits.float(), target).item(),
    }


def multilabel(logits: Tensor, target: Tensor) -> dict[str, float]:
    """Return sample-averaged F1, macro F1, mean average precision and binary cross-entropy.

    A label is predicted where its logit is above 0. Sample F1 is 1 where a sample has no label and
    none is predicted. Macro F1 averages over the labels that occur or are predicted, as
    scikit-learn's with `zero_division=nan`, and is 1 if there are none. Mean average precision is
    over the labels that occur; NaN where a logit is not finite.
    """
    from sklearn.metrics import average_precision_score

    predicted, true = logits > 0, target.bool()
    occur = true.any(0)
    precision = 0.0
    if not logits.isfinite().all():
        precision = torch.nan
    elif occur.any():
        precision = average_precision_score(target[:, occur], logits[:, occur], average="macro")
    counts = predicted.sum(0) + true.sum(0)
    f1 = 2 * (predicted & true).sum(0).double() / counts.clamp(min=1)
    return {
        "sample_f1": multilabel_scores(logits, target).mean().item(),
        "macro_f1": f1[counts > 0].mean().item() if counts.any() else 1.0,
        "map": float(precision),
        "loss": F.binary_cross_entropy_with_logits(logits.float(), target.float()).item(),
    }


def regression(prediction: Tensor, target: Tensor) -> dict[str, float]:
    """Return mean absolute error, root mean squared error, R2 and Spearman's rank correlation.

    Each is computed per target, then averaged over targets. R2 and Spearman skip constant targets,
    where they are undefined (0 if all are constant); a constant prediction has a rank correlation
    of 0. Both are NaN where a prediction is not finite.
    """
    from scipy.stats import spearmanr
    from sklearn.metrics import r2_score

    prediction, target = (x.double().reshape(len(x), -1) for x in (prediction, target))
    error = prediction - target
    figures = {
        "mae": error.abs().mean().item(),
        "rmse": error.square().mean(0).sqrt().mean().item(),
    }
    if not prediction.isfinite().all():
        return {**figures, "r2": torch.nan, "spearman": torch.nan}
    r2, rank = [], []
    for p, t in zip(prediction.T, target.T, strict=True):
        if (t != t[0]).any():
            r2.append(float(r2_score(t, p)))
            rank.append(float(spearmanr(p, t).statistic) if (p != p[0]).any() else 0.0)
    return {
        **figures,
        "r2": sum(r2) / len(r2) if r2 else 0.0,
        "spearman": sum(rank) / len(rank) if rank else 0.0,
    }


def ordinal(prediction: Tensor, target: Tensor) -> dict[str, float]:
    """Return the mean absolute error in levels, accuracy, and quadratic weighted kappa.

    Kappa is 1 - E[(p - t)^2] / E[(p - t')^2], t' the target of a random other sample: 0 at chance
    level, 1 without errors.
    """
    p, t = prediction.double(), target.double()
    expected = p.square().mean() + t.square().mean() - 2 * p.mean() * t.mean()
    error = (p - t).square().mean()
    return {
        "mae": (p - t).abs().mean().item(),
        "accuracy": (p == t).double().mean().item(),
        "kappa": (1 - error / expected).item() if expected > 0 else 1.0,
    }


def multilabel_scores(logits: Tensor, target: Tensor) -> Tensor:
    """Return each sample's F1, (N,)."""
    predicted, true = (logits > 0).double(), target.double()
    correct, total = (predicted * true).sum(-1), predicted.sum(-1) + true.sum(-1)
    return torch.where(total > 0, 2 * correct / total.clamp(min=1), 1.0)


def right(logits: Tensor, target: Tensor) -> Tensor:
    """Return 1 for each correctly classified sample, else 0: (N,)."""
    return (logits.argmax(-1) == target).double()


def closeness(prediction: Tensor, target: Tensor) -> Tensor:
    """Return each sample's negative absolute error, (N,): the higher the better."""
    return -(prediction - target).double().abs().reshape(len(target), -1).mean(-1)


# task -> its metrics, and the per-sample scores that `statistics.compare` takes
TASKS: dict[
    str, tuple[Callable[[Tensor, Tensor], dict[str, float]], Callable[[Tensor, Tensor], Tensor]]
] = {
    "classification": (classification, right),
    "multilabel": (multilabel, multilabel_scores),
    "regression": (regression, closeness),
    "ordinal": (ordinal, closeness),
}


@dataclass(frozen=True)
class Metric:
    """A figure: the mean of the samples' scores, up to its sign."""

    name: str  # key of a row of results
    title: str
    higher: bool  # whether more of it is better
    share: bool  # whether it lies in 0 to 1, with differences in points of 0.01

    def shown(self, score: float) -> float:
        """Return the figure of a score."""
        return score if self.higher else -score

    def difference(self, gain: float) -> str:
        """Format a difference between scores, above 0 = better: in points, else in its own unit."""
        return f"{100 * gain:+.1f}" if self.share else f"{gain:+.3g}"


# kind of target -> the figure by which a benchmark compares candidates
METRICS = {
    "classification": Metric("accuracy", "accuracy", True, True),
    "multilabel": Metric("sample_f1", "sample F1", True, True),
    "regression": Metric("mae", "MAE", False, False),
    "ordinal": Metric("mae", "MAE in levels", False, False),
    "several": Metric("loss", "loss", False, False),
}
