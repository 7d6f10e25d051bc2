"""Parts of `drfuse`: the pool of shared parts, their divergence, and the ranking of attention.

Shapes: `B` batch, `M` modalities, `D` width, `K` classes.
"""

from __future__ import annotations

from itertools import combinations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base import Draws, present_mean


def pooled_logit(x: Tensor, present: Tensor) -> Tensor:
    """Return logit(mean of sigmoid(x_m) over present m): (B, M, D), (B, M) -> (B, D).

    Computed from logarithms, so that it stays finite; 0 for a row without any modality.
    """
    has_any = present.any(1, keepdim=True)
    absent = ~(present | ~has_any)[..., None]
    pieces = [
        F.logsigmoid(sign * x).masked_fill(absent, -torch.inf).logsumexp(1) for sign in (1, -1)
    ]
    return (pieces[0] - pieces[1]).masked_fill(~has_any, 0)


def divergence(shared: Tensor, present: Tensor) -> Tensor:
    """Return mean_m sum_d p_m log(p_m / mean p), p = sigmoid: (B, M, D), (B, M) -> (B,)."""
    logs = F.logsigmoid(shared)
    count = present.sum(1).clamp(min=1)[:, None]
    has_any = present.any(1, keepdim=True)
    absent = ~(present | ~has_any)[..., None]
    mean = logs.masked_fill(absent, -torch.inf).logsumexp(1) - count.to(logs.dtype).log()
    excess = (logs.exp() * (logs - mean[:, None])).sum(-1)
    return present_mean(excess, present)


def ranking(attention: Tensor, votes: Tensor, target: Tensor, present: Tensor) -> Tensor:
    """Return how far attention prefers the token with the larger loss on a class, a mean: (B,).

    attention (B, K, M + 1) and votes (B, M + 1, K) of the modalities and, last, the shared part;
    present (B, M). Targets are classes (B,) or labels (B, K) of 0 and 1, of which missing ones
    (NaN) are left out; rows with other targets, such as numbers, have no ranking.
    """
    if target.ndim == 1:
        labels = F.one_hot(target.long(), votes.shape[-1]).to(votes.dtype)
    elif target.shape == votes[:, 0].shape:
        labels = target.to(votes.dtype)
    else:
        return attention.new_zeros(len(attention))
    known = ~labels.isnan()
    binary = ((labels == 0) | (labels == 1) | ~known).all(1, keepdim=True)
    labels = labels.nan_to_num().clamp(0, 1)[:, None].expand_as(votes)
    losses = F.binary_cross_entropy_with_logits(votes, labels, reduction="none")
    mask = torch.cat([present, present.any(1, keepdim=True)], dim=1)
    total, pairs = (
        attention.new_zeros(len(attention)),
        torch.zeros_like(mask[:, 0], dtype=torch.long),
    )
    for i, j in combinations(range(mask.shape[1]), 2):
        sign = torch.where(losses[:, i] < losses[:, j], 1.0, -1.0)
        hinge = (-sign * (attention[..., i] - attention[..., j])).clamp(min=0)
        mean = hinge.masked_fill(~known, 0).sum(1) / known.sum(1).clamp(min=1)
        both = mask[:, i] & mask[:, j] & binary[:, 0]
        total, pairs = total + mean.masked_fill(~both, 0), pairs + both
    return total / pairs.clamp(min=1)


def random_part(present: Tensor, share: float, draws: Draws) -> Tensor:
    """Take a random part of the modalities of a share of the rows, at least one: (B, M) -> (B, M).

    The number that is kept, 1 to P - 1 of P present modalities, is drawn first.
    """
    rows, modalities = present.shape
    numbers = draws.uniform(rows, modalities + 2).to(present.device)
    count = present.sum(1)
    size = (1 + (numbers[:, 1] * (count - 1)).floor()).clamp(min=1)
    size = torch.where((numbers[:, 0] < share) & (count > 1), size, count)
    rank = numbers[:, 2:].masked_fill(~present, 2).argsort(dim=1).argsort(dim=1)
    return (rank < size[:, None]) & present
