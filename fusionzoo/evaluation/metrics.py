"""Metrics by kind of target, and the per-sample scores that the significance tests compare.

Shapes: `N` rows of a split, `K` classes, labels or logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fusionzoo.errors import FusionZooError
from fusionzoo.ground.registry import Entry, Registry
from fusionzoo.targets import STANDARD

C = TypeVar("C", bound=Callable[..., Any])
Figure = Callable[..., float | Tensor]  # of rows and, if it takes them, their weights
ACRONYMS = {x: x.upper() for x in ("mae", "mse", "rmse", "auroc", "nll", "aurc")}
ACRONYMS |= {"map": "mAP", "r2": "R²", "brier": "Brier"}
MOST_LEFT_OUT = 2000  # rows of a split


@dataclass(frozen=True, kw_only=True)
class MetricEntry(Entry[Any]):
    """Facts about a metric; its family is the kind of target that it measures."""

    title: str = ""  # of its column in the final table; empty: only what an objective shows
    higher: bool = True  # whether more of it is better
    two_classes: bool = False  # whether it is of two classes only, the second being the positive
    slow: bool = False  # whether epochs leave it out, unless it chooses the best one

    @property
    def has_slope(self) -> bool:
        """Whether it returns a tensor, which torch can differentiate by the weights."""
        return inspect.signature(self.cls).return_annotation in ("Tensor", "torch.Tensor", Tensor)

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
    What is annotated to return a `Tensor` is computed of them by torch alone, so that `row_scores`
    can differentiate it.

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
def accuracy(logits: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the share of samples whose highest logit is that of their class."""
    return row_mean((logits.argmax(-1) == target).double(), weights)


