"""Retrieval between modalities: does an embedding find its partner among all others?

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
TIE = 1e-6  # cosines this close are equal, and a tie counts against the partner
CELLS = 2**24  # similarities held at once: 64 MB


def retrieval_figures(embeddings: Mapping[str, Tensor], present: Tensor) -> dict[str, float]:
    """Return recall@1, 5, 10, median rank and MRR of every pair of modalities, both ways.

    `embeddings` maps each modality to (N, D); `present` (N, M) has its columns in that order, and
    only samples that have both modalities count, as queries and as candidates. Names are
    `image_to_text.recall@1`; those without a direction are means over all directions.
    """
    each: dict[str, dict[str, float]] = {}
    columns = {name: present[:, column].bool().cpu() for column, name in enumerate(embeddings)}
    for one, two in combinations(embeddings, 2):
        both = columns[one] & columns[two]
        if both.any():
            there, back = ranks(embeddings[one][both], embeddings[two][both])
            each[f"{one}_to_{two}"] = rank_figures(there)
            each[f"{two}_to_{one}"] = rank_figures(back)
    if not each:
        raise FusionZooError("no sample has two modalities, so there is nothing to retrieve")
    names = next(iter(each.values()))
    mean = {name: sum(own[name] for own in each.values()) / len(each) for name in names}
    return mean | {f"{way}.{name}": x for way, own in each.items() for name, x in own.items()}


def any_pair(present: Tensor) -> bool:
    """Whether any sample has two modalities: (N, M)."""
    return bool((present.sum(1) > 1).any())


def ranks(one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
    """Rank each row's partner by cosine, from 1, both ways: (N, D) x 2 -> int32 (N,) x 2.

    A rank counts the candidates that are at least as near, so ties and NaN count as misses. Works
    through blocks of rows: memory is that of `CELLS` similarities for any N.
    """
    a, b = (F.normalize(x.float(), dim=-1) for x in (one, two))
    wanted = (a * b).sum(-1) - TIE
    # From all candidates take those that are farther; to count in 32 bits takes half the time.
    there, back = (torch.full_like(wanted, len(a), dtype=torch.int32) for _ in range(2))
    size = max(1, CELLS // max(1, len(a)))
    for rows in torch.arange(len(a), device=a.device).split(size):
        cosines = a[rows] @ b.T
        there[rows] -= (cosines < wanted[rows, None]).sum(1, dtype=torch.int32)
        back -= (cosines < wanted).sum(0, dtype=torch.int32)
    return there.clamp(min=1), back.clamp(min=1)


def rank_figures(found: Tensor) -> dict[str, float]:
    """Sum up ranks (N,)."""
    rank = found.double()
    return {
        **{f"recall@{k}": (found <= k).double().mean().item() for k in AT},
        "median_rank": rank.quantile(0.5).item() if len(rank) < 2**24 else rank.median().item(),
        "mrr": rank.reciprocal().mean().item(),
    }
