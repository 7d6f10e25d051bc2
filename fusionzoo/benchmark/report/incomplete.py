"""Strategies trained with modalities removed or damaged, beside the same ones on whole samples."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fusionzoo.evaluation.statistics import Interval

from ..strategies import parse
from .curves import lost_area, missing_area
from .results import StrategyResults, Summary
from .units import decimal, metric_name

MISSING, LOST = "missing", "lost parts"
DROPOUT = "modality_dropout"  # the training strategy that removes modalities


def incomplete(summary: Summary) -> dict[str, Any] | None:
    """Return the table of these strategies: score and areas, and their change, with intervals.

    A change is paired: against the same strategy trained on whole samples without a training
    strategy. None: no strategy was trained for missing or damaged modalities.
    """
    trained = [parse(strategy.name) for strategy in summary.strategies]
    bases = dict.fromkeys(x.base for x in trained if x.incomplete or DROPOUT in x.balance)
    whole = {s.name: s for s in summary.strategies if s.name in bases}
    strategies = [
        strategy
        for base in bases
        for strategy in summary.strategies
        if strategy.kind != "baseline" and parse(strategy.name).base == base
    ]
    if not strategies:
        return None
    metric = metric_name(summary.bench.metric.name)
    titles = [
        metric,
        *(x for x in (MISSING, LOST) if any(x in _scores(summary, s) for s in strategies)),
    ]
    rows, numbers = [], []
    for strategy in strategies:
        intervals = _intervals(summary, strategy)
        changes = _changes(summary, strategy, whole.get(parse(strategy.name).base))
        rows.append(
            [
                strategy.name,
                *(_value(summary, intervals.get(title)) for title in titles),
                *(_change(summary, changes.get(title)) for title in titles),
            ]
        )
        both = [x.get(title) for x in (intervals, changes) for title in titles]
        numbers.append([strategy.name, *(x for interval in both for x in interval or ("",) * 3)])
    changed = [f"change of {title}" for title in titles]
    ends = [f"{title}{end}" for title in (*titles, *changed) for end in ("", " low", " high")]
    return {
        "header": ["strategy", *titles, *changed],
        "rows": rows,
        "table": (["strategy", *ends], numbers),
    }


def _scores(summary: Summary, strategy: StrategyResults) -> dict[str, NDArray[np.float64]]:
    """Return by title the scores (S, N) of samples, and their areas under both curves."""
    modalities = list(summary.bench.modalities)
    scores = {
        metric_name(summary.bench.metric.name): strategy.scores,
        MISSING: missing_area(strategy, modalities),
        LOST: lost_area(strategy, modalities),
    }
    return {title: x for title, x in scores.items() if x is not None}


def _intervals(summary: Summary, strategy: StrategyResults) -> dict[str, Interval]:
    return {
        title: summary.interval(scores, damaged=title == LOST)
        for title, scores in _scores(summary, strategy).items()
    }


def _changes(
    summary: Summary, strategy: StrategyResults, whole: StrategyResults | None
) -> dict[str, Interval]:
    if whole is None or whole is strategy:
        return {}
    before = _scores(summary, whole)
    return {
        title: summary.interval(scores - before[title], damaged=title == LOST)
        for title, scores in _scores(summary, strategy).items()
        if title in before
    }


def _value(summary: Summary, interval: Interval | None) -> str:
    if interval is None:
        return ""
    shown = summary.bench.metric.shown
    low, high = sorted((shown(interval.low), shown(interval.high)))
    return f"{decimal(shown(interval.mean))} ({decimal(low)} to {decimal(high)})"


def _change(summary: Summary, interval: Interval | None) -> str:
    if interval is None:
        return ""
    mean, low, high = map(summary.bench.metric.difference, interval)
    return f"{mean} ({low} to {high})"
