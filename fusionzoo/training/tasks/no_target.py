"""No target: the loss is that of a training strategy, say contrastive alignment."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import OBJECTIVES, Task


@OBJECTIVES.register("none", family="objective")
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

    def metrics(self, logits: Tensor, target: Tensor) -> dict[str, float]:
        return {"loss": 0.0}

    def prior(self, labels: Tensor) -> Tensor:
        return torch.ones(1)
