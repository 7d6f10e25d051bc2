"""The templates of all pages: one head and look, escaped text, tables as links of CSV."""

from __future__ import annotations

import base64
import csv
import io
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from fusionzoo.errors import explained
from fusionzoo.ground.cells import without_formulas
from fusionzoo.ground.version import __version__

# Signs that turn the direction of what follows them: 95 % would read 59 %.
DIRECTIONS = dict.fromkeys([0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)])
Table = tuple[Sequence[str], Sequence[Sequence[Any]]]  # header, rows


@cache
def template(name: str, package: str) -> Any:
    """Return a template in a package's folder, which may extend and include those of this folder.

    A page extends base.html, whose policy lets it load nothing from outside of itself.
    """
    with explained("HTML pages need Jinja, pip install 'fusionzoo[benchmark]'", ImportError):
        from jinja2 import ChoiceLoader, Environment, PackageLoader
    jinja = Environment(
        loader=ChoiceLoader([PackageLoader(x, ".") for x in (package, "fusionzoo.html")]),
        autoescape=True,
        finalize=lambda x: x.translate(DIRECTIONS) if isinstance(x, str) else x,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.filters |= {"csv": data_link, "thousands": "{:,.0f}".format}
    jinja.filters |= {"code": code, "breakable": breakable}
    jinja.globals["version"] = __version__
    return jinja.get_template(name)


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
    """Return a table as CSV, whose cells no spreadsheet program runs as formulas."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for row in (header, *rows):
        writer.writerow([without_formulas(x) if isinstance(x, str) else x for x in row])
    return out.getvalue()
