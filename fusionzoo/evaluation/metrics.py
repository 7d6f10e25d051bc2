"""Metrics by kind of target, and the per-sample scores that the significance tests compare.

Shapes: `N` rows of a split, `K` classes, labels or logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from fusionzoo.errors import FusionZooError
from fusionzoo.registry import Entry, Registry
from fusionzoo.targets import STANDARD

C = TypeVar("C", bound=Callable[[Tensor, Tensor], Any])


@dataclass(frozen=True, kw_only=True)
class MetricEntry(Entry[Any]):
    """Facts about a metric; its family is the kind of target that it measures."""

    title: str = ""  # of its column in the final table; empty: only what an objective shows
    higher: bool = True  # whether more of it is better

    @property
    def key(self) -> str:
        """The name in metrics.jsonl and metrics.json: `rmse` of `regression.rmse`."""
        return self.name.partition(".")[2]


METRICS: Registry[Any, MetricEntry] = Registry(
    "metric", "docs/plugins.md", MetricEntry, [target.kind for target in STANDARD]
)


def metric(kind: str, *, name: str = "", title: str = "", higher: bool = True) -> Callable[[C], C]:
    """Add the decorated function to the metrics of a kind of target, by default under its name.

    It takes answers and labels of a split, without missing labels, and returns a number:

    - classification: logits (N, K), class indices (N,) int64
    - multilabel: logits (N, K), labels (N, K) int64, 0 or 1; a label is predicted above 0
    - regression: numbers (N,), in the units of the data, both
    - ordinal: ranks of the levels (N,) int64, from 0, both

    With a `title` it is a column of the final table of a run. `higher`: more of it is better.
    """

    def decorate(function: C) -> C:
        key = name or function.__name__
        if key == "loss":
            raise FusionZooError("metric 'loss': this is the objective's figure; take another name")
        register = METRICS.register(f"{kind}.{key}", family=kind, title=title, higher=higher)
        return register(function)

    return decorate


def metrics_of(kind: str) -> list[MetricEntry]:
    """Return the metrics of a kind of target, in the order in which they are reported."""
    return [METRICS[name] for name in METRICS if METRICS[name].family == kind]


def figures(kind: str, answer: Tensor, target: Tensor) -> dict[str, float]:
    """Compute all metrics of a kind of target, of what `metric` says that they take."""
    by_key = {}
    for entry in metrics_of(kind):
        value = entry.cls(answer, target)
        try:
            by_key[entry.key] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise FusionZooError(
                f"metric {entry.name!r} returned a {type(value).__name__}, not a number"
            ) from None
    return by_key


# ---- classification


@metric("classification")
def accuracy(logits: Tensor, target: Tensor) -> float:
    """Return the share of samples whose highest logit is that of their class."""
    return (logits.argmax(-1) == target).double().mean().item()


@metric("classification")
def macro_f1(logits: Tensor, target: Tensor) -> float:
    """Return the mean F1 over the classes in `target`."""
    predicted, classes = logits.argmax(-1), logits.shape[-1]
    # Not scikit-learn's F1, which takes 10 ms: a benchmark calls this thousands of times.
    hits = torch.bincount(target[predicted == target], minlength=classes)
    num_true, num_predicted = (torch.bincount(x, minlength=classes) for x in (target, predicted))
    f1 = 2 * hits / (num_true + num_predicted).clamp(min=1)
    return f1[num_true > 0].double().mean().item()


# ---- multilabel: a label is predicted where its logit is above 0


@metric("multilabel")
def sample_f1(logits: Tensor, target: Tensor) -> float:
    """Return the mean F1 of the samples: 1 where one has no label and none is predicted."""
    return multilabel_scores(logits, target).mean().item()


@metric("multilabel", name="macro_f1")
def multilabel_macro_f1(logits: Tensor, target: Tensor) -> float:
    """Return the mean F1 over the labels that occur or are predicted; 1 if there are none.

    As scikit-learn's with `zero_division=nan`.
    """
    predicted, true = logits > 0, target.bool()
    counts = predicted.sum(0) + true.sum(0)
    f1 = 2 * (predicted & true).sum(0).double() / counts.clamp(min=1)
    return f1[counts > 0].mean().item() if counts.any() else 1.0


@metric("multilabel", name="map")
def mean_average_precision(logits: Tensor, target: Tensor) -> float:
    """Return the mean average precision over the labels that occur; 0 if none does.

    NaN where a logit is not finite.
    """
    from sklearn.metrics import average_precision_score

    if not logits.isfinite().all():
        return torch.nan
    occur = target.bool().any(0)
    if not occur.any():
        return 0.0
    return float(average_precision_score(target[:, occur], logits[:, occur], average="macro"))


# ---- regression: of several targets, (N, T), the mean over them


@metric("regression", higher=False)
def mae(prediction: Tensor, target: Tensor) -> float:
    """Return the mean absolute error."""
    return (prediction.double() - target.double()).abs().mean().item()


@metric("regression", higher=False)
def rmse(prediction: Tensor, target: Tensor) -> float:
    """Return the root mean squared error."""
    return (prediction.double() - target.double()).square().mean(0).sqrt().mean().item()


@metric("regression")
def r2(prediction: Tensor, target: Tensor) -> float:
    """Return the share of the target's variance that is explained."""
    from sklearn.metrics import r2_score

    return _mean_where_varied(lambda p, t: float(r2_score(t, p)), prediction, target)


