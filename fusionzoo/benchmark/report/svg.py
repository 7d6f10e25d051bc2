"""Small SVG from matplotlib's: the page's colours and font, no metadata, rounded coordinates."""

from __future__ import annotations

import io
import re
from html import escape
from typing import Any
from xml.etree import ElementTree

INK, FAINT = "#010203", "#b4b4b4"  # text and axes; grid and curves in the background
# Four of Okabe and Ito's colours, which colour-blind readers can distinguish, and two darker ones.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b87a00", "#7a5bc4")
VARIABLES = {  # base.html defines them for light and dark pages
    INK: "currentColor",
    FAINT: "var(--faint)",
    **{colour: f"var(--c{number})" for number, colour in enumerate(COLOURS)},
}
FONT_SIZE = 9.0  # of text without a size, in units of the drawing; `.plot text` in base.html
GRID_WIDTH = 0.5
NAMESPACE = re.compile(r"\{.*\}")
NUMBER = re.compile(r"-?\d+\.\d+")
SPACES = re.compile(r"\s+")
DEFAULTS = {
    "stroke-linecap": {"square", "butt"},
    "stroke-linejoin": {"miter", "round"},
    "fill": {"currentColor"},  # of text
    "font-family": None,  # any
    "font-size": {f"{FONT_SIZE:g}px"},
    "text-anchor": {"start"},
}
Element = ElementTree.Element


def to_svg(figure: Any, title: str, css_class: str, prefix: str) -> str:
    """Return a figure as an SVG element whose ids start with `prefix`."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    out = io.StringIO()
    for part in (figure, *figure.axes):
        part.patch.set_visible(False)
    # Not figure.savefig, which draws everything twice.
    FigureCanvasSVG(figure).print_svg(out, metadata={"Date": None})
    root = ElementTree.fromstring(out.getvalue())
    ids = {
        use.get("{http://www.w3.org/1999/xlink}href", "")[1:]: ""
        for use in root.iter("{http://www.w3.org/2000/svg}use")
    }
    for number, name in enumerate(ids):
        ids[name] = f"{prefix}{number}"
    width, height = root.attrib["viewBox"].split()[2:]
    content = "".join(_write(child, ids) for child in root)
    return (
        f'<svg class="{css_class}" role="img" aria-label="{escape(title)}"'
        f' viewBox="0 0 {_round(width)} {_round(height)}">{content}</svg>'
    )


def _write(element: Element, ids: dict[str, str]) -> str:
    tag = NAMESPACE.sub("", element.tag)
    if tag in ("metadata", "style", "clipPath"):
        return ""
    if tag == "g":
        return _group(element, ids)
    style = _style(element.get("style", ""), tag)
    attributes = {"style": style} if style else {}
    if tag == "defs":
        content = "".join(_write(child, ids) for child in element)
        return f"<defs>{content}</defs>" if content else ""
    if tag == "path":
        if style == "fill:none":
            return ""  # the background of the figure or of a panel
        path = {"d": _path(element.get("d", ""))}
        name = ids.get(element.get("id", ""))
        attributes = ({"id": name} if name else {}) | path | attributes
    elif tag == "use":
        target = ids[element.get("{http://www.w3.org/1999/xlink}href", "")[1:]]
        place = {key: _round(element.get(key, "0")) for key in ("x", "y")}
        attributes = {"href": f"#{target}"} | place | attributes
    elif tag == "text":
        turn = element.get("transform", "")
        turned = {} if turn.startswith("rotate(-0 ") else {"transform": _round(turn)}
        place = {key: _round(element.get(key, "0")) for key in ("x", "y") if element.get(key)}
        attributes = place | turned | attributes
    words = " ".join(f'{key}="{value}"' for key, value in attributes.items())
    return f"<{tag} {words}>{escape(element.text or '', quote=False)}</{tag}>"


def _group(element: Element, ids: dict[str, str]) -> str:
    """Write a group's content; the grid lines of a panel come first, as one path."""
    if not (element.get("id") or "").startswith("axes_"):
        content = "".join(_write(child, ids) for child in element)
        place = element.get("transform")
        return f'<g transform="{_round(place)}">{content}</g>' if place and content else content
    grid = [path for path in element.iter() if _is_grid(path)]
    joined = "".join(_path(path.get("d", "")) for path in grid)
    for path in grid:
        path.set("style", "fill: none")  # leaves nothing to draw
    content = "".join(_write(child, ids) for child in element)
    return (f'<path class="grid" d="{joined}"></path>' if joined else "") + content


def _is_grid(element: Element) -> bool:
    style = element.get("style", "")
    return f"stroke: {FAINT}" in style and f"stroke-width: {GRID_WIDTH}" in style


def _style(style: str, tag: str) -> str:
    parts = []
    for part in filter(None, style.split("; ")):
        key, value = (word.strip() for word in part.split(":", 1))
        value = VARIABLES.get(value, value)
        default = DEFAULTS.get(key, set())
        if key == "fill" and tag != "text":
            default = set()
        if default is None or value in default:
            continue
        parts.append(f"{key}:{_round(value)}")
    return ";".join(parts)


def _path(data: str) -> str:
    """Round a path's coordinates and drop the spaces that separate nothing.

    >>> _path("M 50.721549 140.9 \\nL 50.7 45.24 z")
    'M50.7 140.9L50.7 45.2z'
    """
    return re.sub(r" ?([A-Za-z]) ?", r"\1", SPACES.sub(" ", _round(data)).strip())


def _round(text: str) -> str:
    return NUMBER.sub(lambda match: f"{round(float(match[0]), 1):g}", text)
