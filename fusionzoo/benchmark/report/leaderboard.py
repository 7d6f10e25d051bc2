"""The leaderboard: a line per strategy, each compared with the best single modality."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from fusionzoo.evaluation import statistics
from fusionzoo.evaluation.calibration import calibration_error, risk_coverage

from .curves import area, corruption_curves, lost_area, missing_area, severities
from .results import StrategyResults, Summary, best_single

CALIBRATED, NOT_CALIBRATED = "cannot be told from calibrated", "not calibrated"
ECE_NOTE = (
    "ECE: expected calibration error in 15 bins of equal width. Chance alone makes it more than 0:"
    ' "if calibrated" is what perfectly calibrated models with the same confidences get (simulated;'
    ' the mean, and what 95 % of them get at most), "debiased" is the measured one without it. A'
    " model within that limit cannot be told from a calibrated one."
)
SIGNIFICANT = 1 - statistics.LEVEL
LABELS = ("fold", "seed", "subset", "modality", "corruption", "severity", "loss")  # no metrics


def leaderboard(summary: Summary) -> list[dict[str, Any]]:
    """Return a line per strategy, the best first."""
    best = best_single(summary)
    comparisons = {}
    if best is not None:
        comparisons = {
            fusion.name: summary.compare(fusion, best) for fusion in summary.of_kind("fusion")
        }
    corrected = statistics.holm([comparison.p for comparison in comparisons.values()])
    holm = dict(zip(comparisons, corrected, strict=True))
    lines = []
    for strategy in summary.strategies:
        line = _metrics(summary, strategy)
        if strategy.name in comparisons:
            comparison, p = comparisons[strategy.name], holm[strategy.name]
            line |= {f"gain_{key}": value for key, value in comparison._asdict().items()}
            line["gain_p_holm"] = p
            line["outcome"] = outcome(comparison.difference, p)
        if strategy.kind != "baseline":
            line |= _robustness(summary, strategy)
        lines.append(line)
    return sorted(lines, key=lambda line: (-line["score"], line["strategy"]))


def _metrics(summary: Summary, strategy: StrategyResults) -> dict[str, Any]:
    metric = summary.bench.metric
    interval = summary.interval(strategy.scores)
    low, high = sorted((metric.shown(interval.low), metric.shown(interval.high)))
    line = {
        "strategy": strategy.name,
        "family": strategy.family,
        "kind": strategy.kind,
        "seeds": len(strategy.seeds),
        "score": interval.mean,
        metric.name: metric.shown(interval.mean),
        "low": low,
        "high": high,
        "untuned": metric.shown(strategy.untuned),
        f"val_{metric.name}": metric.shown(strategy.val_score),
    }
    others = [key for key in strategy.rows[0] if key not in (*LABELS, *line, "ece")]
    line |= {key: strategy.mean(key) for key in others}
    if summary.bench.scheme is None:
        line |= _calibration(strategy, summary.target)
        curves = [risk_coverage(x, summary.target).mean() for x in strategy.logits]
        line["aurc"] = float(np.mean(curves))
    return line


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
    """Return areas under the score's curves: over missing rates, over severities by modality.

    Those over missing rates and over the severity of lost parts have intervals.
    """
    modalities, areas = list(summary.bench.modalities), {}
    shown = summary.bench.metric.shown
    for name, by_sample in (
        ("missing_area", missing_area(strategy, modalities)),
        ("lost_area", lost_area(strategy, modalities)),
    ):
        if by_sample is not None:
            interval = summary.interval(by_sample, damaged=name == "lost_area")
            areas[name] = shown(interval.mean)
            low, high = sorted((shown(interval.low), shown(interval.high)))
            areas |= {f"{name}_low": low, f"{name}_high": high}
    for modality in modalities:
        curves = corruption_curves(strategy, modality)
        if curves:
            at = severities(strategy)
            mean = float(np.mean([area(curve, at) for curve in curves.values()]))
            areas[f"damaged_{modality}_area"] = shown(mean)
    return areas
