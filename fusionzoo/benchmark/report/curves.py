"""Curves of a strategy: missing modalities, corruptions, reliability; and the Pareto front."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from fusionzoo.evaluation.calibration import reliability
from fusionzoo.evaluation.modalities import expected
from fusionzoo.evaluation.robustness import SEVERITIES

from .results import StrategyResults

RATES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # of missing modalities


def missing_curve(
    strategy: StrategyResults, modalities: Sequence[str], only: str | None = None
) -> list[float]:
    """Return the expected accuracy at each of RATES: all modalities missing at random, or one."""
    accuracy = strategy.accuracy_by_subset(modalities)
    return [
        expected(accuracy, {name: rate if only in (None, name) else 0.0 for name in modalities})
        for rate in RATES
    ]


def corruption_curves(strategy: StrategyResults, modality: str) -> dict[str, list[float]]:
    """Return the accuracy at severity 0 to 5 for each corruption of a modality."""
    corruptions = dict.fromkeys(
        row["corruption"]
        for row in strategy.rows
        if row["modality"] == modality and row["severity"]
    )
    clean = strategy.mean("accuracy")
    return {
        corruption: [
            clean,
            *(
                strategy.mean(
                    "accuracy", modality=modality, corruption=corruption, severity=severity
                )
                for severity in SEVERITIES
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
