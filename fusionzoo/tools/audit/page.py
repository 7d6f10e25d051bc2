"""HTML pages of an audit and of a contact sheet: self-contained files, escaped by Jinja."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np

from fusionzoo.errors import FusionZooError
from fusionzoo.files import replacing, write_text
from fusionzoo.html.samples import SIDE, Preview, show_sample
from fusionzoo.html.template import template
from fusionzoo.version import __version__

from .scan import AuditReport, Finding, ScannedData

PACKAGE = "fusionzoo.tools.audit"  # of the pages
MAX_GROUPS = 12  # of a finding on the page
MAX_MEMBERS = 6  # of a group
MAX_FILES = 20  # names of files of a finding
CELL = 280  # pixels, width of a sample in a PNG
MARGIN = 12
FONT_SIZE = 13
LINE = 17  # pixels between lines
WAVE_HEIGHT = 44
MAX_LINES = 5  # of a text
INK, FAINT, MARK, PAPER, SOFT = "#1b1f24", "#5b6570", "#0072b2", "#ffffff", "#f3f5f7"


def write_report(report: AuditReport, path: Path) -> None:
    """Write the page of an audit."""
    counts = Counter(finding.severity for finding in report.findings)
    dataset = report.scan.dataset
    sizes = Counter(report.scan.splits[report.scan.rows].tolist())
    splits = [*report.scan.split_names, *([""] if sizes[""] else [])]
    page = template("page.html", PACKAGE).render(
        title=f"Audit of {dataset.source}",
        report=report,
        dataset=dataset,
        counts=counts,
        splits=[(name or "no split", sizes[name]) for name in splits],
        findings=[_finding(report, finding) for finding in report.findings],
        facts=[_with_bars(table) for table in report.facts],
        seconds=sum(report.seconds.values()),
        version=__version__,
    )
    write_text(path, page)


def _finding(report: AuditReport, finding: Finding) -> dict[str, Any]:
    names = [finding.modality] if finding.modality in report.scan.dataset.modalities else None
    scan, details = report.scan, finding.details
    shown = [group[:MAX_MEMBERS] for group in finding.groups[:MAX_GROUPS]]
    groups = [[_sample(scan, x, names, details.get(x, "")) for x in group] for group in shown]
    return {
        "finding": finding,
        "name": finding.title,
        "groups": groups,
        "more": len(finding.rows) - len({row for group in shown for row in group}),
        "files": finding.files[:MAX_FILES],
        "more_files": max(0, len(finding.files) - MAX_FILES),
    }


def _sample(
    scan: ScannedData, row: int, names: list[str] | None, detail: str = ""
) -> dict[str, Any]:
    label = scan.labels[row]
    return {
        "row": scan.row_number(row),
        "id": scan.ids[row],
        "split": scan.splits[row],
        "label": "" if label is None else str(label),
        "detail": detail,
        "previews": show_sample(scan.dataset, row, names),
    }


def _with_bars(table: Any) -> dict[str, Any]:
    """Add the length of each bar, in per cent, to a histogram."""
    bars: list[float] = []
    if table.header == ("range", "values"):
        counts = [int(count.replace(",", "")) for _, count in table.rows]
        bars = [100 * count / max(counts) for count in counts]
    return {"title": table.title, "header": table.header, "rows": table.rows, "bars": bars}


def pick_rows(scan: ScannedData, number: int, seed: int) -> list[int]:
    """Draw rows at random, the classes in turn, so that each is shown once before any twice."""
    rows = np.random.default_rng(seed).permutation(scan.rows)
    rank: dict[str, int] = {}
    turns = []
    for row in rows:
        label = str(scan.labels[row])
        rank[label] = rank.get(label, 0) + 1
        turns.append(rank[label])
    return [int(row) for row in rows[np.argsort(turns, kind="stable")][:number]]


def write_contact_sheet(scan: ScannedData, rows: list[int], path: Path) -> None:
    """Write some rows as .html or .png."""
    suffix = path.suffix.lower()
    if suffix in (".html", ".htm"):
        title = f"{len(rows)} of {len(scan.rows):,} samples of {scan.dataset.source}"
        samples, page = [_sample(scan, row, None) for row in rows], template("sheet.html", PACKAGE)
        write_text(path, page.render(title=title, samples=samples, version=__version__))
    elif suffix == ".png":
        image = draw_sheet(scan, rows)
        with replacing(path) as partial:
            image.save(partial, "PNG")
    else:
        raise FusionZooError(f"--out {path}: a contact sheet is a .html or a .png file")


def draw_sheet(scan: ScannedData, rows: list[int]) -> Any:
    """Draw some rows as one image, a grid that is about square."""
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


def _draw_sample(scan: ScannedData, row: int) -> Any:
    from PIL import Image, ImageDraw

    previews = show_sample(scan.dataset, row)
    canvas = Image.new("RGB", (CELL, 4000), SOFT)
    draw = ImageDraw.Draw(canvas)
    label = "" if scan.labels[row] is None else str(scan.labels[row])
    top = _draw_lines(draw, wrap(scan.ids[row], 36)[:2], 8, INK)
    facts = " · ".join(x for x in (f"row {scan.row_number(row)}", scan.splits[row], label) if x)
    top = _draw_lines(draw, wrap(facts, 36)[:2], top, FAINT)
    for preview in previews:
        top = _draw_preview(canvas, draw, preview, top + 6)
    if not previews:
        top = _draw_lines(draw, ["no value"], top, FAINT)
    return canvas.crop((0, 0, CELL, top + 8))


def _draw_preview(canvas: Any, draw: Any, preview: Preview, top: int) -> int:
    """Draw one value; return where the next one begins."""
    if preview.problem:
        lines = wrap(f"{preview.modality} cannot be decoded: {preview.problem}", 40)
        return _draw_lines(draw, lines[:MAX_LINES], top, FAINT)
    if preview.image is not None:
        scale = max(1, SIDE // max(preview.image.size) // 2)  # small images are enlarged
        size = (preview.image.width * scale, preview.image.height * scale)
        canvas.paste(preview.image.resize(size, 0), (8, top))
        top += size[1] + 4
    elif preview.wave is not None:
        middle, scale = top + WAVE_HEIGHT / 2, WAVE_HEIGHT / 2 / max(0.05, abs(preview.wave).max())
        step = (CELL - 16) / len(preview.wave)
        for place, (low, high) in enumerate(preview.wave.tolist()):
            left = 8 + place * step
            box = (left, middle - scale * high, left + step, middle - scale * low + 1)
            draw.rectangle(box, fill=MARK)
        top += WAVE_HEIGHT + 4
    else:
        lines = [line for part in preview.text.splitlines() for line in wrap(part, 40)]
        more = ["..."] if len(lines) > MAX_LINES else []
        top = _draw_lines(draw, [*lines[:MAX_LINES], *more] or ["(empty)"], top, INK)
    return _draw_lines(draw, [f"{preview.modality}: {preview.caption}"], top, FAINT)


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
