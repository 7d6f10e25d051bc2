"""Labels of a plot that do not collide: ticks of a logarithmic axis, names of points."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from textwrap import wrap
from typing import Any, NamedTuple

from .svg import FONT_SIZE, INK
from .units import readable

STEPS = ((1, 2, 5), (1, 3), (1,))  # in a decade, from many ticks to few
LONGEST = 19  # characters in a line of a name
DOT = 3.0  # half the width of a dot, with a margin
# Places for a name: offset from the point in points, and the side of the name that is there.
OFFSETS = [
    (x, y, side)
    for distance in range(0, 40, 10)
    for x, y, side in (
        (4, 1 + distance, "left"),
        (4, -12 - distance, "left"),
        (-4, 1 + distance, "right"),
        (-4, -12 - distance, "right"),
    )
]


class Box(NamedTuple):
    """A rectangle in points."""

    left: float
    bottom: float
    right: float
    top: float

    def overlaps(self, other: Box) -> bool:
        """Return whether two boxes share an area."""
        return (
            self.left < other.right
            and other.left < self.right
            and self.bottom < other.top
            and other.bottom < self.top
        )

    def inside(self, frame: Box) -> bool:
        """Return whether the box lies within a frame, or at most a line of text above it."""
        return (
            self.left >= frame.left
            and self.right <= frame.right
            and self.bottom >= frame.bottom
            and self.top <= frame.top + FONT_SIZE
        )


def tick_values(low: float, high: float, most: int = 5) -> list[float]:
    """Return round numbers from low to high for a logarithmic axis.

    >>> tick_values(80, 3000), tick_values(1, 1e8)
    ([100.0, 200.0, 500.0, 1000.0, 2000.0], [1.0, 100.0, 10000.0, 1000000.0, 100000000.0])
    """
    from matplotlib.ticker import MaxNLocator

    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    values: list[float] = []
    for steps in STEPS:
        values = [step * 10.0**decade for decade in decades for step in steps]
        values = [value for value in values if low <= value <= high]
        if len(values) <= most:
            break
    if len(values) < 2:
        ticks = MaxNLocator(most - 1).tick_values(low, high)
        return [float(value) for value in ticks if low <= value <= high]
    return values[:: math.ceil(len(values) / most)]


def log_ticks(axis: Any, low: float, high: float) -> None:
    """Put a few round numbers on a logarithmic axis, with prefixes: 20 k, 1 M."""
    values = tick_values(low, high)
    labels = [readable(value) if value >= 1000 else f"{value:g}" for value in values]
    axis.set_ticks(values, labels)
    axis.set_ticks([], minor=True)


def label_points(
    axes: Any, names: Mapping[str, tuple[float, float]], dots: Iterable[tuple[float, float]]
) -> None:
    """Write names beside their points, except those for which there is no room.

    Names cover no other name and no dot; only the first and the last may cover dots. The figure's
    layout must be final.
    """
    to_points = 72 / axes.figure.dpi
    frame = Box(*(float(x) * to_points for x in axes.get_window_extent().extents))

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x, y = axes.transData.transform(point)
        return float(x) * to_points, float(y) * to_points

    dot_boxes = [Box(x - DOT, y - DOT, x + DOT, y + DOT) for x, y in map(place, dots)]
    taken: list[Box] = []
    for order, name in enumerate([*list(names)[:1], *list(names)[:0:-1]]):
        text = break_name(name, LONGEST)
        boxes = [(_box(place(names[name]), offset, text), offset) for offset in OFFSETS]
        free = [
            (sum(box.overlaps(dot) for dot in dot_boxes), number)
            for number, (box, _) in enumerate(boxes)
            if box.inside(frame) and not any(box.overlaps(other) for other in taken)
        ]
        if not free or (order > 1 and min(free)[0]):
            continue
        box, (x, y, side) = boxes[min(free)[1]]
        taken.append(box)
        far = abs(y) > 12
        axes.annotate(
            text,
            names[name],
            xytext=(x, y),
            textcoords="offset points",
            ha=side,
            va="bottom",
            arrowprops={"arrowstyle": "-", "linewidth": 0.4, "color": INK} if far else None,
        )


def _box(point: tuple[float, float], offset: tuple[float, float, str], text: str) -> Box:
    lines = text.split("\n")
    width, height = max(map(text_width, lines)), 1.2 * FONT_SIZE * len(lines)
    left = point[0] + offset[0] - (width if offset[2] == "right" else 0)
    bottom = point[1] + offset[1]
    return Box(left - 1, bottom - 1, left + width + 1, bottom + height + 1)


def text_width(text: str) -> float:
    """Return the width of a text in points, in matplotlib's font, which is wider than most."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    properties = FontProperties(size=FONT_SIZE)
    return float(text_to_path.get_text_width_height_descent(text, properties, False)[0])


def break_name(name: str, most: int) -> str:
    """Break a long name into lines of at most `most` characters, after spaces and underscores.

    >>> break_name("late_confidence + multimodal_balance", 19).split("\\n")
    ['late_confidence +', 'multimodal_balance']
    >>> break_name("concat_transformer", 10).split("\\n")
    ['concat_', 'transforme', 'r']
    """
    lines: list[str] = []
    for words in wrap(name, most, break_long_words=False) or [name]:
        parts = [words] if len(words) <= most else re.split(r"(?<=_)", words)
        start = len(lines)
        for part in parts:
            if len(lines) > start and len(lines[-1] + part) <= most:
                lines[-1] += part
            else:
                lines += wrap(part, most)
    return "\n".join(lines)
