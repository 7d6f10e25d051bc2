"""Ranks: conditional training of thresholds (CORN)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fusionzoo.evaluation.metrics import ordinal
from fusionzoo.targets import Level

from .base import OBJECTIVES, Task, as_index


@OBJECTIVES.register("ordinal", family="objective", paper="Shi et al. 2023, arXiv:2111.08851")
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

    def metrics(self, logits: Tensor, target: Tensor) -> dict[str, float]:
        assert isinstance(self.target, Level)
        loss = self.criterion(logits, target).mean().item()
        return {**ordinal(self.target.rank(logits), target[:, 0].long()), "loss": loss}

    def prior(self, labels: Tensor) -> Tensor:
        counts = torch.bincount(as_index(labels), minlength=self.target.width + 1)
        above = counts.sum() - counts.cumsum(0)
        return (above / counts)[:-1]  # every level occurs
