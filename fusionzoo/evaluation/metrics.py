"""Metrics by kind of target, and the per-sample scores that the significance tests compare.

Shapes: `N` rows of a split, `K` classes, labels or logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fusionzoo.errors import FusionZooError
from fusionzoo.registry import Entry, Registry
from fusionzoo.targets import STANDARD

C = TypeVar("C", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class MetricEntry(Entry[Any]):
    """Facts about a metric; its family is the kind of target that it measures."""

    title: str = ""  # of its column in the final table; empty: only what an objective shows
    higher: bool = True  # whether more of it is better
    two_classes: bool = False  # whether it is of two classes only, the second being the positive
    slow: bool = False  # whether epochs leave it out, unless it chooses the best one

    @property
    def key(self) -> str:
        """The name in metrics.jsonl and metrics.json: `rmse` of `regression.rmse`."""
        return self.name.partition(".")[2]


METRICS: Registry[Any, MetricEntry] = Registry(
    "metric", "docs/plugins.md", MetricEntry, [target.kind for target in STANDARD]
)


def metric(
    kind: str,
    *,
    name: str = "",
    title: str = "",
    higher: bool = True,
    two_classes: bool = False,
    slow: bool = False,
) -> Callable[[C], C]:
    """Add the decorated function to the metrics of a kind of target, by default under its name.

    It takes answers and labels of a split, without missing labels, and returns a number:

    - classification: logits (N, K), class indices (N,) int64
    - multilabel: logits (N, K), labels (N, K) int64, 0 or 1; a label is predicted above 0
    - regression: numbers (N,), in the units of the data, both
    - ordinal: ranks of the levels (N,) int64, from 0, both

    A third parameter, `weights`, says how much each row counts, (N,) float64 above 0, or None: as
    scikit-learn's `sample_weight`. Without it the metric does not go with `--data.weight_column`.

    With a `title` it is a column of the final table of a run. `higher`: more of it is better.
    `two_classes`: it is of two classes only. `slow`: it is computed of finished models, and in
    epochs only where `--train.metric` names it; a benchmark leaves it out.
    """

    def decorate(function: C) -> C:
        key = name or function.__name__
        if key == "loss":
            raise FusionZooError("metric 'loss': this is the objective's figure; take another name")
        facts = {"title": title, "higher": higher, "two_classes": two_classes, "slow": slow}
        return METRICS.register(f"{kind}.{key}", family=kind, **facts)(function)

    return decorate


def metrics_of(kind: str, classes: int = 2) -> list[MetricEntry]:
    """Return the metrics of a kind of target, in the order in which they are reported."""
    entries = [METRICS[name] for name in METRICS if METRICS[name].family == kind]
    return [entry for entry in entries if classes == 2 or not entry.two_classes]


def takes_weights(function: Callable[..., Any]) -> bool:
    """Whether a metric, or the method `metrics` of an objective, has a parameter `weights`."""
    return "weights" in inspect.signature(function).parameters


def figures(
    kind: str, answer: Tensor, target: Tensor, weights: Tensor | None = None, *, slow: bool = False
) -> dict[str, float]:
    """Compute the metrics of a kind of target, of what `metric` says that they take: those that
    are not slow, or those that are."""
    by_key = {}
    weighted = () if weights is None else (weights.double(),)
    for entry in metrics_of(kind, answer.shape[-1]):
        if entry.slow != slow:
            continue
        value = entry.cls(answer, target, *weighted)
        try:
            by_key[entry.key] = float(value)
        except (TypeError, ValueError, RuntimeError):
            returned = f"returned a {type(value).__name__}, not a number"
            raise FusionZooError(f"metric {entry.name!r} {returned}") from None
    return by_key


def row_mean(values: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the mean over the rows, each counting by its weight: (N, ...), (N,) -> (...)."""
    if weights is None:
        return values.mean(0)
    weights = weights.to(torch.promote_types(values.dtype, weights.dtype))
    return torch.tensordot(weights, values.to(weights), dims=1) / weights.sum()


# ---- classification


@metric("classification")
def accuracy(logits: Tensor, target: Tensor, weights: Tensor | None = None) -> float:
    """Return the share of samples whose highest logit is that of their class."""
    return row_mean((logits.argmax(-1) == target).double(), weights).item()


