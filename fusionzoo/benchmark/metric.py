"""The figure by which a benchmark compares strategies, and its value for each sample.

Inside the benchmark every figure is a score, higher is better: an error counts as negative.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fusionzoo.evaluation.metrics import closeness, multilabel_scores, right
from fusionzoo.targets import Level, Number
from fusionzoo.training.tasks.base import Task
from fusionzoo.training.tasks.multitask import Tasks


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


METRICS = {
    "classification": Metric("accuracy", "accuracy", True, True),
    "multilabel": Metric("sample_f1", "sample F1", True, True),
    "regression": Metric("mae", "MAE", False, False),
    "ordinal": Metric("mae", "MAE in levels", False, False),
    "several": Metric("loss", "loss", False, False),
}


def metric_named(name: str) -> Metric:
    """Return the figure with this name."""
    return next(metric for metric in METRICS.values() if metric.name == name)


def metric_of(tasks: Tasks) -> Metric:
    """Return the figure for these tasks; of several together, their weighted loss."""
    kind = tasks.first.target.kind if len(tasks.tasks) == 1 else "several"
    return METRICS[kind]


def sample_scores(tasks: Tasks, logits: Tensor, target: Tensor) -> Tensor:
    """Return each sample's score, (N,) float64, whose mean is the figure: (N, K), labels of N."""
    if len(tasks.tasks) > 1:
        return -tasks.criterion(logits, target).double()
    return _task_scores(tasks.first, logits, target)


def _task_scores(task: Task, logits: Tensor, target: Tensor) -> Tensor:
    kind = task.target
    if isinstance(kind, Number):
        return closeness(kind.original(logits[:, 0]), kind.original(target[:, 0]))
    if isinstance(kind, Level):
        return closeness(kind.rank(logits), target[:, 0])
    if kind.kind == "multilabel":
        return multilabel_scores(logits, target)
    return right(logits, target if target.ndim == 1 else target[:, 0].long())


def fold_labels(tasks: Tasks, target: Tensor) -> Tensor:
    """Return a class of each sample to stratify folds by, int64 (N,): -1 where it has no label.

    Numbers are cut at their quintiles; of several labels the rarest counts; of several targets the
    first, and samples without a label of it are a class of their own.
    """
    if tasks.plain:
        return target
    kind, label = tasks.first.target, target[:, : tasks.columns[0]]
    missing = label.isnan().any(1)
    known = label.nan_to_num()
    if isinstance(kind, Number):
        values = known[~missing, 0]
        cuts = torch.quantile(values.double(), torch.tensor([0.2, 0.4, 0.6, 0.8]).double())
        classes = torch.bucketize(known[:, 0].double(), cuts)
    elif kind.kind == "multilabel":
        rarity = known[~missing].sum(0).argsort().argsort()  # 0 = the rarest
        rank = torch.where(known > 0, rarity, len(rarity))
        classes = rank.min(1).values
    else:
        classes = known[:, 0].long()
    classes = classes.masked_fill(missing, int(classes.max()) + 1)
    return classes.masked_fill(target.isnan().all(1), -1)
