"""Write the report: index.html, results.parquet, summary.json, costs.csv, table.md, table.tex."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fusionzoo.console import print_table
from fusionzoo.errors import FusionZooError

from .leaderboard import CALIBRATED, ECE_NOTE
from .results import Summary
from .summary import parquet_rows

HEADER = (
    *("strategy", "family", "accuracy", "macro F1"),
    *("ECE", "ECE debiased", "ECE if calibrated", "calibration", "gain over best single"),
    "p (Holm)",
)
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


def write(summary: Summary, figures: Mapping[str, Any], out: Path) -> None:
    """Write all files, each completely or not at all; `figures` are those of `verdict.figures`."""
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
    write_text(out / "index.html", page(summary, figures))


def print_report(figures: Mapping[str, Any], out: Path) -> None:
    """Print the leaderboard's main columns and the verdict."""
    rows = [
        (
            line["strategy"],
            f"{line['accuracy']:.3f}",
            _interval(line["low"], line["high"]),
            f"{line['macro_f1']:.3f}",
            f"{line['ece']:.3f}{'' if line['calibration'] == CALIBRATED else '*'}",
            _gain(line),
        )
        for line in figures["leaderboard"]
    ]
    header = ("strategy", "accuracy", "95 % over seeds", "macro F1", "ECE", "gain over best single")
    print_table("Test split", header, rows)
    print("* not calibrated: the ECE is above what calibrated models get by chance (95 %)")
    for name, error in figures["failed"].items():
        print(f"failed  {name}: {error}")
    print(f"\n{figures['verdict']}\n")
    print(f"report  {out / 'index.html'}")


def markdown(figures: Mapping[str, Any]) -> str:
    """Return the verdict, the leaderboard as a Markdown table, and a note on ECE."""
    lines = [figures["verdict"], "", f"| {' | '.join(HEADER)} |"]
    lines += [f"| {' | '.join(['---'] * len(HEADER))} |"]
    for line in figures["leaderboard"]:
        name = line["strategy"]
        shown_name = name if line["family"] in ("single", "baseline") else f"`{name}`"
        lines.append(f"| {' | '.join([shown_name, *columns(line)])} |")
    return "\n".join([*lines, "", ECE_NOTE]) + "\n"


def latex(figures: Mapping[str, Any]) -> str:
    """Return the leaderboard as a booktabs table."""
    lines = [
        "% " + figures["verdict"].replace("%", r"\%"),
        "% " + ECE_NOTE.replace("%", r"\%"),
        rf"\begin{{tabular}}{{ll{'r' * (len(HEADER) - 2)}}}",
        r"\toprule",
        " & ".join(map(_escape, HEADER[:-1])) + r" & $p$ (Holm) \\",
        r"\midrule",
    ]
    for line in figures["leaderboard"]:
        lines.append(" & ".join(map(_escape, [line["strategy"], *columns(line)])) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def columns(line: Mapping[str, Any]) -> list[str]:
    """Return the columns of a leaderboard line after the strategy's name, as text."""
    return [
        line["family"],
        _estimate(line),
        f"{line['macro_f1']:.3f}",
        f"{line['ece']:.3f}",
        f"{line['ece_debiased']:.3f}",
        f"{line['ece_if_calibrated']:.3f} (up to {line['ece_limit']:.3f})",
        line["calibration"],
        _gain(line),
        _p(line),
    ]


def _parquet(summary: Summary, path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    part = path.with_suffix(".part")
    table = pa.Table.from_pylist(parquet_rows(summary))
    pq.write_table(table, part)
    part.replace(path)


def write_text(path: Path, text: str) -> None:
    """Write a file completely or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def _without_nan(tree: Any) -> Any:
    """Replace NaN, which JSON does not have, by None."""
    if isinstance(tree, Mapping):
        return {str(key): _without_nan(value) for key, value in tree.items()}
    if isinstance(tree, Sequence) and not isinstance(tree, str):
        return [_without_nan(value) for value in tree]
    return None if isinstance(tree, float) and math.isnan(tree) else tree


def _interval(low: float, high: float) -> str:
    return "one seed" if math.isnan(low) else f"{low:.3f} to {high:.3f}"


def _estimate(line: Mapping[str, Any]) -> str:
    if math.isnan(line["low"]):
        return f"{line['accuracy']:.3f}"
    return f"{line['accuracy']:.3f} ± {(line['high'] - line['low']) / 2:.3f}"


def _gain(line: Mapping[str, Any]) -> str:
    if "gain_difference" not in line:
        return ""
    gain, low, high = (100 * line[f"gain_{key}"] for key in ("difference", "low", "high"))
    return f"{gain:+.1f} ({low:+.1f} to {high:+.1f})"


def _p(line: Mapping[str, Any]) -> str:
    if "gain_p_holm" not in line:
        return ""
    return "<0.001" if line["gain_p_holm"] < 0.001 else f"{line['gain_p_holm']:.3f}"


def _escape(text: str) -> str:
    for plain, escaped in (("_", r"\_"), ("%", r"\%"), ("±", r"$\pm$"), ("<", r"$<$")):
        text = text.replace(plain, escaped)
    return text
