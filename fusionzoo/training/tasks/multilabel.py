"""Binary cross-entropy of any number of labels."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from fusionzoo.evaluation.metrics import multilabel
from fusionzoo.targets import Target

from .base import OBJECTIVES, Task


@OBJECTIVES.register("multilabel", family="objective")
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

    def metrics(self, logits: Tensor, target: Tensor) -> dict[str, float]:
        return multilabel(logits, target.long())

    def prior(self, labels: Tensor) -> Tensor:
        """Return the odds of each label, half a sample added on both sides: none is infinite."""
        there = labels.sum(0)
        return (there + 0.5) / (len(labels) - there + 0.5)
