"""Contact sheet of a data set: a few samples with picture, text, waveform and label."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np

from fusionzoo.errors import FusionZooError
from fusionzoo.files import replacing

from .page import write_sheet
from .pictures import SIDE, Picture, show_sample
from .scan import Scan

CELL = 280  # pixels, width of a sample in a PNG
MARGIN = 12
FONT_SIZE = 13
LINE = 17  # pixels between lines
WAVE_HEIGHT = 44
MAX_LINES = 5  # of a text
INK, FAINT, MARK, PAPER, SOFT = "#1b1f24", "#5b6570", "#0072b2", "#ffffff", "#f3f5f7"


def pick_rows(scan: Scan, number: int, seed: int) -> list[int]:
    """Draw rows at random, the classes in turn, so that each is shown once before any twice."""
    rows = np.random.default_rng(seed).permutation(scan.rows)
    rank: dict[str, int] = {}
    turns = []
    for row in rows:
        label = str(scan.labels[row])
        rank[label] = rank.get(label, 0) + 1
        turns.append(rank[label])
    return [int(row) for row in rows[np.argsort(turns, kind="stable")][:number]]


def write_contact_sheet(scan: Scan, rows: list[int], path: Path) -> None:
    """Write some rows as .html or .png."""
    suffix = path.suffix.lower()
    if suffix in (".html", ".htm"):
        write_sheet(scan, rows, path)
    elif suffix == ".png":
        image = draw_sheet(scan, rows)
        with replacing(path) as partial:
            image.save(partial, "PNG")
    else:
        raise FusionZooError(f"--out {path}: a contact sheet is a .html or a .png file")


def draw_sheet(scan: Scan, rows: list[int]) -> Any:
    """Draw some rows as one picture, a grid that is about square."""
    from PIL import Image

    cells = [_draw_sample(scan, row) for row in rows]
    columns = max(1, round(len(cells) ** 0.5))
    lines = [cells[start : start + columns] for start in range(0, len(cells), columns)]
    heights = [max(cell.height for cell in line) for line in lines]
    size = (MARGIN + columns * (CELL + MARGIN), MARGIN + sum(heights) + MARGIN * len(lines))
    sheet = Image.new("RGB", size, PAPER)
    top = MARGIN
    for line, height in zip(lines, heights, strict=True):
        for column, cell in enumerate(line):
            left = MARGIN + column * (CELL + MARGIN)
            sheet.paste(SOFT, (left, top, left + CELL, top + height))
            sheet.paste(cell, (left, top))
        top += height + MARGIN
    return sheet


def _draw_sample(scan: Scan, row: int) -> Any:
    from PIL import Image, ImageDraw

    pictures = show_sample(scan.dataset, row)
    canvas = Image.new("RGB", (CELL, 4000), SOFT)
    draw = ImageDraw.Draw(canvas)
    label = "" if scan.labels[row] is None else str(scan.labels[row])
    top = _draw_lines(draw, wrap(scan.ids[row], 36)[:2], 8, INK)
    facts = " · ".join(x for x in (f"row {scan.row_number(row)}", scan.splits[row], label) if x)
    top = _draw_lines(draw, wrap(facts, 36)[:2], top, FAINT)
    for picture in pictures:
        top = _draw_picture(canvas, draw, picture, top + 6)
    if not pictures:
        top = _draw_lines(draw, ["no value"], top, FAINT)
    return canvas.crop((0, 0, CELL, top + 8))


def _draw_picture(canvas: Any, draw: Any, picture: Picture, top: int) -> int:
    """Draw one value; return where the next one begins."""
    if picture.problem:
        lines = wrap(f"{picture.modality} cannot be decoded: {picture.problem}", 40)
        return _draw_lines(draw, lines[:MAX_LINES], top, FAINT)
    if picture.image is not None:
        scale = max(1, SIDE // max(picture.image.size) // 2)  # small pictures are enlarged
        size = (picture.image.width * scale, picture.image.height * scale)
        canvas.paste(picture.image.resize(size, 0), (8, top))
        top += size[1] + 4
    elif picture.wave is not None:
        middle, scale = top + WAVE_HEIGHT / 2, WAVE_HEIGHT / 2 / max(0.05, abs(picture.wave).max())
        step = (CELL - 16) / len(picture.wave)
        for place, (low, high) in enumerate(picture.wave.tolist()):
            left = 8 + place * step
            box = (left, middle - scale * high, left + step, middle - scale * low + 1)
            draw.rectangle(box, fill=MARK)
        top += WAVE_HEIGHT + 4
    else:
        lines = [line for part in picture.text.splitlines() for line in wrap(part, 40)]
        more = ["..."] if len(lines) > MAX_LINES else []
        top = _draw_lines(draw, [*lines[:MAX_LINES], *more] or ["(empty)"], top, INK)
    return _draw_lines(draw, [f"{picture.modality}: {picture.caption}"], top, FAINT)


def _draw_lines(draw: Any, lines: list[str], top: int, colour: str) -> int:
    for line in lines:
        draw.text((8, top), line, fill=colour, font=_font())
        top += LINE
    return top


def _font() -> Any:
    """Return a font with many scripts if matplotlib brings it, else Pillow's."""
    from PIL import ImageFont

    package = find_spec("matplotlib")
    if package is not None and package.origin is not None:
        file = Path(package.origin).parent / "mpl-data" / "fonts" / "ttf" / "DejaVuSans.ttf"
        if file.is_file():
            return ImageFont.truetype(str(file), FONT_SIZE)
    return ImageFont.load_default(FONT_SIZE)
