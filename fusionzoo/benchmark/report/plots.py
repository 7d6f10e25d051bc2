"""The plots of the report: each is drawn twice, for wide and for narrow screens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fusionzoo.evaluation.statistics import Ranking, cliques

from ..metric import metric_named
from ..strategies import ALONE
from .drawing import WIDE, Layout, drawn_twice, finish, panel_grid, row_axes
from .labels import label_points, log_ticks
from .svg import COLOURS, FAINT, INK
from .units import metric_name

FAMILY: dict[str, str] = dict(
    zip(("early", "late", "attention", "hybrid", "single", "baseline"), COLOURS, strict=True)
)
Curves = Mapping[str, Sequence[float]]  # strategy -> values


@drawn_twice("score of each strategy and its interval")
def intervals(
    layout: Layout, lines: Sequence[Mapping[str, Any]], single: float | None, metric: str
) -> Any:
    """Draw the score and its interval over seeds, a row per strategy, the best on top."""
    figure, axes = row_axes(layout, [line["strategy"] for line in lines])
    places = axes.get_yticks()
    scores = [line[metric] for line in lines]
    left = min(scores) - 0.1 * (max(scores) - min(scores) or 0.1)
    right = 1.0 if metric_named(metric).share else math.inf
    for place, line in zip(places, lines, strict=True):
        colour = _family_colour(line["family"])
        if not math.isnan(line["low"]):
            ends = np.clip([line["low"], line["high"]], left, right)
            axes.plot(ends, [place, place], color=colour, alpha=0.6)
        axes.plot(line[metric], place, "o", color=colour, markersize=4)
    if single is not None:
        axes.axvline(single, color=INK, linestyle=":", linewidth=1)
    axes.set_xlabel(f"{metric_name(metric)} on the test split")
    axes.set_xlim(left=left)
    for family in dict.fromkeys(line["family"] for line in lines):
        axes.plot([], [], "o", color=_family_colour(family), label=family, markersize=4)
    return finish(layout, figure)


@drawn_twice("average rank of each strategy")
def critical_difference(layout: Layout, names: Sequence[str], ranking: Ranking) -> Any:
    """Draw average ranks; a bar joins those that Nemenyi's test cannot tell apart."""
    order = np.argsort(ranking.ranks, kind="stable")
    figure, axes = row_axes(layout, [names[int(index)] for index in order])
    places = axes.get_yticks()
    axes.plot(ranking.ranks[order], places, "o", color=COLOURS[0], markersize=4)
    axes.set_xlabel("average rank (1 = best)")
    step = next(x for x in (1, 2, 5, 10, 20, 50) if len(names) / x <= layout.columns(12, 5))
    axes.set_xticks([1, *range(step if step > 1 else 2, len(names) + 1, step)])
    axes.set_xlim(left=1 - 0.03 * len(names))
    if not math.isnan(ranking.critical_difference):
        best, worst = float(ranking.ranks.min()), float(ranking.ranks.max())
        gap = (worst - best or 1.0) * (0.025 if layout is WIDE else 0.05)
        bars = cliques(ranking.ranks, ranking.critical_difference)
        for number, (first, last) in enumerate(bars):
            at = worst + gap * (number + 1.5)
            ends = [places[first] - 0.2, places[last] + 0.2]
            axes.plot([at, at], ends, color=COLOURS[1], linewidth=2.5)
    return finish(layout, figure)


@drawn_twice("score over the severity of corruptions")
def corruptions(
    layout: Layout,
    panels: Mapping[str, Mapping[str, Curves]],
    severities: Sequence[int],
    highlighted: Sequence[str],
    metric: str,
) -> Any:
    """Draw the score over severity: rows of panels for each modality, a panel per corruption."""
    most = max(len(by_corruption) for by_corruption in panels.values())
    columns = min(most, layout.columns(5, 2))
    slots: list[tuple[str, str] | None] = []
    for modality, by_corruption in panels.items():
        slots += [(modality, corruption) for corruption in by_corruption]
        slots += [None] * (-len(slots) % columns)
    figure, grid = panel_grid(layout, [slot is not None for slot in slots], columns)
    for axes, slot in zip(grid, slots, strict=True):
        if slot is not None:
            modality, corruption = slot
            _lines(axes, severities, panels[modality][corruption], highlighted)
            axes.set_title(f"{modality}: {corruption.replace('_', ' ')}")
            axes.set_xticks(severities)
    return finish(layout, figure, "severity", metric)


