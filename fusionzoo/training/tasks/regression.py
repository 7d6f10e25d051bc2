"""Squared, absolute or Huber error of a number."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fusionzoo.checks import check_number
from fusionzoo.evaluation.metrics import regression
from fusionzoo.targets import Number, Target

from .base import OBJECTIVES, Task


@OBJECTIVES.register("regression", family="objective")
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

    def metrics(self, logits: Tensor, target: Tensor) -> dict[str, float]:
        assert isinstance(self.target, Number)
        answer, wanted = (self.target.original(x[:, 0]) for x in (logits, target))
        loss = self.criterion(logits, target).mean().item()
        return {**regression(answer, wanted), "loss": loss}

    def prior(self, labels: Tensor) -> Tensor:
        return torch.ones(1)  # exp(0): the mean
