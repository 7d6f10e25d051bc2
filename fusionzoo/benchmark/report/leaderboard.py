"""The leaderboard: a line per candidate, each compared with the best single modality."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fusionzoo.evaluation import statistics
from fusionzoo.evaluation.calibration import calibration_error, risk_coverage
from fusionzoo.evaluation.metrics import metric_name

from ..bench import metric_named, tasks_of
from ..examine import all_metrics
from .results import (
    CHOSEN,
    CandidateResults,
    Cell,
    Summary,
    area,
    best_single,
    corruption_curves,
    decimal,
    missing_area,
    readable,
    severities,
)

CALIBRATED, NOT_CALIBRATED = "cannot be told from calibrated", "not calibrated"
ECE_NOTE = (
    "ECE: expected calibration error in 15 bins of equal width. Chance alone makes it more than 0:"
    ' "if calibrated" is what perfectly calibrated models with the same confidences get (simulated;'
    ' the mean, and what 95 % of them get at most), "debiased" is the measured one without it. A'
    " model within that limit cannot be told from a calibrated one."
)
SIGNIFICANT = 1 - statistics.LEVEL
EXTERNAL = "external"  # kind and family of others' predictions
Line = Mapping[str, Any]
HIDDEN = {"score", "seeds"}  # keys of a line that are no column
# Text that JavaScript's parseFloat reads as the number; not "128 k", "12,345" or "<0.001".
SORTS_AS_IT_STANDS = re.compile(r"[+-]?\d+(\.\d+)?( to .*| \*| \(.*)?$")
# The columns of each rendering, by name and in order.
PAGE = (
    *("candidate", "metric", "over_splits", "interval", "untuned", "gain", "gain_interval"),
    *("p", "outcome"),
    *("missing", "family", "macro_f1", "ece_marked", "parameters", "seconds"),
    *("macs", "latency", "speed", "memory", "ece_debiased", "ece_if_calibrated"),
    *("calibration", "tuned_settings"),  # then all other numbers
)
TEXT = (  # Markdown, LaTeX and notebooks
    *("candidate", "family", "metric", "over_splits", "interval", "untuned", "macro_f1", "ece"),
    *("ece_debiased", "ece_if_calibrated", "calibration", "gain_with_interval", "p"),
)
TERMINAL = ("candidate", "metric", "over_splits", "interval", "untuned", "gain_with_interval")


def leaderboard(summary: Summary) -> list[dict[str, Any]]:
    """Return a line per candidate, the best first."""
    best = best_single(summary)
    comparisons = {}
    if best is not None:
        comparisons = {
            fusion.name: summary.compare(fusion, best) for fusion in summary.of_kind("fusion")
        }
    corrected = statistics.holm([comparison.p for comparison in comparisons.values()])
    holm = dict(zip(comparisons, corrected, strict=True))
    lines = []
    for candidate in summary.candidates:
        line = _metrics(summary, candidate)
        if (candidate.name == CHOSEN or candidate.kind == EXTERNAL) and best is not None:
            comparison = summary.compare(candidate, best)
            line |= {f"gain_{key}": value for key, value in comparison._asdict().items()}
        if candidate.name in comparisons:
            comparison, p = comparisons[candidate.name], holm[candidate.name]
            line |= {f"gain_{key}": value for key, value in comparison._asdict().items()}
            line["gain_p_holm"] = p
            line["outcome"] = outcome(comparison.difference, p)
        if candidate.kind not in ("baseline", "chosen", EXTERNAL):
            line |= _robustness(summary, candidate)
        lines.append(line)
    return sorted(lines, key=lambda line: (-line["score"], line["candidate"]))


def _metrics(summary: Summary, candidate: CandidateResults) -> dict[str, Any]:
    metric = summary.bench.metric
    interval = summary.interval(candidate.scores)
    low, high = sorted((metric.shown(interval.low), metric.shown(interval.high)))
    line = {
        "candidate": candidate.name,
        "family": candidate.family,
        "kind": candidate.kind,
        "seeds": len(candidate.seeds),
        "score": interval.mean,
        metric.name: metric.shown(interval.mean),
        "low": low,
        "high": high,
        "untuned": metric.shown(candidate.untuned),
        **({"tuned_settings": candidate.tuned_settings} if candidate.tuned_settings else {}),
        f"val_{metric.name}": metric.shown(candidate.val_score),
    }
    metrics = _pooled(summary, candidate)
    line |= {key: x for key, x in metrics.items() if key not in ("loss", "ece", *line)}
    if summary.bench.from_splits and summary.folds > 1:
        parts = [summary.mean(candidate.scores[:, x], x) for x in summary.fold_slices]
        by_split = [metric.shown(score) for score in parts]
        line["mean_over_splits"] = float(np.mean(by_split))
        line["sd_over_splits"] = float(np.std(by_split, ddof=1))
    if summary.bench.scheme is None:
        once = torch.from_numpy(summary.first_tests)
        line |= _calibration(candidate.logits[:, once], summary.target[once])
        curves = [risk_coverage(x, summary.target).mean() for x in candidate.logits]
        line["aurc"] = float(np.mean(curves))
    return line


def _pooled(summary: Summary, candidate: CandidateResults) -> dict[str, float]:
    """Return each metric over the test samples of all folds together, averaged over seeds.

    Pooled, because a class that a fold tests on one or two samples has no F1 worth averaging
    (Forman and Scholz 2010); accuracy, its interval and calibration are pooled as well.
    """
    bench = summary.bench
    tasks = tasks_of(bench, bench.folds[0].train)  # metrics do not depend on the fold
    weights = bench.weights_of(summary.rows)
    by_seed = [all_metrics(tasks, x, summary.target, weights) for x in candidate.logits]
    return {key: float(np.mean([metrics[key] for metrics in by_seed])) for key in by_seed[0]}


def _calibration(logits: Tensor, target: Tensor) -> dict[str, Any]:
    """Return the calibration error over all test samples, of several folds too."""
    error = calibration_error(logits, target)
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


def _robustness(summary: Summary, candidate: CandidateResults) -> dict[str, float]:
    """Return areas under the score's curves: over missing rates, with its interval, and over
    severities by modality."""
    modalities, areas = list(summary.bench.modalities), {}
    shown = summary.bench.metric.shown
    by_sample = missing_area(candidate, modalities)
    if by_sample is not None:
        interval = summary.interval(by_sample)
        low, high = sorted((shown(interval.low), shown(interval.high)))
        areas = {"missing_area": shown(interval.mean)}
        areas |= {"missing_area_low": low, "missing_area_high": high}
    for modality in modalities:
        curves = corruption_curves(candidate, modality)
        if curves:
            at = severities(candidate)
            mean = float(np.mean([area(curve, at) for curve in curves.values()]))
            areas[f"damaged_{modality}_area"] = shown(mean)
    return areas


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of the leaderboard; left out if no line has its first key."""

    keys: tuple[str, ...]
    title: str
    text: Callable[..., str]  # of the values of the keys
    note: str = ""  # what the column shows, where the heading does not say it
    default: bool = True  # on the page; otherwise behind the switch "all columns"
    best: Literal["", "high", "low"] = ""  # which value a table for a paper shows in bold