@drawn_twice("score over the share of missing values")
def missing(
    layout: Layout,
    panels: Mapping[str, Curves],
    rates: Sequence[float],
    highlighted: Sequence[str],
    metric: str,
) -> Any:
    """Draw the expected score over the share of samples that lack a modality."""
    columns = min(len(panels), layout.columns(4, 2))
    figure, grid = panel_grid(layout, [True] * len(panels), columns)
    for axes, (name, curves) in zip(grid, panels.items(), strict=False):
        _lines(axes, rates, curves, highlighted)
        axes.set_title(name)
        axes.locator_params("x", nbins=4)
    return finish(layout, figure, "missing rate", metric)


@drawn_twice("reliability, and error over coverage")
def calibration(
    layout: Layout, bins: Mapping[str, Sequence[tuple[float, float, int]]], risks: Curves
) -> Any:
    """Draw the reliability diagram and the risk-coverage curve."""
    figure, (left, right) = panel_grid(layout, [True, True], layout.columns(2, 1), share=False)
    left.plot([0, 1], [0, 1], color=INK, linestyle=":", linewidth=1)
    for colour, (name, lines) in zip(COLOURS, bins.items(), strict=False):
        confidence, accuracy, size = (np.array(x) for x in zip(*lines, strict=True))
        left.plot(confidence, accuracy, color=colour, linewidth=0.8, label=name)
        left.scatter(confidence, accuracy, 2 + 60 * size / size.sum(), color=colour)
    left.set(xlabel="confidence", ylabel="accuracy", title="reliability", xlim=(0, 1), ylim=(0, 1))
    for colour, risk in zip(COLOURS, risks.values(), strict=False):
        coverage = (np.arange(len(risk)) + 1) / len(risk)
        shown = np.unique(np.linspace(0, len(risk) - 1, 150).astype(int))
        right.plot(coverage[shown], np.asarray(risk)[shown], color=colour)
    right.set(xlabel="coverage", ylabel="error on covered samples", title="risk and coverage")
    return finish(layout, figure)


@drawn_twice("score over cost")
def pareto(
    layout: Layout,
    panels: Mapping[str, Mapping[str, tuple[float, float]]],
    fronts: Mapping[str, Sequence[str]],
    families: Mapping[str, str],
    metric: str,
) -> Any:
    """Draw the score over cost; the points of the Pareto front are labelled."""
    columns = min(len(panels), layout.columns(2, 1))
    figure, grid = panel_grid(layout, [True] * len(panels), columns)
    for axes, (cost, points) in zip(grid, panels.items(), strict=False):
        for name, (x, y) in points.items():
            axes.plot(x, y, "o", color=_family_colour(families[name]), markersize=4)
        front = [points[name] for name in fronts[cost]]
        axes.plot(*zip(*front, strict=True), color=INK, linewidth=0.8, drawstyle="steps-post")
        axes.set(xscale="log", xlabel=cost)
        axes.margins(x=0.15, y=0.1)
        log_ticks(axes.xaxis, *axes.get_xlim())
    for family in dict.fromkeys(families.values()):
        grid[0].plot([], [], "o", color=_family_colour(family), label=family, markersize=4)
    finish(layout, figure, y=metric)
    for axes, (cost, points) in zip(grid, panels.items(), strict=False):
        label_points(axes, {name: points[name] for name in fronts[cost]}, points.values())
    return figure


# ---- shared by all plots


def _family_colour(family: str) -> str:
    return FAMILY.get(family, INK)


def _lines(axes: Any, x: Sequence[float], curves: Curves, highlighted: Sequence[str]) -> None:
    """Draw the highlighted curves in colour over all others, which are one grey path."""
    others = [values for name, values in curves.items() if name not in highlighted]
    if others:
        y = [value for values in others for value in (*values, math.nan)]
        axes.plot([*x, math.nan] * len(others), y, color=FAINT, linewidth=0.6)
    for number, name in enumerate(highlighted):
        if name in curves and name.startswith(ALONE):
            axes.plot(x, curves[name], "--", color=INK, label=name)
        elif name in curves:
            axes.plot(x, curves[name], color=COLOURS[number % len(COLOURS)], label=name)
