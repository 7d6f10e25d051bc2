"""What all plots share: style, the two widths, panels in a grid, the legend."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec

import numpy as np

from .labels import break_name, text_width
from .svg import FAINT, FONT_SIZE, GRID_WIDTH, INK, to_svg
from .units import metric_name

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fusionzoo",
    "path.simplify": False,
    "font.family": "sans-serif",
    "font.size": FONT_SIZE,
    "text.color": INK,
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
    "grid.linewidth": GRID_WIDTH,
    "lines.linewidth": 1.4,
    "legend.frameon": False,
    "legend.fontsize": FONT_SIZE,
}
ROW = 0.2  # height of a line of text, inches
P = ParamSpec("P")


class Layout(NamedTuple):
    """A width to draw for."""

    name: str  # CSS class of the drawing
    width: float  # inches
    label: int  # most characters in a line of a strategy's name

    def columns(self, wide: int, narrow: int) -> int:
        """Return the number of panels in a row."""
        return narrow if self is NARROW else wide


WIDE = Layout("plot wide", 9.2, 36)
NARROW = Layout("plot narrow", 3.7, 19)  # on a screen of 390 pixels text is 12 pixels high


def drawn_twice(
    title: str,
) -> Callable[[Callable[Concatenate[Layout, P], Any]], Callable[P, str]]:
    """Draw for wide and narrow screens; the page's CSS shows one of the two."""

    def decorate(draw: Callable[Concatenate[Layout, P], Any]) -> Callable[P, str]:
        @wraps(draw)
        def drawn(*args: P.args, **kwargs: P.kwargs) -> str:
            import matplotlib

            with matplotlib.rc_context(STYLE):
                return "\n".join(
                    to_svg(
                        draw(layout, *args, **kwargs),
                        title,
                        layout.name,
                        f"{draw.__name__}-{layout.name[5]}",
                    )
                    for layout in (WIDE, NARROW)
                )

        return drawn

    return decorate


def row_axes(layout: Layout, names: Sequence[str]) -> tuple[Any, Any]:
    """Return a figure with a row for each name; long names are broken into lines."""
    from matplotlib.figure import Figure

    labels = [break_name(name, layout.label) for name in names]
    heights = np.array([1 + 0.75 * label.count("\n") for label in labels])
    places = np.cumsum(heights) - heights / 2
    figure = Figure((layout.width, 0.6 + ROW * float(heights.sum())))
    axes = figure.subplots()
    axes.set_yticks(places, labels)
    axes.set_ylim(float(heights.sum()) + 0.1, -0.1)
    axes.locator_params("x", nbins=layout.columns(9, 4))
    return figure, axes


def panel_grid(
    layout: Layout, used: Sequence[bool], columns: int, share: bool = True
) -> tuple[Any, Any]:
    """Return a figure with panels, `columns` in a row, those that are not used left empty."""
    from matplotlib.figure import Figure

    rows = math.ceil(len(used) / columns)
    width = layout.width / columns
    height = min(3.2, 0.5 + 0.75 * width)
    figure = Figure((layout.width, height * rows))
    grid = figure.subplots(rows, columns, sharey=share, squeeze=False).flatten()
    for axes, is_used in zip(grid, [*used, *[False] * (len(grid) - len(used))], strict=True):
        axes.set_visible(is_used)
    return figure, grid


def finish(layout: Layout, figure: Any, x: str | None = None, y: str | None = None) -> Any:
    """Label the outer axes and put one legend above all panels."""
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
        lines, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(labels, lines, strict=True))
    widest = 0.5 + max(map(text_width, handles), default=0.0) / 72
    columns = min(max(1, int(layout.width / widest)), len(handles) or 1)
    room = 0.1 + ROW * math.ceil(len(handles) / columns)
    figure.set_figheight(figure.get_figheight() + room)
    figure.tight_layout(rect=(0, 0, 1, 1 - room / figure.get_figheight()))
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="upper left", ncols=columns)
    return figure
