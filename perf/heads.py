"""Compare fusions with their parts: `python perf/heads.py`, after the benchmarks it reads.

Reads the leaderboards of finished benchmarks (by default those in results/benchmark) and writes
results/heads.csv: each fusion untuned and tuned, beside the best single modality, the mean of the
separately trained single modalities (of log-probabilities: the row `product of singles that are
present`) and the linear model on everything. Of a fusion with several reports on the same data the
last counts. A fusion can represent its parts, so it should not stay far below them; the bars, in
points:

- `late_mean`: at most 1 below the mean of the separately trained heads;
- `concat`, `sum`, `gmu` and late fusions: at most 1 below the best single modality;
- `concat`: at most 1 below the linear model on everything; attention fusions: at most 2.

Prints the fusions that miss a bar. Differences are of test scores without an interval: it is a list
of what to look at, not a test.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fusionzoo.benchmark.candidates import LINEAR
from fusionzoo.benchmark.report.page import Report
from fusionzoo.benchmark.report.results import PRODUCT_PRESENT
from fusionzoo.benchmark.report.summary import EARLIER_NAMES
from fusionzoo.fusion import FUSIONS

ROOT = Path(__file__).parents[1]
REPORTS = ("digits", "interactions", "mfeat", "stamps", "stamps_attention")  # in results/benchmark
SINGLE, PARTS, LINE = "best single modality", "mean of the parts", "linear model"
COLUMNS = ("data", "fusion", "family", "untuned", "tuned", SINGLE, PARTS, LINE, "missed")


def main() -> None:
    """Write the table and print what misses a bar."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("reports", nargs="*", type=Path, help="folders of reports")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "heads.csv")
    flags = parser.parse_args()
    folders = flags.reports or [ROOT / "results" / "benchmark" / name for name in REPORTS]
    found = {(line["data"], line["fusion"]): line for folder in folders for line in table(folder)}
    lines = sorted(found.values(), key=lambda x: (x["data"], -float(x["tuned"]), x["fusion"]))
    with flags.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    for line in lines:
        if line["missed"]:
            print(f"{line['data']}: {line['fusion']} {line['tuned']}: {line['missed']}")
    print(f"{sum(bool(line['missed']) for line in lines)} of {len(lines)} miss a bar; {flags.out}")


def table(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of one report, the best fusion first."""
    figures = Report.read(folder).figures
    metric, lines = figures["metric"], figures["leaderboard"]
    scores = {line["candidate"]: line["score"] for line in lines}
    scores = {EARLIER_NAMES.get(name, name): score for name, score in scores.items()}
    parts = {
        SINGLE: max(line["score"] for line in lines if line["kind"] == "single"),
        PARTS: scores.get(PRODUCT_PRESENT),
        LINE: next((scores[name] for name in LINEAR if name in scores), None),
    }
    rows = []
    for line in lines:
        if line["kind"] != "fusion" or line["candidate"] not in FUSIONS:
            continue
        missed = ", ".join(misses(line["candidate"], line["family"], line["score"], parts))
        row = {
            "data": figures["data"]["name"],
            "fusion": line["candidate"],
            "family": line["family"],
        }
        row |= {"untuned": shown(line.get("untuned")), "tuned": shown(line[metric])}
        row |= {name: shown(score) for name, score in parts.items()}
        rows.append({**row, "missed": missed})
    return rows


def misses(fusion: str, family: str, score: float, parts: dict[str, float | None]) -> Iterator[str]:
    """Say by how many points a fusion's score is below a part, where that is more than its bar."""
    bars = {PARTS: 1.0 if fusion == "late_mean" else None}
    bars[SINGLE] = 1.0 if fusion in ("concat", "sum", "gmu") or family == "late" else None
    bars[LINE] = 1.0 if fusion == "concat" else 2.0 if family == "attention" else None
    for name, bar in bars.items():
        part = parts[name]
        if bar is not None and part is not None and 100 * (part - score) > bar:
            yield f"{100 * (part - score):.1f} points below the {name}"


def shown(value: float | None) -> str:
    """Return a figure with four decimals; nothing where there is none."""
    return "" if value is None else f"{value:.4f}"


if __name__ == "__main__":
    main()
