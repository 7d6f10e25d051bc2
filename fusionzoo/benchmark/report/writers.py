"""Write the report: index.html, results.parquet, summary.json, costs.csv, table.md, table.tex."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fusionzoo.console import print_table
from fusionzoo.errors import FusionZooError
from fusionzoo.files import replacing, write_text

from ..metric import Metric, metric_named
from .leaderboard import ECE_NOTE
from .results import Summary
from .summary import parquet_rows
from .units import duration, metric_name

GAIN = ("difference", "low", "high")
COSTS = ("parameters", "macs", "seconds", "latency_ms", "samples_per_second", "memory_mb")


def require_packages() -> None:
    """Raise an error if a package that the report needs is missing."""
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise FusionZooError(
            f"the report needs {error.name}: pip install 'fusionzoo[benchmark]'"
        ) from None


def write(
    summary: Summary, figures: Mapping[str, Any], laps: Sequence[tuple[str, float]], out: Path
) -> None:
    """Write all files, each completely or not at all.

    `figures` are those of `verdict.figures`, `laps` the seconds of each part of the benchmark.
    """
    from .html import csv_text, page

    write_text(out / "summary.json", json.dumps(_without_nan(figures), indent=1) + "\n")
    write_text(out / "table.md", markdown(figures))
    write_text(out / "table.tex", latex(figures))
    _parquet(summary, out / "results.parquet")
    costs = [
        [strategy.name, *(f"{strategy.facts[key]:.6g}" for key in COSTS)]
        for strategy in summary.strategies
        if strategy.facts
    ]
    write_text(out / "costs.csv", csv_text(["strategy", *COSTS], costs))
    write_text(out / "index.html", page(summary, figures, laps))


def print_report(
    figures: Mapping[str, Any], out: Path, laps: Sequence[tuple[str, float]] = ()
) -> None:
    """Print the leaderboard's main columns, the verdict and where the minutes went."""
    wanted = [column for column in text_columns(figures) if column.printed]
    rows = [
        [line["strategy"], *(column.text(line) for column in wanted)]
        for line in figures["leaderboard"]
    ]
    print_table("Test samples", ["strategy", *(column.title for column in wanted)], rows)
    for name, error in figures["failed"].items():
        print(f"failed  {name}: {error}")
    print(f"\n{figures['verdict']}\n")
    if laps:
        parts = ", ".join(f"{name} {duration(seconds)}" for name, seconds in laps)
        print(f"time    {duration(sum(seconds for _, seconds in laps))}: {parts}")
    print(f"report  {out / 'index.html'}")


def markdown(figures: Mapping[str, Any]) -> str:
    """Return the verdict, the leaderboard as a Markdown table, and a note on ECE."""
    header, rows = text_table(figures)
    lines = [figures["verdict"], "", f"| {' | '.join(header)} |"]
    lines += [f"| {' | '.join(['---'] * len(header))} |"]
    for line, row in zip(figures["leaderboard"], rows, strict=True):
        name = row[0] if line["family"] in ("single", "baseline") else f"`{row[0]}`"
        lines.append(f"| {' | '.join([name, *row[1:]])} |")
    note = ["", ECE_NOTE] if "ECE" in header else []
    return "\n".join([*lines, *note]) + "\n"


def latex(figures: Mapping[str, Any]) -> str:
    """Return the leaderboard as a booktabs table."""
    header, rows = text_table(figures)
    lines = [
        "% " + figures["verdict"].replace("%", r"\%"),
        *(["% " + ECE_NOTE.replace("%", r"\%")] if "ECE" in header else []),
        rf"\begin{{tabular}}{{ll{'r' * (len(header) - 2)}}}",
        r"\toprule",
        " & ".join(map(_escape, header[:-1])) + r" & $p$ (Holm) \\",
        r"\midrule",
    ]
    lines += [" & ".join(map(_escape, row)) + r" \\" for row in rows]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