@metric("classification")
def macro_f1(logits: Tensor, target: Tensor, weights: Tensor | None = None) -> float:
    """Return the mean F1 over the classes in `target`."""
    predicted, classes = logits.argmax(-1), logits.shape[-1]
    right = predicted == target
    # Not scikit-learn's F1, which takes 10 ms: a benchmark calls this thousands of times.
    hits = torch.bincount(target[right], None if weights is None else weights[right], classes)
    num_true, num_predicted = (torch.bincount(x, weights, classes) for x in (target, predicted))
    f1 = 2 * hits / torch.where(num_true > 0, num_true + num_predicted, 1)
    return f1[num_true > 0].double().mean().item()


@metric("classification", two_classes=True)
def sensitivity(logits: Tensor, target: Tensor, weights: Tensor | None = None) -> float:
    """Return the share of the second class's samples that are answered so; NaN without any."""
    return _share_right(logits, target, 1, weights)


@metric("classification", two_classes=True)
def specificity(logits: Tensor, target: Tensor, weights: Tensor | None = None) -> float:
    """Return the share of the first class's samples that are answered so; NaN without any."""
    return _share_right(logits, target, 0, weights)


def _share_right(logits: Tensor, target: Tensor, index: int, weights: Tensor | None) -> float:
    rows = target == index
    hits = right(logits[rows], target[rows])
    return row_mean(hits, None if weights is None else weights[rows]).item()


@metric("classification", slow=True)
def auroc(logits: Tensor, target: Tensor, weights: Tensor | None = None) -> float:
    """Return the area under the ROC curve: of two classes that of the second, else the mean over
    the classes in `target`, each against all others. NaN where one class alone is there."""
    return _macro("roc_auc_score", *_each_against_rest(logits, target), weights)


@metric("classification", slow=True)
def average_precision(logits: Tensor, target: Tensor, weights: Tensor | None = None) -> float:
    """Return the average precision, of the same classes as `auroc`; NaN where one is alone."""
    return _macro("average_precision_score", *_each_against_rest(logits, target), weights)


