"""The plots of the report, each one SVG for narrow and wide screens, and a PDF file on request."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from html import escape
from textwrap import wrap
from typing import Any, ParamSpec

import numpy as np

from fusionzoo.evaluation.metrics import metric_name
from fusionzoo.evaluation.statistics import Ranking, cliques

from ..bench import metric_named
from ..candidates import ALONE
from .results import readable

INK, FAINT = "#010203", "#b4b4b4"  # text and axes; grid and curves in the background
# Four of Okabe and Ito's colours, which colour-blind readers can distinguish, and two darker ones.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b87a00", "#7a5bc4")
VARIABLES = {  # plots.html defines them for light and dark pages
    INK: "currentColor",
    FAINT: "var(--faint)",
    **{colour: f"var(--c{number})" for number, colour in enumerate(COLOURS)},
}
FONT_SIZE = 9.0  # of all text, in units of the drawing; `.plot text` in plots.html
TAG = re.compile(r"<[^>]*>")
LONGEST = 19  # characters in a line of a name beside a point
DOT = 3.0  # half the width of a dot, with a margin
# Places for a name: offset from the point in points, and the side of the name that is there.
OFFSETS = [
    (x, y, side)
    for distance in range(0, 40, 10)
    for x, side in ((5, "left"), (-5, "right"))
    for y in (1 + distance, -12 - distance)
]
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fusionzoo",
    "pdf.fonttype": 42,  # TrueType: some publishers refuse Type 3
    "path.simplify": False,
    "font.family": "sans-serif",
    "font.size": FONT_SIZE,
    "text.color": INK,
    "text.parse_math": False,  # names may hold dollar signs
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.major.pad": 6,  # so that the labels at the origin do not collide
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": FONT_SIZE,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.5,
    "grid.alpha": 0.5,
    "lines.linewidth": 1.4,
    "legend.frameon": False,
    "legend.fontsize": FONT_SIZE,
}
WIDTH = 4.4  # inches of every figure: on a screen of 390 pixels text is 10 pixels high
LABEL = 24  # most characters in a line of a candidate's name at an axis
COLUMNS = 2  # panels in a row
MOST_TICKS = 5  # of a logarithmic axis
ROW = 0.2  # height of a line of text, inches
LETTER = 0.075  # width of most letters, inches
P = ParamSpec("P")
PDF_FILES: ContextVar[dict[str, bytes] | None] = ContextVar("figures as PDF", default=None)
FAMILY: dict[str, str] = dict(
    zip(("early", "late", "attention", "hybrid", "single", "baseline"), COLOURS, strict=True)
)
Curves = Mapping[str, Sequence[float]]  # candidate -> values


def to_svg(figure: Any, title: str, prefix: str) -> str:
    """Return matplotlib's SVG of a figure with colours and font of the page, and ids that differ.

    Ids start with `prefix`; coordinates have one decimal.
    """
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    for artist in figure.findobj():
        artist.set_clip_on(False)
    for part in (figure, *figure.axes):
        part.patch.set_visible(False)
    out = io.StringIO()
    # Not figure.savefig, which draws everything twice.
    FigureCanvasSVG(figure).print_svg(out, metadata={"Date": None})
    changes: list[tuple[str, Any]] = [
        (r'xlink:|(?<=<g) id="[^"]*"|font[^:;]*: [^;]*; | transform="rotate\(-0 [^"]*"', ""),
        (r'(?<=href="#)|(?<=id=")', prefix),
        (r"\d+\.\d+", lambda number: f"{round(float(number[0]), 1):g}"),
        *VARIABLES.items(),
    ]

    def of_page(tag: re.Match[str]) -> str:
        text = tag[0]
        for pattern, new in changes:
            text = re.sub(pattern, new, text)
        return text

    width, height = (round(72 * float(inches), 1) for inches in figure.get_size_inches())
    content = re.sub(r"\s*\n\s*", "", out.getvalue())
    content = TAG.sub(of_page, content[content.index('<g id="figure_') :])
    head = f'<svg class="plot" role="img" aria-label="{escape(title)}"'
    return f'{head} viewBox="0 0 {width:g} {height:g}">{content}'


def tick_values(low: float, high: float) -> list[float]:
    """Return round numbers from low to high for a logarithmic axis.

    >>> tick_values(80, 3000), tick_values(1, 1e8)
    ([100.0, 200.0, 500.0, 1000.0, 2000.0], [1.0, 100.0, 10000.0, 1000000.0, 100000000.0])
    """
    from matplotlib.ticker import MaxNLocator

    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    values: list[float] = []
    for steps in ((1, 2, 5), (1, 3), (1,)):
        values = [step * 10.0**decade for decade in decades for step in steps]
        values = [value for value in values if low <= value <= high]
        if len(values) <= MOST_TICKS:
            break
    if len(values) < 2:
        ticks = MaxNLocator(MOST_TICKS - 1).tick_values(low, high)
        return [float(value) for value in ticks if low <= value <= high]
    return values[:: math.ceil(len(values) / MOST_TICKS)]


def label_points(
    axes: Any, names: Mapping[str, tuple[float, float]], dots: Iterable[tuple[float, float]]
) -> None:
    """Write names beside their points, except those for which there is no room.

    Names cover no other name and no dot; only the first and the last may cover dots. The figure's
    layout must be final.
    """
    from matplotlib.transforms import Bbox

    point = axes.figure.dpi / 72
    left, bottom, right, top = axes.get_window_extent().extents
    frame = Bbox.from_extents(left, bottom, right, top + FONT_SIZE * point)
    centres = axes.transData.transform([*dots])
    around = [Bbox([xy, xy]).padded(DOT * point) for xy in centres]
    taken: list[Bbox] = []
    for order, name in enumerate([*list(names)[:1], *list(names)[:0:-1]]):
        text = axes.annotate(
            break_name(name, LONGEST), names[name], (0, 0), textcoords="offset points", va="bottom"
        )
        free = []
        for number, (x, y, side) in enumerate(OFFSETS):
            text.set(position=(x, y), ha=side)
            box = text.get_window_extent().padded(point)
            inside = all(frame.contains(*corner) for corner in box.get_points())
            if inside and not box.count_overlaps(taken):
                free.append((box.count_overlaps(around), number, box))
        if not free or (order > 1 and min(free)[0]):
            text.remove()
            continue
        _, number, box = min(free)
        taken.append(box)
        x, y, side = OFFSETS[number]
        text.set(position=(x, y), ha=side)
        if abs(y) > 12:  # far away: a thin line leads there
            line = {"arrowstyle": "-", "linewidth": 0.4, "color": INK}
            axes.annotate("", names[name], (x, y), textcoords="offset points", arrowprops=line)


def break_name(name: str, most: int) -> str:
    """Break a long name into lines of at most `most` characters, after spaces and underscores.

    >>> break_name("late_confidence + multimodal_balance", 19).split("\\n")
    ['late_confidence +', 'multimodal_balance']
    """
    lines = wrap(name.replace("_", "_ "), most)
    return "\n".join(lines).replace("_ ", "_")


@contextmanager
def pdf_files(wanted: bool) -> Iterator[dict[str, bytes]]:
    """Yield a dict that gets every figure drawn meanwhile as a PDF file, by its path, if wanted."""
    files: dict[str, bytes] = {}
    token = PDF_FILES.set(files if wanted else None)
    try:
        yield files
    finally:
        PDF_FILES.reset(token)


def pdf(figure: Any) -> bytes:
    """Return a figure as a PDF file without a date: the same figure has the same bytes."""
    from matplotlib.backends.backend_pdf import FigureCanvasPdf

    file = io.BytesIO()
    FigureCanvasPdf(figure).print_pdf(file, metadata={"CreationDate": None})
    return file.getvalue()


def render(draw: Callable[[], Any], name: str, title: str) -> str:
    """Draw a figure and return it as an SVG element; every figure of a page passes here."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        figure = draw()
        svg = to_svg(figure, title, f"{name}-")
        if (files := PDF_FILES.get()) is not None:
            files[f"figures/{name}.pdf"] = pdf(figure)
        return svg


