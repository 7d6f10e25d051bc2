"""Partial information decomposition of a discrete table p(x1, x2, y).

Shapes: `A`, `B` codes of the two sources, `C` classes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]
ROUNDS = 300  # of the search for q
CHANGE = 1e-8  # of every entry of q: the search ends
TINY = 1e-300


class Parts(NamedTuple):
    """Information about the target in bits."""

    redundancy: float  # in either source
    unique_1: float  # in the first source only
    unique_2: float  # in the second source only
    synergy: float  # in the combination only

    @property
    def total(self) -> float:
        """The information of both sources together."""
        return sum(self)


def decompose(table: Table, rounds: int = ROUNDS) -> Parts:
    """Split I(X1 X2; Y) into redundancy, unique parts and synergy: p (A, B, C) -> bits.

    With q* of the least I_q(X1 X2; Y) among the q that share p's marginals (x1, y) and (x2, y):
    R = I(X1; Y) + I(X2; Y) - I_q*, U_i = I(X_i; Y) - R, S = I_p(X1 X2; Y) - I_q* (Bertschinger et
    al. 2014, Entropy; Liang et al. 2023, NeurIPS, arXiv:2302.12247). q* is found by multiplicative
    steps q <- q q(y | x1, x2)^(-1/2), each followed by Sinkhorn's scaling to both marginals.

    >>> gate = np.zeros((2, 2, 2))
    >>> for a in (0, 1):
    ...     for b in (0, 1):
    ...         gate[a, b, a & b] = 0.25
    >>> [abs(round(part, 4)) for part in decompose(gate)]
    [0.3113, 0.0, 0.0, 0.5]
    """
    p = table / table.sum()
    return split(p, least_informative(p.sum(1), p.sum(0), rounds))


def split(p: Table, q: Table) -> Parts:
    """Split the information of p (A, B, C), given the q of `least_informative` (A, B, C)."""
    joint, least = (information(x.reshape(-1, x.shape[2])) for x in (p, q))
    alone_1, alone_2 = information(p.sum(1)), information(p.sum(0))
    redundancy = alone_1 + alone_2 - least
    return Parts(redundancy, alone_1 - redundancy, alone_2 - redundancy, joint - least)


def least_informative(first: Table, second: Table, rounds: int = ROUNDS) -> Table:
    """Return q* with the marginals (A, C) and (B, C): (A, B, C)."""
    classes = first.sum(0)
    # Independent given the class: it has both marginals.
    q = first[:, None] * second[None] / np.maximum(classes, TINY)
    for _ in range(rounds):
        given_both = q / np.maximum(q.sum(2, keepdims=True), TINY)
        before, q = q, sinkhorn(q / np.sqrt(np.maximum(given_both, TINY)), first, second, 20)
        if np.abs(q - before).max() < CHANGE:
            break
    return sinkhorn(q, first, second, 1000)


def sinkhorn(q: Table, first: Table, second: Table, rounds: int) -> Table:
    """Scale q (A, B, C) to both marginals."""
    for _ in range(rounds):
        q = q * (first / np.maximum(q.sum(1), TINY))[:, None]
        columns = q.sum(0)
        q = q * (second / np.maximum(columns, TINY))[None]
        if np.abs(columns - second).max() < 1e-10:
            break
    return q


def information(table: Table) -> float:
    """Return I(X; Y) in bits: (A, C), entries of sum 1.

    >>> information(np.array([[0.5, 0.0], [0.0, 0.5]]))
    1.0
    """
    independent = table.sum(1, keepdims=True) * table.sum(0, keepdims=True)
    positive = table > 0
    return float((table[positive] * np.log2(table[positive] / independent[positive])).sum())