class TextColumn(NamedTuple):
    """A column of the table as text."""

    title: str
    text: Callable[[Mapping[str, Any]], str]  # of a leaderboard line
    printed: bool = True  # on the terminal too


def text_table(figures: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the leaderboard as text: header and rows."""
    columns = text_columns(figures)
    rows = [
        [line["strategy"], *(column.text(line) for column in columns)]
        for line in figures["leaderboard"]
    ]
    return ["strategy", *(column.title for column in columns)], rows


def text_columns(figures: Mapping[str, Any]) -> list[TextColumn]:
    """Return the columns after the strategy's name; those that no line has are left out."""
    metric = metric_named(figures["metric"])
    lines = figures["leaderboard"]

    def has(key: str) -> bool:
        return any(not math.isnan(line.get(key, math.nan)) for line in lines)

    columns = [
        TextColumn("family", lambda line: line["family"], False),
        TextColumn(metric_name(metric.name), lambda line: f"{line[metric.name]:.3f}"),
        TextColumn("95 %", lambda line: f"{line['low']:.3f} to {line['high']:.3f}"),
    ]
    if has("untuned"):
        columns.append(TextColumn("untuned", lambda line: _decimal(line["untuned"])))
    if has("macro_f1"):
        columns.append(TextColumn("macro F1", lambda line: _decimal(line["macro_f1"]), False))
    if has("ece"):
        columns += [
            TextColumn("ECE", lambda line: f"{line['ece']:.3f}", False),
            TextColumn("ECE debiased", lambda line: f"{line['ece_debiased']:.3f}", False),
            TextColumn(
                "ECE if calibrated",
                lambda line: f"{line['ece_if_calibrated']:.3f} (up to {line['ece_limit']:.3f})",
                False,
            ),
            TextColumn("calibration", lambda line: line["calibration"], False),
        ]
    if any(line["kind"] == "incomplete" for line in lines):
        columns += [
            TextColumn(title, partial(_area, key), False)
            for key, title in (("missing_area", "missing"), ("lost_area", "lost parts"))
            if has(key)
        ]
    gain = "gain over best single" + (", points" if metric.share else "")
    columns.append(TextColumn(gain, lambda line: _gain(line, metric)))
    columns.append(TextColumn("p (Holm)", _p, False))
    return columns


def _area(key: str, line: Mapping[str, Any]) -> str:
    """Write an area under a curve with its interval."""
    if math.isnan(line.get(key, math.nan)):
        return ""
    return f"{line[key]:.3f} ({line[f'{key}_low']:.3f} to {line[f'{key}_high']:.3f})"


def _decimal(number: float) -> str:
    return "" if math.isnan(number) else f"{number:.3f}"


def _parquet(summary: Summary, path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist(parquet_rows(summary))
    with replacing(path) as partial:
        pq.write_table(table, partial, write_page_checksum=True)


def _without_nan(tree: Any) -> Any:
    """Replace NaN, which JSON does not have, by None."""
    if isinstance(tree, Mapping):
        return {str(key): _without_nan(value) for key, value in tree.items()}
    if isinstance(tree, Sequence) and not isinstance(tree, str):
        return [_without_nan(value) for value in tree]
    return None if isinstance(tree, float) and math.isnan(tree) else tree


def _gain(line: Mapping[str, Any], metric: Metric) -> str:
    if "gain_difference" not in line:
        return ""
    gain, low, high = (metric.difference(line[f"gain_{key}"]) for key in GAIN)
    return f"{gain} ({low} to {high})"


def _p(line: Mapping[str, Any]) -> str:
    if "gain_p_holm" not in line:
        return ""
    return "<0.001" if line["gain_p_holm"] < 0.001 else f"{line['gain_p_holm']:.3f}"


def _escape(text: str) -> str:
    for plain, escaped in (("_", r"\_"), ("%", r"\%"), ("±", r"$\pm$"), ("<", r"$<$")):
        text = text.replace(plain, escaped)
    return text
