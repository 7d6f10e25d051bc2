"""The plots of the report: SVG from matplotlib, in the light or dark colours of the page."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import numpy as np

from fusionzoo.evaluation.robustness import SEVERITIES
from fusionzoo.evaluation.statistics import Ranking, cliques

INK = "#010203"  # placeholder of the page's text colour
FAINT = "#b4b4b4"
# Okabe and Ito's palette, which colour-blind readers can distinguish.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
FAMILY = dict(
    zip(("early", "late", "attention", "hybrid", "single", "baseline"), COLOURS, strict=True)
)
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fusionzoo",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "axes.grid": True,
    "grid.color": FAINT,
    "grid.alpha": 0.35,
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.4,
    "legend.frameon": False,
    "legend.fontsize": 8,
}
Curves = Mapping[str, Sequence[float]]  # strategy -> values


def _styled(draw: Callable[..., str]) -> Callable[..., str]:
    """Apply the report's style to a plotting function."""

    @wraps(draw)
    def draw_styled(*args: Any, **kwargs: Any) -> str:
        import matplotlib

        with matplotlib.rc_context(STYLE):
            return draw(*args, **kwargs)

    return draw_styled


@_styled
def intervals(lines: Sequence[Mapping[str, Any]], single: float | None) -> str:
    """Draw accuracy and its interval over seeds, a row per strategy, the best on top."""
    figure, grid = _grid(1, 1, 8.0, 0.4 + 0.2 * len(lines))
    axes = grid[0][0]
    for row, line in enumerate(reversed(lines)):
        colour = FAMILY[line["family"]]
        if not math.isnan(line["low"]):
            axes.plot([line["low"], line["high"]], [row, row], color=colour, alpha=0.6)
        axes.plot(line["accuracy"], row, "o", color=colour, markersize=4)
    if single is not None:
        axes.axvline(single, color=INK, linestyle=":", linewidth=1)
    axes.set_yticks(range(len(lines)), [line["strategy"] for line in reversed(lines)])
    axes.set_ylim(-0.6, len(lines) - 0.4)
    axes.set_xlabel("accuracy on the test split")
    low = min(line["accuracy"] for line in lines)
    axes.set_xlim(left=max(0.0, low - 0.05), right=min(1.005, axes.get_xlim()[1]))
    for family in dict.fromkeys(line["family"] for line in lines):
        axes.plot([], [], "o", color=FAMILY[family], label=family, markersize=4)
    return _finish(figure, grid)


@_styled
def critical_difference(names: Sequence[str], ranking: Ranking) -> str:
    """Draw average ranks; a bar joins those that Nemenyi's test cannot tell apart."""
    order = np.argsort(ranking.ranks, kind="stable")
    figure, grid = _grid(1, 1, 8.0, 0.6 + 0.2 * len(names))
    axes = grid[0][0]
    for place, index in enumerate(order):
        axes.plot(ranking.ranks[index], place, "o", color=COLOURS[0], markersize=4)
    axes.set_yticks(range(len(names)), [names[index] for index in order])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlabel("average rank (1 = best)")
    if not math.isnan(ranking.critical_difference):
        worst = float(ranking.ranks.max())
        for number, (first, last) in enumerate(cliques(ranking.ranks, ranking.critical_difference)):
            at = worst + 0.6 + 0.35 * number * max(1.0, len(names) / 20)
            axes.plot([at, at], [first - 0.2, last + 0.2], color=COLOURS[1], linewidth=2.5)
    return _finish(figure, grid)


@_styled
def corruptions(panels: Mapping[str, Mapping[str, Curves]], highlighted: Sequence[str]) -> str:
    """Draw accuracy over severity: a row per modality, a column per corruption."""
    columns = max(len(row) for row in panels.values())
    figure, grid = _grid(len(panels), columns, 1.9, 1.7)
    for row, (modality, by_corruption) in enumerate(panels.items()):
        for column in range(columns):
            axes = grid[row][column]
            if column >= len(by_corruption):
                axes.set_visible(False)
                continue
            name = list(by_corruption)[column]
            _lines(axes, [0, *SEVERITIES], by_corruption[name], highlighted)
            axes.set_title(f"{modality}: {name.replace('_', ' ')}")
            axes.set_xticks([0, *SEVERITIES])
    return _finish(figure, grid, "severity", "accuracy")


