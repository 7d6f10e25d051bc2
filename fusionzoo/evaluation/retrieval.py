"""Cross-modal retrieval: the rank of a sample's own embedding among those of another modality.

Shapes: `N` samples, `M` modalities, `D` width.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

import torch
import torch.nn.functional as F
from torch import Tensor

from fusionzoo.errors import FusionZooError

AT = (1, 5, 10)
TIE = 1e-6  # cosines this close count as ties, which worsen the partner's rank
CELLS = 2**24  # similarities computed at a time: 64 MB


def retrieval_figures(embeddings: Mapping[str, Tensor], present: Tensor) -> dict[str, float]:
    """Return recall@1, 5, 10, median rank and MRR of every pair of modalities and direction.

    `embeddings` maps each modality to (N, D); `present` (N, M) has its columns in that order, and
    only samples that have both modalities count, as queries and as candidates. Names are
    `image_to_text.recall@1`; those without a direction are means over all directions.
    """
    by_direction: dict[str, dict[str, float]] = {}
    columns = {name: present[:, column].bool().cpu() for column, name in enumerate(embeddings)}
    for first, second in combinations(embeddings, 2):
        has_both = columns[first] & columns[second]
        if has_both.any():
            forward_ranks, backward_ranks = ranks(
                embeddings[first][has_both], embeddings[second][has_both]
            )
            by_direction[f"{first}_to_{second}"] = rank_figures(forward_ranks)
            by_direction[f"{second}_to_{first}"] = rank_figures(backward_ranks)
    if not by_direction:
        raise FusionZooError("no sample has two modalities, so there is nothing to retrieve")
    names = next(iter(by_direction.values()))
    mean = {
        name: sum(figures[name] for figures in by_direction.values()) / len(by_direction)
        for name in names
    }
    return mean | {
        f"{direction}.{name}": x
        for direction, figures in by_direction.items()
        for name, x in figures.items()
    }


def any_pair(present: Tensor) -> bool:
    """Whether any sample has two modalities: (N, M)."""
    return bool((present.sum(1) > 1).any())


def ranks(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Rank each row's partner by cosine, from 1, in both directions: (N, D) x 2 -> int32 (N,) x 2.

    A rank counts the candidates that are at least as near, so ties and NaN count as misses. Runs
    in blocks of rows, so memory is bounded by `CELLS` similarities for any N.
    """
    a, b = (F.normalize(x.float(), dim=-1) for x in (first, second))
    threshold = (a * b).sum(-1) - TIE
    # N minus the number of farther candidates; counting in 32 bits halves the time.
    forward, backward = (torch.full_like(threshold, len(a), dtype=torch.int32) for _ in range(2))
    size = max(1, CELLS // max(1, len(a)))
    for rows in torch.arange(len(a), device=a.device).split(size):
        cosines = a[rows] @ b.T
        forward[rows] -= (cosines < threshold[rows, None]).sum(1, dtype=torch.int32)
        backward -= (cosines < threshold).sum(0, dtype=torch.int32)
    return forward.clamp(min=1), backward.clamp(min=1)


def rank_figures(ranks: Tensor) -> dict[str, float]:
    """Return recall@k, median rank and mean reciprocal rank (MRR) of ranks (N,)."""
    values = ranks.double()
    return {
        **{f"recall@{k}": (ranks <= k).double().mean().item() for k in AT},
        "median_rank": values.quantile(0.5).item()
        if len(values) < 2**24
        else values.median().item(),
        "mrr": values.reciprocal().mean().item(),
    }
