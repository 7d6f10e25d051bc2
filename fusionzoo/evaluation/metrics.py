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
    given. Precision is NaN where a logit is not finite.
    """
    from sklearn.metrics import average_precision_score, f1_score

    guess = logits > 0
    occur = target.any(0)
    precision = 0.0
    if not logits.isfinite().all():
        precision = torch.nan
    elif occur.any():
        precision = average_precision_score(target[:, occur], logits[:, occur], average="macro")
    return {
        "sample_f1": multilabel_scores(logits, target).mean().item(),
        "macro_f1": float(f1_score(target, guess, average="macro", zero_division=0)),
        "map": float(precision),
        "loss": F.binary_cross_entropy_with_logits(logits.float(), target.float()).item(),
    }


def regression(prediction: Tensor, target: Tensor) -> dict[str, float]:
    """Return mean absolute error, root mean squared error, R2 and Spearman's rank correlation.

    Where nothing varies, the last two are 0; where a prediction is not finite, they are NaN.
    """
    from scipy.stats import spearmanr
    from sklearn.metrics import r2_score

    error = (prediction - target).double()
    figures = {"mae": error.abs().mean().item(), "rmse": error.square().mean().sqrt().item()}
    if not prediction.isfinite().all():
        return {**figures, "r2": torch.nan, "spearman": torch.nan}
    moves = [bool((x != x[:1]).any()) for x in (prediction, target)]
    rank = spearmanr(prediction.flatten(), target.flatten()).statistic if all(moves) else 0.0
    return {
        **figures,
        "r2": float(r2_score(target, prediction)) if moves[1] else 0.0,
        "spearman": float(rank),
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
