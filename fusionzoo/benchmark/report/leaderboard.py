"""The leaderboard: a line per strategy, each compared with the best single modality."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from fusionzoo.evaluation import statistics
from fusionzoo.evaluation.calibration import calibration_error, risk_coverage
from fusionzoo.evaluation.robustness import SEVERITIES

from .curves import RATES, area, corruption_curves, missing_curve
from .results import StrategyResults, Summary, best_single

FIGURES = ("accuracy", "macro_f1", "ece", "brier", "nll")
CALIBRATED, NOT_CALIBRATED = "cannot be told from calibrated", "not calibrated"
ECE_NOTE = (
    "ECE: expected calibration error in 15 bins of equal width. Chance alone makes it more than 0:"
    ' "if calibrated" is what perfectly calibrated models with the same confidences get (simulated;'
    ' the mean, and what 95 % of them get at most), "debiased" is the measured one without it. A'
    " model within that limit cannot be told from a calibrated one."
)
SIGNIFICANT = 1 - statistics.LEVEL


def leaderboard(summary: Summary) -> list[dict[str, Any]]:
    """Return a line per strategy, the best first."""
    best = best_single(summary)
    comparisons = {}
    if best is not None:
        comparisons = {
            fusion.name: statistics.compare(fusion.correct, best.correct)
            for fusion in summary.of_kind("fusion")
        }
    corrected = statistics.holm([comparison.p for comparison in comparisons.values()])
    holm = dict(zip(comparisons, corrected, strict=True))
    lines = []
    for strategy in summary.strategies:
        line = _metrics(strategy, summary.target)
        if strategy.name in comparisons:
            comparison, p = comparisons[strategy.name], holm[strategy.name]
            line |= {f"gain_{key}": value for key, value in comparison._asdict().items()}
            line["gain_p_holm"] = p
            line["outcome"] = outcome(comparison.difference, p)
            line |= _robustness(summary, strategy)
        lines.append(line)
    return sorted(lines, key=lambda line: (-line["accuracy"], line["strategy"]))


def _metrics(strategy: StrategyResults, target: Tensor) -> dict[str, Any]:
    interval = statistics.seed_interval(strategy.correct.mean(1).tolist())
    return {
        "strategy": strategy.name,
        "family": strategy.family,
        "seeds": len(strategy.seeds),
        "accuracy": interval.mean,
        "low": interval.low,
        "high": interval.high,
        "macro_f1": strategy.mean("macro_f1"),
        **_calibration(strategy, target),
        "brier": strategy.mean("brier"),
        "nll": strategy.mean("nll"),
        "aurc": float(np.mean([risk_coverage(x, target).mean() for x in strategy.logits])),
        "val_accuracy": strategy.val_accuracy,
    }


def _calibration(strategy: StrategyResults, target: Tensor) -> dict[str, Any]:
    """Return the calibration error over all test samples, of several folds too."""
    error = calibration_error(strategy.logits, target)
    return {
        "ece": error.ece,
        "ece_debiased": error.debiased,
        "ece_if_calibrated": error.if_calibrated,
        "ece_limit": error.limit,
        "calibration": CALIBRATED if error.within_noise else NOT_CALIBRATED,
    }


def outcome(difference: float, p: float) -> str:
    """Return `win` or `loss`, or `tie` where no difference can be shown."""
    if p >= SIGNIFICANT:
        return "tie"
    return "win" if difference > 0 else "loss"


def _robustness(summary: Summary, strategy: StrategyResults) -> dict[str, float]:
    """Return areas under the accuracy's curves: over missing rates, over severities by modality."""
    modalities = list(summary.bench.modalities)
    areas = {"missing_area": area(missing_curve(strategy, modalities), RATES)}
    for modality in modalities:
        curves = corruption_curves(strategy, modality)
        if curves:
            areas[f"damaged_{modality}_area"] = float(
                np.mean([area(curve, (0, *SEVERITIES)) for curve in curves.values()])
            )
    return areas