def rendered(title: str) -> Callable[[Callable[P, Any]], Callable[P, str]]:
    """Let a function that draws a figure return it as an SVG element, see `render`."""

    def decorate(draw: Callable[P, Any]) -> Callable[P, str]:
        @wraps(draw)
        def as_svg(*args: P.args, **kwargs: P.kwargs) -> str:
            return render(lambda: draw(*args, **kwargs), draw.__name__, title)

        return as_svg

    return decorate


def row_axes(names: Sequence[str]) -> tuple[Any, Any]:
    """Return a figure with a row for each name; long names are broken into lines."""
    from matplotlib.figure import Figure

    labels = [break_name(name, LABEL) for name in names]
    heights = np.array([1 + 0.75 * label.count("\n") for label in labels])
    places = np.cumsum(heights) - heights / 2
    figure = Figure((WIDTH, 0.6 + ROW * float(heights.sum())))
    axes = figure.subplots()
    axes.set_yticks(places, labels)
    axes.set_ylim(float(heights.sum()) + 0.1, -0.1)
    axes.locator_params("x", nbins=5)
    return figure, axes


def panel_grid(
    used: Sequence[bool], height: float, *, columns: int = COLUMNS, share: bool = True
) -> tuple[Any, Any]:
    """Return a figure with panels of a height in inches; those that are not used are left empty."""
    from matplotlib.figure import Figure

    columns = min(len(used), columns)
    rows = math.ceil(len(used) / columns)
    figure = Figure((WIDTH, height * rows))
    grid = figure.subplots(rows, columns, sharey=share, squeeze=False).flatten()
    for axes, is_used in zip(grid, [*used, *[False] * (len(grid) - len(used))], strict=True):
        axes.set_visible(is_used)
    return figure, grid


