"""Figures that say how well a classifier did."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def classification(logits: Tensor, target: Tensor) -> dict[str, float]:
    """Return accuracy, macro F1 over the classes that occur, and loss in nats.

    Shapes: logits (N, K), target (N,).
    """
    from sklearn.metrics import f1_score

    guess = logits.argmax(-1)
    labels = target.unique().tolist()
    return {
        "accuracy": (guess == target).double().mean().item(),
        "macro_f1": float(f1_score(target, guess, labels=labels, average="macro", zero_division=0)),
        "loss": F.cross_entropy(logits.float(), target).item(),
    }
