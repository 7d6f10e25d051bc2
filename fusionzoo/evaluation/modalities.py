"""What each modality is worth: a score for every subset, then Shapley's values of them.

A table of scores maps subsets, frozensets of modality names, to the metric; the empty one is what
the model says of a sample without any modality.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import combinations
from math import comb

Scores = Mapping[frozenset[str], float]


def subsets(modalities: Sequence[str]) -> list[frozenset[str]]:
    """Return all 2^M subsets, the empty one first, the full one last."""
    sizes = range(len(modalities) + 1)
    return [frozenset(some) for size in sizes for some in combinations(modalities, size)]


def subset_label(some: Collection[str]) -> str:
    """Name a subset.

    >>> subset_label({"text", "audio"}), subset_label(())
    ('audio+text', 'none')
    """
    return "+".join(sorted(some)) or "none"


def shapley(scores: Scores, modalities: Sequence[str]) -> dict[str, float]:
    """Return each modality's exact Shapley value (1953): they sum to full score - empty score.

    >>> xor = {frozenset(): 0.5, frozenset("a"): 0.5, frozenset("b"): 0.5, frozenset("ab"): 1.0}
    >>> shapley(xor, "ab")
    {'a': 0.25, 'b': 0.25}
    """
    count = len(modalities)
    values = {}
    for name in modalities:
        others = [other for other in modalities if other != name]
        values[name] = sum(
            (scores[some | {name}] - scores[some]) / (count * comb(count - 1, len(some)))
            for some in subsets(others)
        )
    return values


def interactions(scores: Scores, modalities: Sequence[str]) -> dict[tuple[str, str], float]:
    """Return the Shapley interaction index of each pair (Grabisch and Roubens 1999).

    Above 0: the two say more together than the sum of what each adds (synergy); below: they say
    the same (redundancy).

    >>> xor = {frozenset(): 0.5, frozenset("a"): 0.5, frozenset("b"): 0.5, frozenset("ab"): 1.0}
    >>> interactions(xor, "ab")
    {('a', 'b'): 0.5}
    """
    count = len(modalities)
    values = {}
    for one, two in combinations(modalities, 2):
        others = [name for name in modalities if name not in (one, two)]
        values[one, two] = sum(
            (scores[some | {one, two}] - scores[some | {one}] - scores[some | {two}] + scores[some])
            / ((count - 1) * comb(count - 2, len(some)))
            for some in subsets(others)
        )
    return values


def expected(scores: Scores, rates: Mapping[str, float]) -> float:
    """Return the score when each modality is missing with its own chance, independently.

    Exact for a metric that is a mean over samples: the subsets' scores weighted by their chances,
    so no sampling noise; a sample may lose everything.
    """
    total = 0.0
    for some, score in scores.items():
        chance = 1.0
        for name, rate in rates.items():
            chance *= 1 - rate if name in some else rate
        total += chance * score
    return total