def finish(figure: Any, x: str | None = None, y: str | None = None) -> Any:
    """Label the outer axes, break long titles and labels, and put one legend above all panels."""
    panels = [axes for axes in figure.axes if axes.get_visible()]
    handles: dict[str, Any] = {}
    columns = figure.axes[0].get_gridspec().ncols
    for number, axes in enumerate(figure.axes):
        below = figure.axes[number + columns : number + columns + 1]
        if x and not any(panel.get_visible() for panel in below):
            axes.set_xlabel(x)
    for axes in panels:
        if y and axes.get_subplotspec().is_first_col():
            axes.set_ylabel(metric_name(y))
        longest = 2 * LABEL // columns
        axes.set_title(break_name(axes.get_title(), longest))
        axes.set_xlabel(break_name(axes.get_xlabel(), longest))
        lines, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(labels, lines, strict=True))
    figure.tight_layout()
    if handles:
        widest = 0.62 + LETTER * max(map(len, handles))
        columns = min(max(1, int(WIDTH / widest)), len(handles))
        _make_room_above(figure, 0.1 + ROW * math.ceil(len(handles) / columns))
        figure.legend(handles.values(), handles.keys(), loc="upper left", ncols=columns)
    return figure


def _make_room_above(figure: Any, room: float) -> None:
    """Make a figure higher by some inches, all panels as large as they were.

    `tight_layout(rect=...)` would do it as well, and measure all text twice.
    """
    height, edges = figure.get_figheight(), figure.subplotpars
    share = height / (height + room)
    figure.set_figheight(height + room)
    figure.subplots_adjust(top=edges.top * share, bottom=edges.bottom * share)


@rendered("score of each candidate and its interval")
def intervals(lines: Sequence[Mapping[str, Any]], single: float | None, metric: str) -> Any:
    """Draw the score and its interval over seeds, a row per candidate, the best on top."""
    figure, axes = row_axes([line["candidate"] for line in lines])
    places = axes.get_yticks()
    scores = [line[metric] for line in lines if not math.isnan(line[metric])] or [0.0]
    left = min(scores) - 0.1 * (max(scores) - min(scores) or 0.1)
    right = 1.0 if metric_named(metric).share else math.inf
    for place, line in zip(places, lines, strict=True):
        colour = _family_colour(line["family"])
        if not math.isnan(line["low"]):
            ends = np.clip([line["low"], line["high"]], left, right)
            axes.plot(ends, [place, place], color=colour, alpha=0.6)
        axes.plot(line[metric], place, "o", color=colour, markersize=4)
    if single is not None and not math.isnan(single):
        axes.axvline(single, color=INK, linestyle=":", linewidth=1)
    axes.set_xlabel(f"{metric_name(metric)} on the test split")
    axes.set_xlim(left=left)
    for family in dict.fromkeys(line["family"] for line in lines):
        axes.plot([], [], "o", color=_family_colour(family), label=family, markersize=4)
    return finish(figure)


