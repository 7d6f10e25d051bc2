"""The tables of a report: Markdown, LaTeX, CSV and Parquet."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fusionzoo.html.template import csv_text

from .leaderboard import ECE_NOTE, EXTERNAL, paper_table, text_table
from .results import Summary
from .summary import parquet_rows

COSTS = ("parameters", "macs", "seconds", "latency_ms", "samples_per_second", "memory_mb")
SPECIAL = {  # characters that mean something else in LaTeX
    **{x: f"\\{x}" for x in "_%&#${}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"±": r"$\pm$", "<": "$<$", ">": "$>$"},
}


def markdown(figures: Mapping[str, Any]) -> str:
    """Return the verdict, the leaderboard as a Markdown table, a note on ECE, what is behind."""
    header, rows = text_table(figures["leaderboard"], figures["metric"])
    lines = [figures["verdict"], "", f"| {' | '.join(header)} |"]
    lines += [f"| {' | '.join(['---'] * len(header))} |"]
    for line, row in zip(figures["leaderboard"], rows, strict=True):
        plain = line["family"] in ("single", "baseline", EXTERNAL)
        name = row[0] if plain else f"`{row[0]}`"
        cells = [x.replace("|", "\\|") for x in (name, *row[1:])]
        lines.append(f"| {' | '.join(cells)} |")
    note = ["", ECE_NOTE] if "ECE" in header else []
    behind = " ".join(figures.get("behind", ()))
    return "\n".join([*lines, *note, "", behind]).rstrip() + "\n"


def latex(figures: Mapping[str, Any]) -> str:
    """Return the leaderboard as a table for a paper: booktabs, the best in bold, the verdict."""
    lines = figures["leaderboard"]
    header, rows, bold = paper_table(lines, figures["metric"])
    cells = in_bold(rows, bold)
    notes = [ECE_NOTE] if "ECE" in header else []
    return booktabs(header, cells, str(figures["verdict"]), data_label(figures["data"]), notes)


def in_bold(rows: Sequence[Sequence[str]], bold: Sequence[Sequence[bool]]) -> list[list[str]]:
    return [
        [
            rf"\textbf{{{_escape(x)}}}" if best else _escape(x)
            for x, best in zip(row, marks, strict=True)
        ]
        for row, marks in zip(rows, bold, strict=True)
    ]


def booktabs(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    caption: str,
    label: str,
    notes: Sequence[str] = (),
) -> str:
    """Return a table for LaTeX with the package booktabs; the cells are LaTeX already."""
    titles = [_escape(title).replace("p (Holm)", "$p$ (Holm)") for title in header]
    words = [part for part in ("candidate", "family") if part in header]
    align = "".join("l" if title in words else "r" for title in header)
    lines = [
        *(f"% {note}" for note in notes),
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{_code(caption)}}}",
        rf"\label{{tab:{label}}}",
        rf"\begin{{tabular}}{{{align}}}",
        r"\toprule",
        " & ".join(titles) + r" \\",
        r"\midrule",
        *(" & ".join(row) + r" \\" for row in rows),
        *(r"\bottomrule", r"\end{tabular}", r"\end{table}"),
    ]
    return "\n".join(lines) + "\n"


def data_label(data: Mapping[str, Any]) -> str:
    """Return a data set's name as LaTeX takes it in a label."""
    return re.sub(r"[^\w-]", "-", str(data["name"]))


def costs(summary: Summary) -> str:
    """Return what each measured candidate costs, as CSV."""
    rows = [
        [candidate.name, *(f"{candidate.facts[key]:.6g}" for key in COSTS)]
        for candidate in summary.candidates
        if candidate.facts
    ]
    return csv_text(["candidate", *COSTS], rows)


def parquet(summary: Summary) -> bytes:
    """Return the file of all rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = pa.BufferOutputStream()
    table = pa.Table.from_pylist(parquet_rows(summary))
    pq.write_table(table, file, write_page_checksum=True)
    return bytes(file.getvalue())


def _escape(text: str) -> str:
    return "".join(SPECIAL.get(x, x) for x in text)


def _code(words: str) -> str:
    """Escape words for LaTeX; what stands between backticks is set as code."""
    parts = enumerate(map(_escape, words.split("`")))
    return "".join(rf"\texttt{{{x}}}" if number % 2 else x for number, x in parts)