def _p_value(p: float) -> str:
    return "<0.001" if p < 0.001 else f"{p:.3f}"


# Columns that are the same for every metric, by name.
COMMON = {
    "candidate": Column(keys=("candidate",), title="candidate", text=str),
    "p": Column(keys=("gain_p_holm",), title="p\u00a0(Holm)", text=_p_value),
    "over_splits": Column(
        keys=("mean_over_splits", "sd_over_splits"),
        title="over splits",
        text=lambda mean, sd: f"{decimal(mean)} ± {decimal(sd)}",
        note="mean ± standard deviation (n - 1) of the splits' figures, each a mean over seeds",
    ),
    "outcome": Column(keys=("outcome",), title="outcome", text=str),
    "family": Column(keys=("family",), title="family", text=str),
    "macro_f1": Column(keys=("macro_f1",), title="macro F1", text=decimal, best="high"),
    "ece": Column(keys=("ece",), title="ECE", text=decimal, best="low"),
    "ece_marked": Column(
        keys=("ece", "calibration"),
        title="ECE",
        text=lambda ece, words: decimal(ece) + (" *" if words == NOT_CALIBRATED else ""),
        note="expected calibration error; * not calibrated",
    ),
    "parameters": Column(keys=("parameters",), title="param\u00adeters", text=readable),
    "seconds": Column(keys=("seconds",), title="train s", text=lambda seconds: f"{seconds:.2f}"),
    "macs": Column(keys=("macs",), title="MACs", text=readable, default=False),
    "latency": Column(keys=("latency_ms",), title="latency ms", text=decimal, default=False),
    "speed": Column(
        keys=("samples_per_second",), title="samples/s", text="{:,.0f}".format, default=False
    ),
    "memory": Column(keys=("memory_mb",), title="memory MB", text=decimal, default=False),
    "ece_debiased": Column(
        keys=("ece_debiased",), title="ECE debiased", text=decimal, default=False
    ),
    "ece_if_calibrated": Column(
        keys=("ece_if_calibrated", "ece_limit"),
        title="ECE if calibrated",
        text=lambda mean, limit: f"{mean:.3f} (up to {limit:.3f})",
        default=False,
    ),
    "calibration": Column(keys=("calibration",), title="calibration", text=str, default=False),
    "tuned_settings": Column(
        keys=("tuned_settings",),
        title="tuned settings",
        text=str,
        note="what tuning chose, over the folds",
        default=False,
    ),
}


