"""Write what a benchmark found: index.html, results.parquet, summary.json, table.md, table.tex."""

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
)
COSTS = ("parameters", "macs", "seconds", "latency_ms", "samples_per_second", "memory_mb")


def check() -> None:
    """Say what is missing before anything is computed."""
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise FusionZooError(
            f"the report needs {error.name}: pip install 'fusionzoo[benchmark]'"
        ) from None


def write(summary: Summary, found: Mapping[str, Any], out: Path) -> None:
    """Write all files, each as a whole; `found` are the figures of verdict.figures."""
    from .html import csv_text, page

    replace(out / "summary.json", json.dumps(_plain(found), indent=1) + "\n")
    replace(out / "table.md", markdown(found))
    replace(out / "table.tex", latex(found))
    _parquet(summary, out / "results.parquet")
    measured = [one for one in summary.strategies if one.facts]
    costs = [[one.name, *(f"{one.facts[key]:.6g}" for key in COSTS)] for one in measured]
    replace(out / "costs.csv", csv_text(["strategy", *COSTS], costs))
    replace(out / "index.html", page(summary, found))


def show(found: Mapping[str, Any], out: Path) -> None:
    """Print the head of the leaderboard and the verdict."""
    rows = [
        (
            line["strategy"],
            f"{line['accuracy']:.3f}",
            _interval(line["low"], line["high"]),
            f"{line['macro_f1']:.3f}",
            f"{line['ece']:.3f}{'' if line['calibration'] == CALIBRATED else '*'}",
            _gain(line),
        )
        for line in found["leaderboard"]
    ]
    header = ("strategy", "accuracy", "95 % over seeds", "macro F1", "ECE", "gain over best single")
    print_table("Test split", header, rows)
    print("* not calibrated: the ECE is above what calibrated models get by chance (95 %)")
    for name, error in found["failed"].items():
        print(f"failed  {name}: {error}")
    print(f"\n{found['verdict']}\n")
    print(f"report  {out / 'index.html'}")


def markdown(found: Mapping[str, Any]) -> str:
    """Return the leaderboard as a Markdown table between its verdict and a note on ECE."""
    lines = [found["verdict"], "", f"| {' | '.join([*HEADER, 'p (Holm)'])} |"]
    lines += [f"| {' | '.join(['---'] * (len(HEADER) + 1))} |"]
    for line in found["leaderboard"]:
        name = line["strategy"]
        shown = name if line["family"] in ("single", "baseline") else f"`{name}`"
        lines.append(f"| {' | '.join([shown, *_cells(line)])} |")
    return "\n".join([*lines, "", ECE_NOTE]) + "\n"


def latex(found: Mapping[str, Any]) -> str:
    """Return the leaderboard as a booktabs table."""
    lines = [
        "% " + found["verdict"].replace("%", r"\%"),
        "% " + ECE_NOTE.replace("%", r"\%"),
        rf"\begin{{tabular}}{{ll{'r' * (len(HEADER) - 1)}}}",
        r"\toprule",
        " & ".join(map(_escape, HEADER)) + r" & $p$ (Holm) \\",
        r"\midrule",
    ]
    for line in found["leaderboard"]:
        lines.append(" & ".join(map(_escape, [line["strategy"], *_cells(line)])) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _cells(line: Mapping[str, Any]) -> list[str]:
    """Return what stands in a line of the tables after the strategy's name."""
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


def replace(path: Path, text: str) -> None:
    """Write a file as a whole, or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def _plain(tree: Any) -> Any:
    """Replace NaN, which JSON does not know, by null."""
    if isinstance(tree, Mapping):
        return {str(key): _plain(value) for key, value in tree.items()}
    if isinstance(tree, Sequence) and not isinstance(tree, str):
        return [_plain(value) for value in tree]
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
