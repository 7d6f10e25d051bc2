"""Objectives: the loss, metrics and prior of each kind of target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusionzoo.errors import FusionZooError, check_number
from fusionzoo.evaluation.metrics import (
    COMPARED_BY,
    Metric,
    MetricEntry,
    closeness,
    figures,
    metrics_of,
    multilabel_scores,
    right,
    row_mean,
    takes_weights,
)
from fusionzoo.ground.registry import Entry, Registry
from fusionzoo.targets import Level, Number, Target, kind_of

NO_TARGET = "none"  # the kind of target of an objective that reads no labels


class Task(nn.Module):
    """One target. `labels` (N, C) are those of the training split, without the missing ones.

    Buffers are not stored: they follow from settings and data.
    """

    leading: str  # the figure that chooses the best epoch
    higher = True  # whether more of it is better
    shown: tuple[tuple[str, str], ...]  # figures of the final table, and their titles
    errors: tuple[str, ...] = ("mae", "rmse", "loss", "median_rank")  # less is better

    def __init__(self, target: Target, labels: Tensor) -> None:
        super().__init__()
        self.target, self.labelled = target, len(labels)

    def criterion(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return each row's loss in single precision: (B, K), (B, C) -> (B,)."""
        raise NotImplementedError

    def row_weight(self, target: Tensor) -> Tensor | None:
        """Return how much each row counts in `criterion`, (B,); None: all the same."""
        return None

    def metrics(
        self, logits: Tensor, target: Tensor, weights: Tensor | None = None
    ) -> dict[str, float]:
        """Measure a whole split, on the CPU: (N, K), (N, C), how much each row counts (N,).

        By default by all metrics of the kind of target, and the mean loss.
        """
        loss = row_mean(self.criterion(logits, target), weights).item()
        return {**self.figures(logits, target, weights), "loss": loss}

    def figures(
        self, logits: Tensor, target: Tensor, weights: Tensor | None = None, *, slow: bool = False
    ) -> dict[str, float]:
        """Compute the metrics of the kind of target that are not slow, or those that are: (N, K),
        (N, C), weights (N,)."""
        answers = self._answers(logits, target)
        return figures(self.target.standard_kind(), *answers, weights, slow=slow)

    def figure(self, key: str, logits: Tensor, target: Tensor, *weights: Tensor) -> float | Tensor:
        """Compute a metric of the kind of target, or one of the method `metrics`."""
        for entry in self.entries:
            if entry.key == key:
                return entry.cls(*self._answers(logits, target), *weights)
        return self.metrics(logits, target, *weights)[key]

    def _answers(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return answers and labels as the metrics of the kind of target take them."""
        kind = self.target
        if isinstance(kind, Number):
            return kind.predicted(logits), kind.original(target[:, 0])
        answer = kind.rank(logits) if isinstance(kind, Level) else logits
        is_multilabel = kind.standard_kind() == "multilabel"
        return answer, target.long() if is_multilabel else as_index(target)

    @property
    def entries(self) -> list[MetricEntry]:
        """The metrics of the kind of target."""
        return metrics_of(self.target.standard_kind(), self.target.width)

    def check_weights(self) -> None:
        """Raise an error if a metric, or the objective's method `metrics`, takes no weights."""
        name = type(self).__name__
        parts = {f"metric {x.name!r}": x.cls for x in self.entries}
        parts |= {f"method {x.__name__} of {name}": x for x in (self.metrics, self.prior)}
        for part, function in parts.items():
            if not takes_weights(function):
                raise FusionZooError(
                    f"--data.weight_column: the {part} has no parameter `weights`: add"
                    " `weights=None` to it, as docs/plugins.md says, or leave the column out"
                )

    @property
    def titled(self) -> dict[str, str]:
        """The metrics that have a title, and their titles."""
        return {x.key: x.title for x in self.entries if x.title}

    def columns(self) -> dict[str, str]:
        """Return the figures of the final table and their titles: `shown`, titled metrics."""
        return dict(self.shown) | self.titled

    def is_error(self, name: str) -> bool:
        """Whether less of a figure is better."""
        return name in self.errors or any(x.key == name and not x.higher for x in self.entries)

    def prior(self, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return what to answer where nothing is known, exp(logits): (N, C), (N,) -> (K,)."""
        raise NotImplementedError

    @property
    def metric(self) -> Metric:
        """The figure that a benchmark compares candidates by: the mean of `scores`, up to sign.

        By default that of the kind of target. A class attribute `metric = Metric(...)` and a method
        `scores` make another of it, whose name is one of the figures of `metrics`.
        """
        return COMPARED_BY[self.target.standard_kind()]

    def scores(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return each row's score, the higher the better: (N, K), (N, C) -> (N,) float64."""
        kind = self.target
        if isinstance(kind, Number):
            return closeness(kind.predicted(logits), kind.original(target[:, 0]))
        if isinstance(kind, Level):
            return closeness(kind.rank(logits), target[:, 0])
        if kind.standard_kind() == "multilabel":
            return multilabel_scores(logits, target)
        return right(logits, as_index(target))


@dataclass(frozen=True, kw_only=True)
class ObjectiveEntry(Entry[Task]):
    """Facts about an objective. `target` is the kind of target that it learns."""

    target: str = ""

    def __post_init__(self) -> None:
        if not self.target:
            raise FusionZooError(
                f"objective {self.name!r}: target= is missing; register it with the kind of target"
                " that it reads, such as target='regression'"
            )
        if self.target != NO_TARGET:
            kind_of(self.target)  # raises an error that lists the kinds there are


OBJECTIVES: Registry[Task, ObjectiveEntry] = Registry(
    "objective", "docs/objectives.md", ObjectiveEntry, ("objective",)
)


def standard_objective(kind: str) -> str:
    """Return the first registered objective of a kind of target, which measures a stored model."""
    kind_of(kind)
    names = [name for name in OBJECTIVES if OBJECTIVES[name].target == kind]
    if not names:
        raise FusionZooError(f"no objective reads targets of the kind {kind!r}: --plugins adds one")
    return names[0]


def as_index(target: Tensor) -> Tensor:
    """Return class indices (N,) as they are, or from their column (N, 1)."""
    return target if target.ndim == 1 else target[:, 0].long()


@OBJECTIVES.register("classification", family="objective", target="classification")
class Classification(Task):
    """Classify into one of several classes by cross-entropy or the focal loss.

    The loss of a row of class y is w_y (1 - p_y)^gamma CE; gamma > 0 is the focal loss (Lin et al.
    2017, arXiv:1708.02002). Labels are class indices: (N,) int64, or a column (N, 1).

    Settings:
        label_smoothing: share of the target spread evenly over all classes, 0 to below 1
        class_weights: weight w of each class: a list of numbers, at least 0, in the order of the
            classes; "balanced" for N / (K n_y), with n_y of N training samples in class y and K
            classes that occur; None for 1
        gamma: exponent of the focal loss, at least 0; 0 for cross-entropy
    """

    leading, shown = "accuracy", (("accuracy", "accuracy"), ("macro_f1", "macro F1"))
    weight: Tensor | None

    def __init__(
        self,
        target: Target,
        labels: Tensor,
        *,
        label_smoothing: float = 0.0,
        class_weights: Literal["balanced"] | list[float] | None = None,
        gamma: float = 0.0,
    ) -> None:
        super().__init__(target, labels)
        check_number("label_smoothing", label_smoothing, 0, 1)
        check_number("gamma", gamma, 0)
        self.label_smoothing, self.gamma = label_smoothing, gamma
        self.register_buffer("weight", self._weights(class_weights, labels), persistent=False)

    def _weights(self, setting: Any, labels: Tensor) -> Tensor | None:
        if setting is None:
            return None
        if setting == "balanced":
            counts = self.prior_counts(labels)
            weights = len(labels) / ((counts > 0).sum() * counts.clamp(min=1))
            return weights * (counts > 0)  # a class that no sample has weighs nothing
        classes = self.target.classes
        if not isinstance(setting, list) or len(setting) != len(classes):
            raise FusionZooError(
                f"class_weights={setting!r} is neither null, balanced, nor a number for each of the"
                f" {len(classes)} classes {', '.join(classes[:10])}"
            )
        for weight in setting:
            check_number("class_weights", weight, 0)
        return torch.tensor(setting, dtype=torch.float32)

    def row_weight(self, target: Tensor) -> Tensor | None:
        """Return the weight of each row's class, (B,)."""
        return None if self.weight is None else self.weight.float()[as_index(target)]

    def prior_counts(self, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        return torch.bincount(as_index(labels), weights, minlength=self.target.width)

    def columns(self) -> dict[str, str]:
        """Return the figures of the final table and their titles; of two classes also AUROC."""
        of_two = {"auroc": "AUROC"} if self.target.width == 2 else {}
        return dict(self.shown) | of_two | self.titled

    def criterion(self, logits: Tensor, target: Tensor) -> Tensor:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        target = as_index(target)
        smoothing = self.label_smoothing
        weight = None if self.weight is None else self.weight.float()
        loss = F.cross_entropy(logits, target, weight, reduction="none", label_smoothing=smoothing)
        if self.gamma == 0:
            return loss
        right = F.cross_entropy(logits, target, reduction="none").neg().exp()
        # The power has no finite slope at 0 for gamma < 1.
        return (1 - right).clamp(min=1e-7) ** self.gamma * loss

    def metrics(
        self, logits: Tensor, target: Tensor, weights: Tensor | None = None
    ) -> dict[str, float]:
        logits, index = logits.float(), as_index(target)  # the loss is by no setting
        if weights is None:
            loss = F.cross_entropy(logits, index)
        else:
            loss = row_mean(F.cross_entropy(logits, index, reduction="none"), weights)
        return {**self.figures(logits, target, weights), "loss": loss.item()}

    def prior(self, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        counts = self.prior_counts(labels, weights)
        return counts / counts.sum()


@OBJECTIVES.register("multilabel", family="objective", target="multilabel")
class Multilabel(Task):
    """Predict several binary labels by binary cross-entropy, averaged over the labels.

    Settings:
        pos_weight: weight of positive samples per label: "balanced" for n_0 / n_1, the ratio of
            negative to positive training samples, so that both count equally; None for 1
    """

    leading, shown = "map", (("map", "mAP"), ("macro_f1", "macro F1"))
    weight: Tensor | None

    def __init__(
        self, target: Target, labels: Tensor, *, pos_weight: Literal["balanced"] | None = None
    ) -> None:
        super().__init__(target, labels)
        weight = self.prior(labels).reciprocal() if pos_weight else None
        self.register_buffer("weight", weight, persistent=False)

    def criterion(self, logits: Tensor, target: Tensor) -> Tensor:
        weight = None if self.weight is None else self.weight.float()
        each = F.binary_cross_entropy_with_logits(
            logits.float(), target.float(), reduction="none", pos_weight=weight
        )
        return each.mean(-1)

    def metrics(
        self, logits: Tensor, target: Tensor, weights: Tensor | None = None
    ) -> dict[str, float]:
        logits, labels = logits.float(), target.float()
        if weights is None:
            loss = F.binary_cross_entropy_with_logits(logits, labels)
        else:
            each = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
            loss = row_mean(each.mean(-1), weights)
        return {**self.figures(logits, target, weights), "loss": loss.item()}

    def prior(self, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the odds of each label, half a sample added on both sides: none is infinite."""
        num_positive = labels.sum(0)
        if weights is not None:
            num_positive = len(labels) * row_mean(labels, weights)
        return (num_positive + 0.5) / (len(labels) - num_positive + 0.5)


@OBJECTIVES.register("none", family="objective", target=NO_TARGET)
class NoTarget(Task):
    """Train without a target, on the losses of training strategies only.

    For contrastive pre-training. The best epoch is chosen by the mean recall@1 of
    `evaluation.retrieval.retrieval_figures`, which the training strategy adds to the metrics of a
    split.
    """

    leading = "recall@1"
    shown = (("recall@1", "recall@1"), ("recall@10", "recall@10"), ("mrr", "MRR"))

    def criterion(self, logits: Tensor, target: Tensor) -> Tensor:
        return 0.0 * logits.float().sum(-1)  # zero, but with a gradient, as DDP requires

    def metrics(
        self, logits: Tensor, target: Tensor, weights: Tensor | None = None
    ) -> dict[str, float]:
        return {"loss": 0.0}

    def prior(self, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        return torch.ones(1)


@OBJECTIVES.register(
    "ordinal", family="objective", target="ordinal", paper="Shi et al. 2023, arXiv:2111.08851"
)
class Ordinal(Task):
    """Predict one of K ordered levels by K - 1 conditional probabilities (CORN).

    z_k is the logit of P(level > k | level >= k). The loss of a row is sum_{k <= y} BCE(z_k, y > k)
    = -log P(level = y). Differs from the paper, which averages each threshold's loss over the rows
    that reach it; here the loss of a row is its negative log-likelihood.
    """

    leading = "kappa"
    shown = (("kappa", "kappa"), ("mae", "MAE in levels"), ("accuracy", "accuracy"))

    def criterion(self, logits: Tensor, target: Tensor) -> Tensor:
        level = target[:, :1]
        k = torch.arange(logits.shape[1], device=logits.device)
        each = F.binary_cross_entropy_with_logits(
            logits.float(), (level > k).float(), reduction="none"
        )
        return each.masked_fill(level < k, 0).sum(-1)

    def prior(self, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        counts = torch.bincount(as_index(labels), weights, minlength=self.target.width + 1)
        above = counts.sum() - counts.cumsum(0)
        if weights is None:
            return (above / counts)[:-1]  # every level occurs
        # A level may have no weight.
        return (above.clamp(min=1e-9) / counts.clamp(min=1e-9))[:-1]


@OBJECTIVES.register("regression", family="objective", target="regression")
class Regression(Task):
    """Predict a number, with the squared, absolute or Huber error as loss.

    The number is standardised by mean and standard deviation of the training split.

    Settings:
        loss: error function: "mse" (squared), "mae" (absolute) or "huber"
        delta: error, in standard deviations, above which the Huber loss is linear, at least 1e-6
    """

    leading, higher = "mae", False
    shown = (("mae", "MAE"), ("r2", "R2"), ("spearman", "Spearman"))

    def __init__(
        self,
        target: Target,
        labels: Tensor,
        *,
        loss: Literal["mse", "mae", "huber"] = "mse",
        delta: float = 1.0,
    ) -> None:
        super().__init__(target, labels)
        check_number("delta", delta, 1e-6)
        self.loss, self.delta = loss, delta

    def criterion(self, logits: Tensor, target: Tensor) -> Tensor:
        answer, wanted = logits.float()[:, 0], target.float()[:, 0]
        if self.loss == "huber":
            return F.huber_loss(answer, wanted, reduction="none", delta=self.delta)
        error = answer - wanted
        return error.square() if self.loss == "mse" else error.abs()

    def prior(self, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        if weights is not None:
            return row_mean(labels, weights).exp()
        return torch.ones(1)  # exp(0): the mean
