"""The geometry of embeddings: alignment, uniformity, rank, the gap between modalities, CKA."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 2048  # rows compared at a time


def alignment(first: Tensor, second: Tensor) -> float:
    """Return the mean squared distance of partners at length 1 (Wang & Isola 2020); 0 is best.

    >>> alignment(torch.eye(3), -torch.eye(3))
    4.0
    """
    a, b = (F.normalize(x.double(), dim=-1) for x in (first, second))
    return float((a - b).square().sum(-1).mean())


def uniformity(vectors: Tensor, temperature: float = 2.0) -> float:
    """Return the log of the mean of exp(-t |x - y|^2) over pairs at length 1; lower is more spread.

    Wang & Isola 2020, arXiv:2005.10242. Points spread evenly over a sphere of many dimensions have
    about -2 t, a single point 0.
    """
    x = F.normalize(vectors.double(), dim=-1)
    count, total = len(x), 0.0
    for rows in torch.arange(count).split(BLOCK):
        total += float((2 * temperature * (x[rows] @ x.T - 1)).exp().sum())
    return float(torch.tensor((total - count) / (count * (count - 1))).log())


def effective_rank(vectors: Tensor) -> float:
    """Return exp of the entropy of the normalised singular values (Roy & Vetterli 2007).

    Of centred vectors: 1 where all lie on a line, D where they spread equally in all directions.
    """
    x = vectors.double()
    values = torch.linalg.svdvals(x - x.mean(0))
    return float(torch.special.entr(values / values.sum().clamp(min=1e-300)).sum().exp())


def modality_gap(first: Tensor, second: Tensor) -> float:
    """Return the distance between the means of two modalities' unit vectors.

    Liang et al. 2022, arXiv:2203.02053.
    """
    a, b = (F.normalize(x.double(), dim=-1).mean(0) for x in (first, second))
    return float((a - b).norm())


def linear_cka(first: Tensor, second: Tensor) -> float:
    """Return linear CKA (Kornblith et al. 2019), debiased: about 0 for unrelated vectors.

    1 for spaces that are equal up to rotation and scale. Debiased as by Nguyen et al. 2021
    (arXiv:2010.15327): the plain figure is well above 0 where D is not small beside N. NaN with
    fewer than 4 samples.
    """
    if len(first) < 4:
        return float("nan")
    a, b = (_gram(x) for x in (first, second))
    scale = (_hsic(a, a) * _hsic(b, b)).clamp(min=0).sqrt()
    return float(_hsic(a, b) / scale) if scale > 0 else float("nan")


def _gram(vectors: Tensor) -> Tensor:
    x = vectors.double()
    gram = (x - x.mean(0)) @ (x - x.mean(0)).T
    return gram.fill_diagonal_(0)


def _hsic(a: Tensor, b: Tensor) -> Tensor:
    """Return the unbiased estimate of HSIC from Gram matrices without diagonals, (N, N)."""
    n = len(a)
    traces = (a * b).sum() + a.sum() * b.sum() / ((n - 1) * (n - 2))
    return (traces - 2 / (n - 2) * (a.sum(0) @ b.sum(0))) / (n * (n - 3))
