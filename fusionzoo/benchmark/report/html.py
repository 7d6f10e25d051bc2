"""index.html: the report as one self-contained file, for screens and print."""

from __future__ import annotations

import base64
import csv
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fusionzoo.version import __version__

from ..metric import metric_named
from .leaderboard import ECE_NOTE
from .leaderboard_columns import table
from .results import Summary
from .sections import heat_map, sections
from .title import data_title
from .units import duration, metric_name, thousands

Table = tuple[Sequence[str], Sequence[Sequence[Any]]]  # header, rows


def page(summary: Summary, figures: Mapping[str, Any], laps: Sequence[tuple[str, float]]) -> str:
    """Render the report; `figures` are those of `verdict.figures`, `laps` those of the clock."""
    metric = str(figures["metric"])
    facts = {strategy.name: strategy.facts for strategy in summary.strategies}
    lines = [{**line, **facts.get(line["strategy"], {})} for line in figures["leaderboard"]]
    columns, cells = table(lines, metric)
    text = (
        environment()
        .get_template("page.html")
        .render(
            figures=figures,
            title=data_title(summary.bench.cfg.data),
            metric=metric_name(metric),
            points=metric_named(metric).share,
            difference=metric_named(metric).difference,
            columns=columns,
            rows=[(line["family"], row) for line, row in zip(lines, cells, strict=True)],
            sections=sections(summary, metric),
            heat=heat_map(summary, figures.get("shapley", {})),
            needs_table=needs_table,
            minutes=minutes(laps),
            minutes_table=(["part", "seconds"], laps),
            ece_note=ECE_NOTE,
            version=__version__,
        )
    )
    return str(text)


def needs_table(needs: Mapping[str, Any]) -> Table:
    """Return the parts of each pair of sources, with their intervals, for the CSV."""
    pairs = needs["pid"]
    header = [key for key in pairs[0] if key not in ("clusters", "limits")]
    return header, [[pair[key] for key in header] for pair in pairs]


def minutes(parts: Sequence[tuple[str, float]]) -> list[tuple[str, str, float]]:
    """Return each part of the run with its duration and its share of the total, and the total."""
    total = sum(seconds for _, seconds in parts)
    if not total:
        return []
    return [
        (name, duration(seconds), seconds / total) for name, seconds in [*parts, ("total", total)]
    ]


def environment() -> Any:
    """Return the Jinja environment of the templates in this folder."""
    from jinja2 import Environment, PackageLoader

    jinja = Environment(
        loader=PackageLoader("fusionzoo.benchmark.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.filters |= {"csv": data_link, "thousands": thousands}
    jinja.filters |= {"code": code, "breakable": breakable}
    return jinja


def code(words: str) -> Any:
    """Show text between backticks as code, as Markdown does, and escape the rest."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(words))))


def breakable(name: str) -> Any:
    """Let a browser break a long name after underscores and plus signs."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"([_+])", r"\1<wbr>", str(escape(name))))


def data_link(table: Table) -> str:
    """Return a link that contains a table as CSV, so that the page stays one file.

    Six digits of each number: all of them would double the size of the page.
    """
    header, rows = table
    short = [[f"{x:.6g}" if isinstance(x, float) else x for x in row] for row in rows]
    return "data:text/csv;base64," + base64.b64encode(csv_text(header, short).encode()).decode()


def csv_text(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table as CSV."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return out.getvalue()