def columns(metric: str) -> dict[str, Column]:
    """Return all columns of a leaderboard that is ranked by `metric`, by name."""
    gain, points = metric_named(metric).difference, ", points" * metric_named(metric).share
    title = metric_name(metric)
    over_missing = f"{title} over missing rates from 0 to 0.9, averaged"
    best: Literal["high", "low"] = "high" if metric_named(metric).higher else "low"

    return COMMON | {
        "metric": Column(keys=(metric,), title=title, text=decimal, best=best),
        "interval": Column(
            keys=("low", "high"),
            title="95 %",
            text=lambda low, high: f"{decimal(low)} to {decimal(high)}",
            note=f"interval of the {title}",
        ),
        "untuned": Column(
            keys=("untuned",),
            title="untuned",
            text=decimal,
            note=f"{title} with default settings, of the same seeds",
        ),
        "gain": Column(
            keys=("gain_difference",),
            title=f"gain{points}",
            text=gain,
            note="over the best single modality",
        ),
        "gain_interval": Column(
            keys=("gain_low", "gain_high"),
            title="95 %",
            text=lambda low, high: f"{gain(low)} to {gain(high)}",
            note="interval of the gain",
        ),
        "gain_with_interval": Column(
            keys=("gain_difference", "gain_low", "gain_high"),
            title=f"gain over best single{points}",
            text=lambda value, low, high: f"{gain(value)} ({gain(low)} to {gain(high)})",
            best="high",
        ),
        "missing": Column(keys=("missing_area",), title="missing", text=decimal, note=over_missing),
    }


def present_columns(lines: Sequence[Line], metric: str, names: Sequence[str]) -> list[Column]:
    """Return those of the named columns that the lines have values for."""
    by_name = columns(metric)
    return [
        column
        for column in (by_name[name] for name in names)
        if any(_has_value(line.get(column.keys[0])) for line in lines)
    ]


def _other_numbers(lines: Sequence[Line], listed: Sequence[Column]) -> list[Column]:
    """Return a column for each number of the lines that no listed column shows."""
    covered = {key for column in listed for key in column.keys} | HIDDEN
    others = dict.fromkeys(
        key
        for line in lines
        for key, value in line.items()
        if key not in covered and isinstance(value, int | float) and not isinstance(value, bool)
    )
    return [
        Column(keys=(key,), title=metric_name(key), text=decimal, default=False)
        for key in others
        if any(_has_value(line.get(key)) for line in lines)
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


def page_table(lines: Sequence[Line], metric: str) -> tuple[list[Column], list[list[Cell]]]:
    """Return the columns of the page and the cells of each line; unlisted numbers come last."""
    by_name = columns(metric)
    shown = present_columns(lines, metric, PAGE)
    shown += _other_numbers(lines, [by_name[name] for name in PAGE])
    return shown, [[cell(column, line) for column in shown] for line in lines]


def text_table(
    lines: Sequence[Line], metric: str, names: Sequence[str] = TEXT
) -> tuple[list[str], list[list[str]]]:
    """Return the leaderboard as text: header and rows; by default the columns of `TEXT`."""
    shown = present_columns(lines, metric, names)
    header = [column.title.replace("\u00a0", " ") for column in shown]
    return header, [[cell(column, line).text for column in shown] for line in lines]


def paper_table(
    lines: Sequence[Line], metric: str
) -> tuple[list[str], list[list[str]], list[list[bool]]]:
    """Return header, rows and which cells are the best of their column."""
    shown = present_columns(lines, metric, TEXT)
    header, rows = text_table(lines, metric)
    return header, rows, [[_is_best(x, lines, column) for column in shown] for x in lines]


def _is_best(line: Line, lines: Sequence[Line], column: Column) -> bool:
    """Whether a line has the best value of a column, to the digits that the table shows."""
    key = column.keys[0]
    if not column.best or not _has_value(line.get(key)):
        return False
    values = [other[key] for other in lines if _has_value(other.get(key))]
    best = max(values) if column.best == "high" else min(values)
    return bool(decimal(best) == decimal(line[key]))


def _has_value(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and math.isnan(value))