@metric("classification")
def macro_f1(logits: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the mean F1 over the classes in `target`."""
    predicted, classes = logits.argmax(-1), logits.shape[-1]
    right = predicted == target
    # Not scikit-learn's F1, which takes 10 ms: a benchmark calls this thousands of times.
    weights = _ones(target) if weights is None else weights
    hits = _sums(target[right], weights[right], classes)
    num_true, num_predicted = (_sums(x, weights, classes) for x in (target, predicted))
    f1 = 2 * hits / torch.where(num_true > 0, num_true + num_predicted, 1)
    return f1[num_true > 0].mean()


def _ones(rows: Tensor) -> Tensor:
    return torch.ones(len(rows), dtype=torch.float64)


def _sums(places: Tensor, weights: Tensor, size: int) -> Tensor:
    """Return the weight at each place, (size,): `torch.bincount`, which has no slope."""
    return weights.new_zeros(size).index_add(0, places, weights)


@metric("classification", two_classes=True)
def sensitivity(logits: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the share of the second class's samples that are answered so; NaN without any."""
    return _share_right(logits, target, 1, weights)


@metric("classification", two_classes=True)
def specificity(logits: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the share of the first class's samples that are answered so; NaN without any."""
    return _share_right(logits, target, 0, weights)


def _share_right(logits: Tensor, target: Tensor, index: int, weights: Tensor | None) -> Tensor:
    rows = target == index
    hits = right(logits[rows], target[rows])
    return row_mean(hits, None if weights is None else weights[rows])


@metric("classification", slow=True)
def auroc(logits: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the area under the ROC curve: of two classes that of the second, else the mean over
    the classes in `target`, each against all others. NaN where one class alone is there."""
    return _macro(area_under, *_each_against_rest(logits, target), weights)


@metric("classification", slow=True)
def average_precision(logits: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the average precision, of the same classes as `auroc`; NaN where one is alone."""
    return _macro(_precision, *_each_against_rest(logits, target), weights)


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
def sample_f1(logits: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the mean F1 of the samples: 1 where one has no label and none is predicted."""
    return row_mean(multilabel_scores(logits, target), weights)


@metric("multilabel", name="macro_f1")
def multilabel_macro_f1(logits: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the mean F1 over the labels that occur or are predicted; 1 if there are none.

    As scikit-learn's with `zero_division=nan`.
    """
    predicted, true = logits > 0, target.bool()
    weights = _ones(target) if weights is None else weights
    counts = weights @ predicted.double() + weights @ true.double()
    f1 = 2 * (weights @ (predicted & true).double()) / torch.where(counts > 0, counts, 1)
    return f1[counts > 0].mean() if counts.any() else torch.ones(())


@metric("multilabel", name="map")
def mean_average_precision(logits: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the mean average precision over the labels that occur; 0 if none does.

    NaN where a logit is not finite.
    """
    occur = target.bool().any(0)
    if not occur.any() and logits.isfinite().all():
        return torch.zeros(())
    return _macro(_precision, target[:, occur], logits[:, occur], weights)


@metric("multilabel", name="auroc", slow=True)
def multilabel_auroc(logits: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the mean area under the ROC curve over the labels that some samples have and others
    lack; NaN if there are none."""
    return _macro(area_under, *_where_varied(target, logits), weights)


def _where_varied(truth: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the columns of both, (N, C), that are true of some rows and not of others."""
    varied = truth.bool().any(0) & ~truth.bool().all(0)
    return truth[:, varied], scores[:, varied]


def _macro(figure: Figure, truth: Tensor, scores: Tensor, weights: Tensor | None) -> Tensor:
    """Return the mean of a figure over the columns, (N, C). NaN without a column, or where a score
    is not finite."""
    if not truth.shape[1] or not scores.isfinite().all():
        return torch.tensor(torch.nan)
    weights = _ones(truth) if weights is None else weights
    pairs = zip(scores.T, truth.double().T, strict=True)
    return torch.stack([torch.as_tensor(figure(*pair, weights)) for pair in pairs]).mean()


def area_under(scores: Tensor, truth: Tensor, weights: Tensor) -> Tensor:
    """Return the area under the ROC curve: the share of pairs in order, ties counting half."""
    positive, negative = weights * truth, weights * (1 - truth)
    return positive @ _weighted_ranks(scores, negative) / (positive.sum() * negative.sum())


def _precision(scores: Tensor, truth: Tensor, weights: Tensor) -> Tensor:
    """Return the mean precision of the answers down to each positive row, the average precision."""
    distinct, place = (-scores).unique(return_inverse=True)  # from the highest down
    hits, answers = (_sums(place, x, len(distinct)) for x in (weights * truth, weights))
    return hits @ (hits.cumsum(0) / answers.cumsum(0)) / hits.sum()


# ---- regression: of several targets, (N, T), the mean over them


@metric("regression", higher=False)
def mae(prediction: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the mean absolute error."""
    errors = (prediction.double() - target.double()).abs()
    return (errors if weights is None else row_mean(errors, weights)).mean()


@metric("regression", higher=False)
def rmse(prediction: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the root mean squared error."""
    squares = row_mean((prediction.double() - target.double()).square(), weights)
    return (torch.where(squares > 0, squares, 1).sqrt() * (squares > 0)).mean()  # sloped at 0, too


@metric("regression")
def r2(prediction: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the share of the target's variance that is explained."""

    def explained(p: Tensor, t: Tensor) -> Tensor:
        centred = t - row_mean(t, weights)
        return 1 - row_mean((t - p).square(), weights) / row_mean(centred.square(), weights)

    return _mean_where_varied(explained, prediction, target)


@metric("regression")
def spearman(prediction: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return Spearman's rank correlation; 0 for a constant prediction.

    A row of weight 2 counts as two equal rows, in the ranks and in the correlation of the ranks.
    """
    counts = _ones(target) if weights is None else weights

    def correlation(p: Tensor, t: Tensor) -> Tensor:
        if not (p != p[0]).any():
            return torch.zeros((), dtype=torch.float64)
        ranks = torch.stack([_weighted_ranks(x, counts) for x in (p, t)])
        centred = ranks - row_mean(ranks.T, counts)[:, None]
        products = (centred * counts) @ centred.T
        return products[0, 1] / (products[0, 0] * products[1, 1]).sqrt()

    return _mean_where_varied(correlation, prediction, target)


def _weighted_ranks(values: Tensor, weights: Tensor) -> Tensor:
    """Return the weight below each value plus half the weight at it, (N,): rows with whole weights
    get the mean rank of so many equal rows, less a constant."""
    distinct, place = values.unique(return_inverse=True)
    at = _sums(place, weights, len(distinct))
    return (at.cumsum(0) - at / 2)[place]


def _mean_where_varied(
    figure: Callable[[Tensor, Tensor], Tensor], prediction: Tensor, target: Tensor
) -> Tensor:
    """Average a figure over the targets that vary: it is undefined for others, 0 if there are none.

    NaN where a prediction is not finite.
    """
    if not prediction.isfinite().all():
        return torch.tensor(torch.nan)
    prediction, target = (x.double().reshape(len(x), -1) for x in (prediction, target))
    pairs = zip(prediction.T, target.T, strict=True)
    values = [figure(p, t) for p, t in pairs if (t != t[0]).any()]
    return torch.stack(values).mean() if values else torch.zeros(())


# ---- ordinal


@metric("ordinal", name="mae", higher=False)
def levels_off(prediction: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the mean absolute error in levels."""
    return mae(prediction, target, weights)


@metric("ordinal", name="accuracy")
def level_accuracy(prediction: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the share of samples whose level is predicted."""
    return row_mean((prediction == target).double(), weights)


@metric("ordinal")
def kappa(prediction: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the quadratic weighted kappa: 0 at chance level, 1 without errors.

    It is 1 - E[(p - t)^2] / E[(p - t')^2], t' the target of a random other sample.
    """
    p, t = prediction.double(), target.double()
    p2, t2, p1, t1 = (row_mean(x, weights) for x in (p.square(), t.square(), p, t))
    expected = p2 + t2 - 2 * p1 * t1
    error = row_mean((p - t).square(), weights)
    return 1 - error / expected if expected > 0 else torch.ones(())


# ---- what a benchmark compares by: a score of each sample


def row_scores(
    figure: Figure, rows: Sequence[Tensor], weights: Tensor | None, has_slope: bool
) -> Tensor:
    """Return a score of each row, float64 (N,), whose mean by the weights (N,) is the figure of all
    `rows`, (N, ...) each; all NaN where it is not defined.

    By the infinitesimal jackknife (Jaeckel 1972; Efron 1982, chapter 6): the figure plus sum(w)
    dfigure/dw_i. Of a mean it is what each row adds; of AUROC, DeLong's components (1988). Without
    a slope each row is left out in turn (Quenouille 1956, Tukey 1958): at most MOST_LEFT_OUT rows.
    """
    counts = torch.ones(len(rows[0]), dtype=torch.float64) if weights is None else weights.double()
    if has_slope:
        counts = counts.clone().requires_grad_()
        with torch.enable_grad():
            value = torch.as_tensor(figure(*rows, counts))
        if not value.requires_grad:  # a constant, such as 0 for labels that never vary
            return value.double().expand(len(counts))
        (slopes,) = torch.autograd.grad(value, counts)
        return value.detach() + counts.detach().sum() * slopes
    if len(counts) > MOST_LEFT_OUT:
        raise FusionZooError(
            f"{len(counts):,} samples, of which each would be left out in turn, and a metric that"
            f" returns no tensor allows {MOST_LEFT_OUT:,}: compute it by torch from `weights`, as"
            " docs/plugins.md says, or choose another --metric"
        )
    parts = rows if weights is None else (*rows, counts)
    value = torch.tensor(float(figure(*parts)), dtype=torch.float64)
    index = torch.arange(len(counts))
    without = [float(figure(*(x[index != row] for x in parts))) for row in index]
    moves = (value - torch.tensor(without, dtype=torch.float64)) * (counts.sum() - counts)
    moves = moves / torch.where(counts > 0, counts, 1)
    return value + moves - row_mean(moves, counts)


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
    of_rows: bool = True  # whether each row has a score of its own, whatever the others are

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


def compared_by(name: str, higher: bool) -> Metric:
    """Return how candidates are compared by any figure, whose name may begin with a column's."""
    usual = (x for x in COMPARED_BY.values() if (x.name, x.higher) == (name, higher))
    return next(usual, Metric(name, metric_name(name), higher, share=False, of_rows=False))


def metric_name(metric: str) -> str:
    """Write a metric's name.

    >>> metric_name("balanced_accuracy"), metric_name("macro_f1"), metric_name("mae")
    ('balanced accuracy', 'macro F1', 'MAE')
    """
    return ACRONYMS.get(metric, metric.replace("_", " ").replace(" f1", " F1"))
