"""What contrastive strategies share: the checks of their settings, and a loss of pairs of rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import Balance


def check_contrast(
    strategy: Balance,
    *,
    weight: float,
    dim: int,
    temperature: float | None = None,
    between_modalities: bool = True,
) -> None:
    """Refuse settings of a contrastive loss that are out of range, and a model of one modality
    where the loss is between modalities."""
    strategy.require(weight >= 0, f"weight={weight:g}; it must be at least 0")
    strategy.require(dim >= 1, f"dim={dim}; it must be at least 1")
    if temperature is not None:
        strategy.require(temperature > 0, f"temperature={temperature:g}; it must be positive")
    if between_modalities:
        several = len(strategy.widths) > 1
        strategy.require(several, "it aligns modalities, and the model has only one")


def nt_xent(left: Tensor, right: Tensor, temperature: float) -> Tensor:
    """Return SimCLR's loss of each pair of unit vectors: (n, D), (n, D) -> (n,).

    Each of the 2n vectors must find its partner among the 2n - 1 others; a pair's loss is the mean
    over its two vectors. With fewer than two pairs nothing is compared: the loss is 0.
    """
    if len(left) < 2:
        return 0.0 * (left.sum(1) + right.sum(1))
    with torch.autocast(left.device.type, enabled=False):
        vectors = torch.cat([left, right])
        logits = vectors @ vectors.T / temperature
        itself = torch.eye(len(vectors), dtype=torch.bool, device=left.device)
        partner = torch.arange(len(vectors), device=left.device).roll(len(left))
        losses = F.cross_entropy(logits.masked_fill(itself, -torch.inf), partner, reduction="none")
    return losses.unflatten(0, (2, -1)).mean(0)
