"""The leaderboard: a line per candidate, each compared with the best single modality."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from fusionzoo.evaluation import statistics
from fusionzoo.evaluation.calibration import calibration_error, risk_coverage

from ..bench import metric_named
from .results import (
    StrategyResults,
    Summary,
    area,
    best_single,
    corruption_curves,
    decimal,
    lost_area,
    metric_name,
    missing_area,
    readable,
    severities,
    thousands,
)

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


Line = Mapping[str, Any]
HIDDEN = {"score", "seeds"}  # keys of a line that are no column
# Text that JavaScript's parseFloat reads as the number; not "128 k", "12,345" or "<0.001".
SORTS_AS_IT_STANDS = re.compile(r"[+-]?\d+(\.\d+)?( to .*| \*| \(.*)?$")


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of the leaderboard; left out if no line has its first key."""

    keys: tuple[str, ...]
    title: str
    text: Callable[..., str]  # of the values of the keys
    note: str = ""  # what the column shows, where the heading does not say it
    default: bool = True  # otherwise behind the switch "all columns"


class Cell(NamedTuple):
    """A cell: its text, the number that it is sorted by if the text does not start with it."""

    text: str
    sort: str = ""
    style: str = ""  # CSS class


# Columns that are the same for every metric.
DETAILS = (
    Column(keys=("family",), title="family", text=str),
    Column(keys=("macro_f1",), title="macro F1", text=decimal),
    Column(
        keys=("ece", "calibration"),
        title="ECE",
        text=lambda ece, words: decimal(ece) + (" *" if words == NOT_CALIBRATED else ""),
        note="expected calibration error; * not calibrated",
    ),
    Column(keys=("parameters",), title="param\u00adeters", text=readable),
    Column(keys=("seconds",), title="train s", text=lambda seconds: f"{seconds:.2f}"),
    Column(keys=("macs",), title="MACs", text=readable, default=False),
    Column(keys=("latency_ms",), title="latency ms", text=decimal, default=False),
    Column(keys=("samples_per_second",), title="samples/s", text=thousands, default=False),
    Column(keys=("memory_mb",), title="memory MB", text=decimal, default=False),
    Column(keys=("ece_debiased",), title="ECE debiased", text=decimal, default=False),
    Column(
        keys=("ece_if_calibrated", "ece_limit"),
        title="ECE if calibrated",
        text=lambda mean, limit: f"{mean:.3f} (up to {limit:.3f})",
        default=False,
    ),
    Column(keys=("calibration",), title="calibration", text=str, default=False),
    Column(keys=("brier",), title="Brier", text=decimal, default=False),
    Column(keys=("nll",), title="NLL", text=decimal, default=False),
    Column(keys=("aurc",), title="AURC", text=decimal, default=False),
    Column(keys=("val_accuracy",), title="validation accuracy", text=decimal, default=False),
)


def columns(metric: str) -> list[Column]:
    """Return the columns of a leaderboard that is ranked by `metric`."""
    gain, share = metric_named(metric).difference, metric_named(metric).share
    name = metric_name(metric)
    score = f"{name} over missing rates from 0 to 0.9, averaged"
    return [
        Column(keys=("strategy",), title="strategy", text=str),
        Column(keys=(metric,), title=name, text=decimal),
        Column(keys=("low", "high"), title="95 %", text=_interval, note=f"interval of the {name}"),
        Column(
            keys=("untuned",),
            title="untuned",
            text=decimal,
            note=f"{name} before tuning, of the first seed",
        ),
        Column(
            keys=("gain_difference",),
            title="gain, points" if share else "gain",
            text=gain,
            note="over the best single modality",
        ),
        Column(
            keys=("gain_low", "gain_high"),
            title="95 %",
            text=lambda low, high: f"{gain(low)} to {gain(high)}",
            note="interval of the gain",
        ),
        Column(keys=("gain_p_holm",), title="p\u00a0(Holm)", text=_p_value),
        Column(keys=("outcome",), title="outcome", text=str),
        Column(keys=("missing_area",), title="missing", text=decimal, note=score),
        Column(
            keys=("lost_area",),
            title="lost parts",
            text=decimal,
            note=f"{name} over the severity of a lost part, averaged",
            default=False,
        ),
        *DETAILS,
    ]


def present_columns(lines: Sequence[Line], metric: str) -> list[Column]:
    """Return the columns that the lines have values for; numbers of other keys come last."""
    listed: dict[tuple[str, ...], Column] = {}
    for column in columns(metric):
        listed.setdefault(column.keys, column)
    covered = {key for keys in listed for key in keys} | HIDDEN
    others = dict.fromkeys(
        key
        for line in lines
        for key, value in line.items()
        if key not in covered and isinstance(value, int | float) and not isinstance(value, bool)
    )
    generic = (
        Column(keys=(key,), title=metric_name(key), text=decimal, default=False) for key in others
    )
    return [
        column
        for column in (*listed.values(), *generic)
        if any(_has_value(line.get(column.keys[0])) for line in lines)
    ]


def cell(column: Column, line: Line) -> Cell:
    """Return a line's cell; it is empty where the line has no value."""
    values = [line.get(key) for key in column.keys]
    if not _has_value(values[0]):
        return Cell("one seed" if column.keys == ("low", "high") and "low" in line else "")
    text = column.text(*values)
    style = text if column.keys == ("outcome",) else ""
    if isinstance(values[0], int | float) and not SORTS_AS_IT_STANDS.match(text):
        return Cell(text, f"{values[0]:.6g}", style)
    return Cell(text, "", style)


def table(lines: Iterable[Line], metric: str) -> tuple[list[Column], list[list[Cell]]]:
    """Return the columns of the leaderboard and the cells of each line."""
    all_lines = list(lines)
    shown = present_columns(all_lines, metric)
    return shown, [[cell(column, line) for column in shown] for line in all_lines]


def _has_value(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and math.isnan(value))


def _interval(low: float, high: float) -> str:
    return f"{decimal(low)} to {decimal(high)}"


def _p_value(p: float) -> str:
    return "<0.001" if p < 0.001 else f"{p:.3f}"