@_styled
def missing(
    panels: Mapping[str, Curves], rates: Sequence[float], highlighted: Sequence[str]
) -> str:
    """Draw the expected accuracy over the share of samples that lack a modality."""
    figure, grid = _grid(1, len(panels), 2.4, 2.2)
    for axes, (name, curves) in zip(grid[0], panels.items(), strict=True):
        _lines(axes, rates, curves, highlighted)
        axes.set_title(name)
    return _finish(figure, grid, "missing rate", "accuracy")


@_styled
def calibration(bins: Mapping[str, Sequence[tuple[float, float, int]]], risks: Curves) -> str:
    """Draw the reliability diagram and the risk-coverage curve."""
    figure, grid = _grid(1, 2, 4.2, 3.2, share=False)
    left, right = grid[0]
    left.plot([0, 1], [0, 1], color=INK, linestyle=":", linewidth=1)
    for colour, (name, lines) in zip(COLOURS, bins.items(), strict=False):
        confidence, accuracy, size = (np.array(x) for x in zip(*lines, strict=True))
        left.plot(confidence, accuracy, color=colour, linewidth=0.8, label=name)
        left.scatter(confidence, accuracy, 2 + 60 * size / size.sum(), color=colour)
    left.set(xlabel="confidence", ylabel="accuracy", title="reliability", xlim=(0, 1), ylim=(0, 1))
    for colour, risk in zip(COLOURS, risks.values(), strict=False):
        coverage = (np.arange(len(risk)) + 1) / len(risk)
        right.plot(coverage, risk, color=colour)
    right.set(xlabel="coverage", ylabel="error on covered samples", title="risk and coverage")
    return _finish(figure, grid)


@_styled
def pareto(
    panels: Mapping[str, Mapping[str, tuple[float, float]]],
    fronts: Mapping[str, Sequence[str]],
    families: Mapping[str, str],
) -> str:
    """Draw accuracy over cost; the points of the Pareto front are labelled."""
    figure, grid = _grid(1, len(panels), 4.2, 3.2)
    for axes, (cost, points) in zip(grid[0], panels.items(), strict=True):
        for name, (x, y) in points.items():
            axes.plot(x, y, "o", color=FAMILY[families[name]], markersize=4)
        front = [points[name] for name in fronts[cost]]
        axes.plot(*zip(*front, strict=True), color=INK, linewidth=0.8, drawstyle="steps-post")
        for name in fronts[cost]:
            axes.annotate(
                name, points[name], xytext=(3, -9), textcoords="offset points", fontsize=7
            )
        axes.set(xscale="log", xlabel=cost)
        axes.margins(x=0.15)
    return _finish(figure, grid, y="accuracy")


# ---- shared by all plots


def _lines(axes: Any, x: Sequence[float], curves: Curves, highlighted: Sequence[str]) -> None:
    for name, values in curves.items():
        if name not in highlighted:
            axes.plot(x, values, color=FAINT, linewidth=0.5, alpha=0.6)
    for number, name in enumerate(highlighted):
        if name in curves:
            style = "--" if name.startswith("alone:") else "-"
            axes.plot(x, curves[name], style, color=COLOURS[number % len(COLOURS)], label=name)


def _grid(
    rows: int, columns: int, width: float, height: float, share: bool = True
) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure((width * columns, height * rows))
    return figure, figure.subplots(rows, columns, sharey=share, squeeze=False)


def _finish(figure: Any, grid: Any, x: str | None = None, y: str | None = None) -> str:
    """Label the outer axes, put one legend above all panels, and return the SVG."""
    for axes in grid[-1] if x else ():
        axes.set_xlabel(x)
    for row in grid if y else ():
        row[0].set_ylabel(y)
    handles: dict[str, Any] = {}
    for axes in grid.flat:
        handles |= {
            text: line for line, text in zip(*axes.get_legend_handles_labels(), strict=True)
        }
    columns = max(1, int(figure.get_figwidth() / 1.2))
    room = 0.1 + 0.2 * math.ceil(len(handles) / columns)
    figure.set_figheight(figure.get_figheight() + room)
    figure.tight_layout(rect=(0, 0, 1, 1 - room / figure.get_figheight()))
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="upper left", ncols=columns)
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    # As wide as the page allows, but not enlarged: text has the same size in all plots.
    inches = figure.get_figwidth()
    width = f'style="max-width: {inches:.1f}in; min-width: min(34rem, {inches:.1f}in)"'
    return re.sub(r'(<svg[^>]*?) width="[\d.]+pt" height="[\d.]+pt"', rf"\1 {width}", text, count=1)
