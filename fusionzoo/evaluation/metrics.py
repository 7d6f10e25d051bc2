"""Figures that say how well a model did, by task; and the score of each sample behind them.

Shapes: classification logits (N, K), target (N,); multilabel logits and target (N, K), target 0 or
1; regression prediction and target (N,) or (N, K); ordinal predicted and true level, from 0, (N,).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def classification(logits: Tensor, target: Tensor) -> dict[str, float]:
    """Return accuracy, macro F1 over the classes that occur, and loss in nats."""
    guess, classes = logits.argmax(-1), logits.shape[-1]
    # Counted here: a benchmark asks for this a thousand times, and sklearn's takes 10 ms.
    hits = torch.bincount(target[guess == target], minlength=classes)
    occurs, said = (torch.bincount(x, minlength=classes) for x in (target, guess))
    f1 = 2 * hits / (occurs + said).clamp(min=1)
    return {
        "accuracy": (guess == target).double().mean().item(),
        "macro_f1": f1[occurs > 0].double().mean().item(),
        "loss": F.cross_entropy(logits.float(), target).item(),
    }


def multilabel(logits: Tensor, target: Tensor) -> dict[str, float]:
    """Return the mean F1 of samples, macro F1, mean average precision of labels that occur, loss.

    A label is given where its logit is above 0. A sample without labels counts 1 where none is
    given. Macro F1 is the mean over the labels that occur or are given, as scikit-learn's with
    `zero_division=nan`: a label given without cause counts 0, for nothing else shows it (a class
    that is answered without cause already costs the true class), and 1 if there is no such label.
    Precision is NaN where a logit is not finite.
    """
    from sklearn.metrics import average_precision_score

    guess, wanted = logits > 0, target.bool()
    occur = wanted.any(0)
    precision = 0.0
    if not logits.isfinite().all():
        precision = torch.nan
    elif occur.any():
        precision = average_precision_score(target[:, occur], logits[:, occur], average="macro")
    counts = guess.sum(0) + wanted.sum(0)
    f1 = 2 * (guess & wanted).sum(0).double() / counts.clamp(min=1)
    return {
        "sample_f1": multilabel_scores(logits, target).mean().item(),
        "macro_f1": f1[counts > 0].mean().item() if counts.any() else 1.0,
        "map": float(precision),
        "loss": F.binary_cross_entropy_with_logits(logits.float(), target.float()).item(),
    }


def regression(prediction: Tensor, target: Tensor) -> dict[str, float]:
    """Return mean absolute error, root mean squared error, R2 and Spearman's rank correlation.

    Each is computed for each target, then averaged, so that levels and scales of the targets do not
    mix. The last two leave out targets that never vary, where they are undefined (0 if none
    varies); a prediction that never varies has a rank correlation of 0. Where a prediction is not
    finite, both are NaN.
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

    Kappa is 1 - E[(p - t)^2] / E[(p - t')^2], t' the target of another sample drawn at random: 0
    for guessing, 1 for no error at all.
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
    guess, wanted = (logits > 0).double(), target.double()
    both, either = (guess * wanted).sum(-1), guess.sum(-1) + wanted.sum(-1)
    return torch.where(either > 0, 2 * both / either.clamp(min=1), 1.0)


def right(logits: Tensor, target: Tensor) -> Tensor:
    """Return 1 for each sample that is answered correctly, else 0: (N,)."""
    return (logits.argmax(-1) == target).double()


def closeness(prediction: Tensor, target: Tensor) -> Tensor:
    """Return each sample's negative absolute error, (N,): the higher the better."""
    return -(prediction - target).double().abs().reshape(len(target), -1).mean(-1)


# task -> its figures, and each sample's score, which statistics.compare takes
TASKS: dict[
    str, tuple[Callable[[Tensor, Tensor], dict[str, float]], Callable[[Tensor, Tensor], Tensor]]
] = {
    "classification": (classification, right),
    "multilabel": (multilabel, multilabel_scores),
    "regression": (regression, closeness),
    "ordinal": (ordinal, closeness),
}