@rendered("average rank of each candidate")
def critical_difference(names: Sequence[str], ranking: Ranking) -> Any:
    """Draw average ranks; a bar joins those that Nemenyi's test cannot tell apart."""
    order = np.argsort(ranking.ranks, kind="stable")
    figure, axes = row_axes([names[int(index)] for index in order])
    places = axes.get_yticks()
    axes.plot(ranking.ranks[order], places, "o", color=COLOURS[0], markersize=4)
    axes.set_xlabel("average rank (1 = best)")
    step = next(x for x in (1, 2, 5, 10, 20, 50) if len(names) / x <= 6)
    axes.set_xticks([1, *range(step if step > 1 else 2, len(names) + 1, step)])
    axes.set_xlim(left=1 - 0.03 * len(names))
    if not math.isnan(ranking.critical_difference):
        best, worst = float(ranking.ranks.min()), float(ranking.ranks.max())
        gap = (worst - best or 1.0) * 0.05
        bars = cliques(ranking.ranks, ranking.critical_difference)
        for number, (first, last) in enumerate(bars):
            at = worst + gap * (number + 1.5)
            ends = [places[first] - 0.2, places[last] + 0.2]
            axes.plot([at, at], ends, color=COLOURS[1], linewidth=2.5)
    return finish(figure)


@rendered("score over the severity of corruptions")
def corruptions(
    panels: Mapping[str, Mapping[str, Curves]],
    severities: Sequence[int],
    highlighted: Sequence[str],
    metric: str,
) -> Any:
    """Draw the score over severity: rows of panels for each modality, a panel per corruption."""
    columns = min(max(len(by_corruption) for by_corruption in panels.values()), COLUMNS)
    slots: list[tuple[str, str] | None] = []
    for modality, by_corruption in panels.items():
        slots += [(modality, corruption) for corruption in by_corruption]
        slots += [None] * (-len(slots) % columns)
    figure, grid = panel_grid([slot is not None for slot in slots], 1.6, columns=columns)
    for axes, slot in zip(grid, slots, strict=True):
        if slot is not None:
            modality, corruption = slot
            _lines(axes, severities, panels[modality][corruption], highlighted)
            axes.set_title(f"{modality}: {corruption.replace('_', ' ')}")
            axes.set_xticks(severities)
    return finish(figure, "severity", metric)


@rendered("score over the share of missing values")
def missing(
    panels: Mapping[str, Curves], rates: Sequence[float], highlighted: Sequence[str], metric: str
) -> Any:
    """Draw the expected score over the share of samples that lack a modality."""
    figure, grid = panel_grid([True] * len(panels), 1.6)
    for axes, (name, curves) in zip(grid, panels.items(), strict=False):
        _lines(axes, rates, curves, highlighted)
        axes.set_title(name)
        axes.locator_params("x", nbins=4)
    return finish(figure, "missing rate", metric)


@rendered("reliability, and error over coverage")
def calibration(bins: Mapping[str, Sequence[tuple[float, float, int]]], risks: Curves) -> Any:
    """Draw the reliability diagram and the risk-coverage curve."""
    figure, (left, right) = panel_grid([True, True], 2.4, share=False)
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
    return finish(figure)


@rendered("score over cost")
def pareto(
    panels: Mapping[str, Mapping[str, tuple[float, float]]],
    fronts: Mapping[str, Sequence[str]],
    families: Mapping[str, str],
    metric: str,
) -> Any:
    """Draw the score over cost; the points of the Pareto front are labelled."""
    figure, grid = panel_grid([True] * len(panels), 2.1, columns=1)
    for axes, (cost, points) in zip(grid, panels.items(), strict=False):
        for name, (x, y) in points.items():
            axes.plot(x, y, "o", color=_family_colour(families[name]), markersize=4)
        front = [points[name] for name in fronts[cost]]
        axes.plot(*zip(*front, strict=True), color=INK, linewidth=0.8, drawstyle="steps-post")
        axes.set(xscale="log", xlabel=cost)
        axes.margins(x=0.15, y=0.1)
        values = tick_values(*axes.get_xlim())
        axes.set_xticks(values, [readable(x) if x >= 1000 else f"{x:g}" for x in values])
        axes.set_xticks([], minor=True)
    for family in dict.fromkeys(families.values()):
        grid[0].plot([], [], "o", color=_family_colour(family), label=family, markersize=4)
    finish(figure, y=metric)
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
