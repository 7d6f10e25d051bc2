"""What each modality adds: scores of all subsets, Shapley values, interactions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import combinations
from math import comb
from typing import TypeVar

from torch import Tensor

Scores = Mapping[frozenset[str], float]
Score = TypeVar("Score", float, Tensor)  # of one thing, or of several at once


def subsets(modalities: Sequence[str]) -> list[frozenset[str]]:
    """Return all 2^M subsets, the empty one first, the full one last."""
    sizes = range(len(modalities) + 1)
    return [frozenset(subset) for size in sizes for subset in combinations(modalities, size)]


def subset_label(subset: Collection[str]) -> str:
    """Name a subset.

    >>> subset_label({"text", "audio"}), subset_label(())
    ('audio+text', 'none')
    """
    return "+".join(sorted(subset)) or "none"


def shapley(scores: Mapping[frozenset[str], Score], modalities: Sequence[str]) -> dict[str, Score]:
    """Return each modality's exact Shapley value (1953): they sum to full score - empty score.

    >>> xor = {frozenset(): 0.5, frozenset("a"): 0.5, frozenset("b"): 0.5, frozenset("ab"): 1.0}
    >>> shapley(xor, "ab")
    {'a': 0.25, 'b': 0.25}
    """
    count, zero = len(modalities), 0.0 * scores[frozenset()]
    values = {}
    for name in modalities:
        others = [other for other in modalities if other != name]
        steps = [
            (scores[subset | {name}] - scores[subset]) / (count * comb(count - 1, len(subset)))
            for subset in subsets(others)
        ]
        values[name] = sum(steps, zero)
    return values


def interactions(scores: Scores, modalities: Sequence[str]) -> dict[tuple[str, str], float]:
    """Return the Shapley interaction index of each pair (Grabisch and Roubens 1999).

    Above 0: the pair adds more than its members do separately (synergy); below 0: their
    information overlaps (redundancy).

    >>> xor = {frozenset(): 0.5, frozenset("a"): 0.5, frozenset("b"): 0.5, frozenset("ab"): 1.0}
    >>> interactions(xor, "ab")
    {('a', 'b'): 0.5}
    """
    count = len(modalities)
    values = {}
    for first, second in combinations(modalities, 2):
        others = [name for name in modalities if name not in (first, second)]
        total = 0.0
        for subset in subsets(others):
            one, both = scores[subset | {first}], scores[subset | {first, second}]
            step = both - one - scores[subset | {second}] + scores[subset]
            total += step / ((count - 1) * comb(count - 2, len(subset)))
        values[first, second] = total
    return values


def expected(scores: Scores, rates: Mapping[str, float]) -> float:
    """Return the expected score when modality m is missing with probability rates[m].

    Modalities are missing independently, possibly all of them. Subset scores are weighted by their
    probabilities: exact, without sampling noise, for a metric that is a mean over samples.
    """
    total = 0.0
    for subset, score in scores.items():
        chance = 1.0
        for name, rate in rates.items():
            chance *= 1 - rate if name in subset else rate
        total += chance * score
    return total
