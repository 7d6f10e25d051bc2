"""Measure every fusion at its default settings on one data set: `python perf/zoo.py digits`.

Five folds, one seed, no tuning, each model trained anew on train and validation. A command that
is stopped goes on where it was. The report is kept in results/zoo/<set>, and results/zoo.csv has a
row for each fusion and baseline of every set; results/benchmark/zoo ranks the fusions over
all sets. `python docs/make.py` then puts the figures on the cards.

`--strategies` measures `concat` and `gmu` with each training strategy instead, and keeps the report
in results/strategies/<set> and results/strategies.csv. Encoders are frozen, so those strategies are
left out that change encoders alone, and `umt`, which needs teachers; models are not trained anew,
as some strategies validate on samples apart.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from fusionzoo.benchmark.candidates import LOGISTIC
from fusionzoo.training.balance import BALANCE

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
KEPT, RANKS = RESULTS / "zoo", RESULTS / "benchmark/zoo"
KEPT_OF_STRATEGIES = RESULTS / "strategies"
TABLES = {KEPT: RESULTS / "zoo.csv", KEPT_OF_STRATEGIES: RESULTS / "strategies.csv"}
SETTINGS = ("--folds", "5", "--seeds", "1", "--tune", "0")
SETTINGS += ("--controls", "false", "--corruptions", "none", "--baselines", "alone,linear")
STRATEGIES: Any = BALANCE
NEEDS_TEACHERS = "umt"
FILES = ("summary.json", "costs.csv", "config.yaml")
FIGURES = ("low", "high", "macro_f1", "ece_debiased", "missing_area")  # of the leaderboard
GAIN = ("gain_difference", "gain_low", "gain_high")  # over the best single modality
COSTS = ("parameters", "macs", "seconds", "latency_ms")
COLUMNS = ("set", "candidate", "kind", "accuracy", *FIGURES, *GAIN, "over_linear", *COSTS, "commit")


def main() -> None:
    """Run one benchmark, keep its report, write the table of all, and their ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "set", nargs="?", help="a file in configs/benchmarks; none: the tables alone"
    )
    parser.add_argument("--strategies", action="store_true", help="of training, not fusions")
    parser.add_argument("--out", type=Path, default=ROOT / "report")
    parsed = parser.parse_args()
    kept = KEPT_OF_STRATEGIES if parsed.strategies else KEPT
    if parsed.set:
        candidates = of_strategies() if parsed.strategies else ("--fusions", "all")
        config, out = f"configs/benchmarks/{parsed.set}.yaml", parsed.out / kept.name / parsed.set
        command = [sys.executable, "benchmark.py", "--config", config, *SETTINGS, *candidates]
        subprocess.run([*command, "--out", str(out)], cwd=ROOT, check=True)
        keep(out, kept / parsed.set)
    with TABLES[kept].open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(row for folder in sorted(kept.iterdir()) for row in rows(folder))
    if parsed.strategies:
        return
    reports = ",".join(str(folder.relative_to(ROOT)) for folder in sorted(KEPT.iterdir()))
    command = [sys.executable, "benchmark.py", "--combine", reports, "--out", str(RANKS)]
    subprocess.run(command, cwd=ROOT, check=True)


def of_strategies() -> tuple[str, ...]:
    """Return the settings of a benchmark of all strategies that can learn here."""
    names = [x for x in STRATEGIES if not STRATEGIES[x].cls.encoders_only and x != NEEDS_TEACHERS]
    return ("--fusions", "concat,gmu", "--balance", ",".join(["none", *names]), "--refit", "false")


def keep(report: Path, folder: Path) -> None:
    """Copy what the table is made of, and the commit that was measured."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copy(report / name, folder)
    commit = subprocess.check_output(["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, text=True)
    (folder / "commit").write_text(commit)


def rows(folder: Path) -> list[dict[str, str]]:
    """Return a row for each line of a report's leaderboard, the best first."""
    lines = json.loads((folder / "summary.json").read_text())["leaderboard"]
    with (folder / "costs.csv").open() as file:
        costs = {row["candidate"]: row for row in csv.DictReader(file)}
    linear = next(line["accuracy"] for line in lines if line["candidate"] == LOGISTIC)
    commit = (folder / "commit").read_text().strip()
    table = []
    for line in lines:
        figures = {name: line.get(name) for name in ("accuracy", *FIGURES, *GAIN)}
        figures["over_linear"] = line["accuracy"] - linear
        shown = {x: "" if y is None else f"{y:.4f}" for x, y in figures.items()}
        shown |= {name: costs.get(line["candidate"], {}).get(name, "") for name in COSTS}
        named = {"set": folder.name, "candidate": line["candidate"], "kind": line["kind"]}
        table.append({**named, **shown, "commit": commit})
    return table


if __name__ == "__main__":
    main()
