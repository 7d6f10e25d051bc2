"""Cross-entropy of one class."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fusionzoo.checks import check_number
from fusionzoo.errors import FusionZooError
from fusionzoo.evaluation.metrics import classification
from fusionzoo.targets import Target

from .base import OBJECTIVES, Task, as_index


@OBJECTIVES.register("classification", family="objective")
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

    def _weights(self, given: Any, labels: Tensor) -> Tensor | None:
        if given is None:
            return None
        if given == "balanced":
            counts = self.prior_counts(labels)
            weights = len(labels) / ((counts > 0).sum() * counts.clamp(min=1))
            return weights * (counts > 0)  # a class that no sample has weighs nothing
        classes = self.target.classes
        if not isinstance(given, list) or len(given) != len(classes):
            raise FusionZooError(
                f"class_weights={given!r} is neither null, balanced, nor a number for each of the"
                f" {len(classes)} classes {', '.join(classes[:10])}"
            )
        for weight in given:
            check_number("class_weights", weight, 0)
        return torch.tensor(given, dtype=torch.float32)

    def row_weight(self, target: Tensor) -> Tensor | None:
        """Return the weight of each row's class, (B,)."""
        return None if self.weight is None else self.weight.float()[as_index(target)]

    def prior_counts(self, labels: Tensor) -> Tensor:
        return torch.bincount(as_index(labels), minlength=self.target.width)

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

    def metrics(self, logits: Tensor, target: Tensor) -> dict[str, float]:
        return classification(logits, as_index(target))

    def prior(self, labels: Tensor) -> Tensor:
        counts = self.prior_counts(labels)
        return counts / counts.sum()
