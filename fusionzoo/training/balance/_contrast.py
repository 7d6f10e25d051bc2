"""The contrastive loss of pairs of rows that several strategies share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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
