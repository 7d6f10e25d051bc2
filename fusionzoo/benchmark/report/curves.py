"""Curves of a strategy: missing modalities, damage, reliability; and who is beaten by none."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from fusionzoo.evaluation.calibration import reliability
from fusionzoo.evaluation.modalities import expected
from fusionzoo.evaluation.robustness import SEVERITIES

from .results import Strategy

RATES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # of missing modalities


def missing_curve(one: Strategy, modalities: Sequence[str], only: str | None = None) -> list[float]:
    """Return the expected accuracy at each of RATES: all modalities missing at random, or one."""
    scores = one.by_subset(modalities)
    return [
        expected(scores, {m: rate if only in (None, m) else 0.0 for m in modalities})
        for rate in RATES
    ]


def damage_curves(one: Strategy, modality: str) -> dict[str, list[float]]:
    """Return for each corruption of a modality the accuracy at severity 0 to 5."""
    names = dict.fromkeys(
        r["corruption"] for r in one.rows if r["modality"] == modality and r["severity"]
    )
    whole = one.figure("accuracy")
    return {
        name: [
            whole,
            *(
                one.figure("accuracy", modality=modality, corruption=name, severity=severity)
                for severity in SEVERITIES
            ),
        ]
        for name in names
    }


def area(curve: Sequence[float], at: Sequence[float]) -> float:
    """Average a curve over its range (trapezoids)."""
    return float(np.trapezoid(curve, at) / (at[-1] - at[0]))


def reliability_of(one: Strategy, target: Tensor) -> list[tuple[float, float, int]]:
    """Return (confidence, accuracy, count) of each bin, the seeds pooled."""
    probabilities = one.logits.double().softmax(-1).flatten(0, 1)
    found = reliability(probabilities, target.repeat(len(one.logits)))
    return list(zip(*(x.tolist() for x in found), strict=True))


def pareto(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """Return who is beaten by none in both: (cost, the lower the better; quality, the higher).

    >>> pareto({"a": (1, 0.5), "b": (2, 0.9), "c": (3, 0.8)})
    ['a', 'b']
    """
    front, best = [], -math.inf
    for name, (_, quality) in sorted(points.items(), key=lambda p: (p[1][0], -p[1][1])):
        if quality > best:
            front.append(name)
            best = quality
    return front
