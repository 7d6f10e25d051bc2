"""Ranks of the right answers to a query, and the figures that follow from them.

Shapes: `B` queries, `A` answers, `T` right answers, padded.
"""

from __future__ import annotations

import torch
from torch import Tensor

AT = (1, 5, 10)
TIE = 1e-6  # cosines this close count as ties, which worsen the right answer's rank
FEW = 32  # right answers per query up to which counting is faster than sorting


def right_ranks(cosines: Tensor, columns: Tensor, mask: Tensor) -> Tensor:
    """Return the ranks, from 1, of each query's right answers, best first, 0 as padding: (B, T).

    Answers that are not right and (nearly) as near come first. Cosines (B, A), columns (B, T).
    """
    cosines = cosines.nan_to_num(nan=torch.inf)
    right = cosines.gather(1, columns)
    own = torch.where(right == torch.inf, -torch.inf, right).masked_fill(~mask, -torch.inf)
    own = own.sort(dim=1, descending=True).values
    thresholds = own - TIE
    padded = right.masked_fill(~mask, torch.inf).sort(dim=1).values
    right_below = torch.searchsorted(padded, thresholds.contiguous())
    if columns.shape[1] <= FEW:
        counts = [(cosines < t[:, None]).sum(1) for t in thresholds.unbind(1)]
        below = torch.stack(counts, dim=1)
    else:
        below = torch.searchsorted(cosines.sort(dim=1).values, thresholds.contiguous())
    num_right = mask.sum(1, keepdim=True)
    at_least = cosines.shape[1] - below  # all answers that are not farther, right ones too
    wrong_ahead = at_least - (num_right - right_below)
    places = torch.arange(1, columns.shape[1] + 1, device=cosines.device)
    return torch.where(places <= num_right, wrong_ahead + places, 0)


def figures_of(ranks: Tensor) -> dict[str, Tensor]:
    """Return the figures of each query from the ranks of its right answers (B, T)."""
    is_right, values = ranks > 0, ranks.double().clamp(min=1)
    places = torch.arange(1, ranks.shape[1] + 1, device=ranks.device)
    count = is_right.sum(1).clamp(min=1)
    gains = (1 + values).log2().reciprocal() * (is_right & (ranks <= AT[-1]))
    ideal = (1 + places.double()).log2().reciprocal()[: AT[-1]].cumsum(0)
    first = ranks[:, 0]
    return {
        **{f"recall@{k}": ((first <= k) & (first > 0)).double() for k in AT},
        "mrr": values[:, 0].reciprocal(),
        "map": (places / values * is_right).sum(1) / count,
        "ndcg@10": gains.sum(1) / ideal[count.clamp(max=len(ideal)) - 1],
        "rank": first.double(),
    }