@metric("regression")
def spearman(prediction: Tensor, target: Tensor) -> float:
    """Return Spearman's rank correlation; 0 for a constant prediction."""
    from scipy.stats import spearmanr

    def correlation(p: Tensor, t: Tensor) -> float:
        return float(spearmanr(p, t).statistic) if (p != p[0]).any() else 0.0

    return _mean_where_varied(correlation, prediction, target)


def _mean_where_varied(
    figure: Callable[[Tensor, Tensor], float], prediction: Tensor, target: Tensor
) -> float:
    """Average a figure over the targets that vary: it is undefined for others, 0 if there are none.

    NaN where a prediction is not finite.
    """
    if not prediction.isfinite().all():
        return torch.nan
    prediction, target = (x.double().reshape(len(x), -1) for x in (prediction, target))
    pairs = zip(prediction.T, target.T, strict=True)
    values = [figure(p, t) for p, t in pairs if (t != t[0]).any()]
    return sum(values) / len(values) if values else 0.0


# ---- ordinal


@metric("ordinal", name="mae", higher=False)
def levels_off(prediction: Tensor, target: Tensor) -> float:
    """Return the mean absolute error in levels."""
    return mae(prediction, target)


@metric("ordinal", name="accuracy")
def level_accuracy(prediction: Tensor, target: Tensor) -> float:
    """Return the share of samples whose level is predicted."""
    return (prediction == target).double().mean().item()


@metric("ordinal")
def kappa(prediction: Tensor, target: Tensor) -> float:
    """Return the quadratic weighted kappa: 0 at chance level, 1 without errors.

    It is 1 - E[(p - t)^2] / E[(p - t')^2], t' the target of a random other sample.
    """
    p, t = prediction.double(), target.double()
    expected = p.square().mean() + t.square().mean() - 2 * p.mean() * t.mean()
    error = (p - t).square().mean()
    return (1 - error / expected).item() if expected > 0 else 1.0


# ---- what a benchmark compares by: a score of each sample


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
COMPARED_BY = {
    "classification": Metric("accuracy", "accuracy", True, True),
    "multilabel": Metric("sample_f1", "sample F1", True, True),
    "regression": Metric("mae", "MAE", False, False),
    "ordinal": Metric("mae", "MAE in levels", False, False),
    "several": Metric("loss", "loss", False, False),
}
