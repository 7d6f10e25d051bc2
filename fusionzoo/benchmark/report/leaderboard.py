"""The leaderboard: a line per strategy, each compared with the best single modality."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from fusionzoo.evaluation import statistics
from fusionzoo.evaluation.calibration import calibration_error, risk_coverage
from fusionzoo.evaluation.robustness import SEVERITIES

from .curves import RATES, area, damage_curves, missing_curve
from .results import Strategy, Summary, best_single

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
    """Return the lines, the best first."""
    best = best_single(summary)
    fusions = summary.kind("fusion")
    against = {}
    if best is not None:
        against = {one.name: statistics.compare(one.right, best.right) for one in fusions}
    corrected = statistics.holm([one.p for one in against.values()])
    holm = dict(zip(against, corrected, strict=True))
    lines = []
    for one in summary.strategies:
        per_seed = one.right.mean(1).tolist()
        spread = statistics.seed_interval(per_seed)
        line = {
            "strategy": one.name,
            "family": one.family,
            "seeds": len(one.seeds),
            "accuracy": spread.mean,
            "low": spread.low,
            "high": spread.high,
            "macro_f1": one.figure("macro_f1"),
            **_calibration(one, summary.target),
            "brier": one.figure("brier"),
            "nll": one.figure("nll"),
            "aurc": float(np.mean([risk_coverage(x, summary.target).mean() for x in one.logits])),
            "val_accuracy": one.val_accuracy,
        }
        if one.name in against:
            compared = against[one.name]
            line |= {f"gain_{key}": value for key, value in compared._asdict().items()}
            line["gain_p_holm"] = holm[one.name]
            line["outcome"] = outcome(compared.difference, holm[one.name])
            line |= _robustness(summary, one)
        lines.append(line)
    return sorted(lines, key=lambda line: (-line["accuracy"], line["strategy"]))


def _calibration(strategy: Strategy, target: Tensor) -> dict[str, Any]:
    """Return the calibration error over all test samples, also those of several folds."""
    error = calibration_error(strategy.logits, target)
    return {
        "ece": error.ece,
        "ece_debiased": error.debiased,
        "ece_if_calibrated": error.if_calibrated,
        "ece_limit": error.limit,
        "calibration": CALIBRATED if error.within_noise else NOT_CALIBRATED,
    }


def outcome(difference: float, p: float) -> str:
    """Say `win`, `loss`, or `tie` where no difference can be shown."""
    if p >= SIGNIFICANT:
        return "tie"
    return "win" if difference > 0 else "loss"


def _robustness(summary: Summary, one: Strategy) -> dict[str, float]:
    """Return areas under the accuracy's curves: over missing rates, over severities by modality."""
    modalities = list(summary.bench.modalities)
    curve = missing_curve(one, modalities)
    areas = {"missing_area": area(curve, RATES)}
    for modality in modalities:
        curves = damage_curves(one, modality)
        if curves:
            areas[f"damaged_{modality}_area"] = float(
                np.mean([area(c, (0, *SEVERITIES)) for c in curves.values()])
            )
    return areas
