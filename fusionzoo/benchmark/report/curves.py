"""Curves of a strategy: missing modalities, corruptions, reliability; and the Pareto front."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fusionzoo.evaluation.calibration import reliability
from fusionzoo.evaluation.modalities import expected, subsets

from .results import StrategyResults

RATES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # of missing modalities


def missing_curve(
    strategy: StrategyResults, modalities: Sequence[str], only: str | None = None
) -> list[float]:
    """Return the expected score at each of RATES: all modalities missing at random, or one."""
    scores = strategy.score_by_subset(modalities)
    return [
        expected(scores, {name: rate if only in (None, name) else 0.0 for name in modalities})
        for rate in RATES
    ]


def missing_area(
    strategy: StrategyResults, modalities: Sequence[str]
) -> NDArray[np.float64] | None:
    """Return each sample's area under its missing-rate curve, (S, N): linear in its subset scores.

    None where not every subset was tested.
    """
    order = subsets(modalities)[::-1]
    if strategy.subset_scores is None or strategy.subset_scores.shape[1] != len(order):
        return None
    weights = []
    for subset in order:
        only = {other: float(other == subset) for other in order}
        curve = [expected(only, dict.fromkeys(modalities, rate)) for rate in RATES]
        weights.append(area(curve, RATES))
    return np.einsum("u,sun->sn", np.array(weights), strategy.subset_scores)


def lost_area(strategy: StrategyResults, modalities: Sequence[str]) -> NDArray[np.float64] | None:
    """Return each damaged sample's area under its curve over the severity of a lost part, (S, n).

    Averaged over all modalities; one that the strategy does not see changes nothing. Linear in the
    sample's scores. None where lost parts were not tested.
    """
    if strategy.lost_scores is None:
        return None
    weights = np.zeros(len(strategy.lost_conditions))
    for modality in modalities:
        numbers = [0]  # undamaged
        numbers += [n for n, x in enumerate(strategy.lost_conditions) if x[0] == modality]
        if len(numbers) == 1:
            weights[0] += 1
            continue
        at = [strategy.lost_conditions[number][2] for number in numbers]
        for number, curve in zip(numbers, np.eye(len(at)), strict=True):
            weights[number] += area(curve.tolist(), at)
    return np.einsum("c,scn->sn", weights / len(modalities), strategy.lost_scores)


def severities(strategy: StrategyResults) -> list[int]:
    """Return the severities that were tested, 0 first."""
    return sorted({row["severity"] for row in strategy.rows})


def corruption_curves(strategy: StrategyResults, modality: str) -> dict[str, list[float]]:
    """Return the score at each severity, from 0, for each corruption of a modality."""
    corruptions = dict.fromkeys(
        row["corruption"]
        for row in strategy.rows
        if row["modality"] == modality and row["severity"]
    )
    undamaged = strategy.mean(corruption="undamaged")  # on the samples that are damaged elsewhere
    return {
        corruption: [
            undamaged,
            *(
                strategy.mean(modality=modality, corruption=corruption, severity=severity)
                for severity in severities(strategy)[1:]
            ),
        ]
        for corruption in corruptions
    }


def area(curve: Sequence[float], at: Sequence[float]) -> float:
    """Average a curve over its range (trapezoids)."""
    return float(np.trapezoid(curve, at) / (at[-1] - at[0]))


def reliability_of(strategy: StrategyResults, target: Tensor) -> list[tuple[float, float, int]]:
    """Return (confidence, accuracy, count) of each bin, with the seeds pooled."""
    probabilities = strategy.logits.double().softmax(-1).flatten(0, 1)
    bins = reliability(probabilities, target.repeat(len(strategy.logits)))
    return list(zip(*(x.tolist() for x in bins), strict=True))


def pareto(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """Return the Pareto front of (cost, quality): low cost and high quality are better.

    >>> pareto({"a": (1, 0.5), "b": (2, 0.9), "c": (3, 0.8)})
    ['a', 'b']
    """
    front, best = [], -math.inf
    for name, (_, quality) in sorted(points.items(), key=lambda p: (p[1][0], -p[1][1])):
        if quality > best:
            front.append(name)
            best = quality
    return front