def _each_against_rest(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return whether each row is of each class that occurs, and how probable that is, (N, C): of
    two classes, of the second alone, (N, 1). No column where one class alone is there."""
    classes = logits.shape[-1]
    truth, shares = F.one_hot(target, classes), logits.double().softmax(-1)
    if classes == 2:
        truth, shares = truth[:, 1:], logits[:, 1:].double() - logits[:, :1]
    return _where_varied(truth, shares)


# ---- multilabel: a label is predicted where its logit is above 0


@metric("multilabel")
def sample_f1(logits: Tensor, target: Tensor, weights: Tensor | None = None) -> float:
    """Return the mean F1 of the samples: 1 where one has no label and none is predicted."""
    return row_mean(multilabel_scores(logits, target), weights).item()


@metric("multilabel", name="macro_f1")
def multilabel_macro_f1(logits: Tensor, target: Tensor, weights: Tensor | None = None) -> float:
    """Return the mean F1 over the labels that occur or are predicted; 1 if there are none.

    As scikit-learn's with `zero_division=nan`.
    """
    predicted, true = logits > 0, target.bool()
    weights = logits.new_ones(len(logits), dtype=torch.float64) if weights is None else weights
    counts = weights @ predicted.double() + weights @ true.double()
    f1 = 2 * (weights @ (predicted & true).double()) / torch.where(counts > 0, counts, 1)
    return f1[counts > 0].mean().item() if counts.any() else 1.0


@metric("multilabel", name="map")
def mean_average_precision(logits: Tensor, target: Tensor, weights: Tensor | None = None) -> float:
    """Return the mean average precision over the labels that occur; 0 if none does.

    NaN where a logit is not finite.
    """
    occur = target.bool().any(0)
    if not occur.any() and logits.isfinite().all():
        return 0.0
    return _macro("average_precision_score", target[:, occur], logits[:, occur], weights)


@metric("multilabel", name="auroc", slow=True)
def multilabel_auroc(logits: Tensor, target: Tensor, weights: Tensor | None = None) -> float:
    """Return the mean area under the ROC curve over the labels that some samples have and others
    lack; NaN if there are none."""
    return _macro("roc_auc_score", *_where_varied(target, logits), weights)


def _where_varied(truth: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the columns of both, (N, C), that are true of some rows and not of others."""
    varied = truth.bool().any(0) & ~truth.bool().all(0)
    return truth[:, varied], scores[:, varied]


def _macro(name: str, truth: Tensor, scores: Tensor, weights: Tensor | None) -> float:
    """Return the mean over the columns of a figure of scikit-learn: (N, C). NaN without a column,
    or where a score is not finite."""
    from sklearn import metrics

    if not truth.shape[1] or not scores.isfinite().all():
        return torch.nan
    options = {"average": "macro", "sample_weight": _array(weights)}
    return float(getattr(metrics, name)(truth, scores, **options))


def _array(weights: Tensor | None) -> Any:
    """Return weights as scikit-learn takes them."""
    return None if weights is None else weights.numpy()


# ---- regression: of several targets, (N, T), the mean over them


@metric("regression", higher=False)
def mae(prediction: Tensor, target: Tensor, weights: Tensor | None = None) -> float:
    """Return the mean absolute error."""
    errors = (prediction.double() - target.double()).abs()
    return (errors if weights is None else row_mean(errors, weights)).mean().item()


@metric("regression", higher=False)
def rmse(prediction: Tensor, target: Tensor, weights: Tensor | None = None) -> float:
    """Return the root mean squared error."""
    squares = (prediction.double() - target.double()).square()
    return row_mean(squares, weights).sqrt().mean().item()


@metric("regression")
def r2(prediction: Tensor, target: Tensor, weights: Tensor | None = None) -> float:
    """Return the share of the target's variance that is explained."""
    from sklearn.metrics import r2_score

    def explained(p: Tensor, t: Tensor) -> float:
        return float(r2_score(t, p, sample_weight=_array(weights)))

    return _mean_where_varied(explained, prediction, target)


@metric("regression")
def spearman(prediction: Tensor, target: Tensor, weights: Tensor | None = None) -> float:
    """Return Spearman's rank correlation; 0 for a constant prediction.

    A row of weight 2 counts as two equal rows, in the ranks and in the correlation of the ranks.
    """
    counts = target.new_ones(len(target), dtype=torch.float64) if weights is None else weights

    def correlation(p: Tensor, t: Tensor) -> float:
        if not (p != p[0]).any():
            return 0.0
        ranks = torch.stack([_weighted_ranks(x, counts) for x in (p, t)])
        centred = ranks - row_mean(ranks.T, counts)[:, None]
        products = (centred * counts) @ centred.T
        return (products[0, 1] / (products[0, 0] * products[1, 1]).sqrt()).item()

    return _mean_where_varied(correlation, prediction, target)


def _weighted_ranks(values: Tensor, weights: Tensor) -> Tensor:
    """Return the weight below each value plus half the weight at it, (N,): rows with whole weights
    get the mean rank of so many equal rows, less a constant."""
    distinct, place = values.unique(return_inverse=True)
    at = torch.bincount(place, weights, len(distinct))
    return (at.cumsum(0) - at / 2)[place]


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
def levels_off(prediction: Tensor, target: Tensor, weights: Tensor | None = None) -> float:
    """Return the mean absolute error in levels."""
    return mae(prediction, target, weights)


@metric("ordinal", name="accuracy")
def level_accuracy(prediction: Tensor, target: Tensor, weights: Tensor | None = None) -> float:
    """Return the share of samples whose level is predicted."""
    return row_mean((prediction == target).double(), weights).item()


@metric("ordinal")
def kappa(prediction: Tensor, target: Tensor, weights: Tensor | None = None) -> float:
    """Return the quadratic weighted kappa: 0 at chance level, 1 without errors.

    It is 1 - E[(p - t)^2] / E[(p - t')^2], t' the target of a random other sample.
    """
    p, t = prediction.double(), target.double()
    p2, t2, p1, t1 = (row_mean(x, weights) for x in (p.square(), t.square(), p, t))
    expected = p2 + t2 - 2 * p1 * t1
    error = row_mean((p - t).square(), weights)
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
