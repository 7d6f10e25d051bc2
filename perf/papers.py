"""Redo the papers whose data files are in a folder: `python perf/papers.py --data FOLDER`.

Writes results/papers.csv, a row for each paper, in per cent; runs that are finished in runs/papers
are read. `python perf/papers.py ecml-cub --data FOLDER` redoes one; rows of others stay. On one
core a seed takes half a minute (`ecml-cub`) to minutes (`tmc-handwritten`).
"""

from __future__ import annotations

import argparse
import csv
import subprocess
from pathlib import Path
from typing import Any

from fusionzoo.config.flags import papers
from fusionzoo.tools.reproduce import PaperFigures, Reproduction, read_paper, reproduce

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "results" / "papers.csv"


def main() -> None:
    """Redo all papers whose files are there, and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="papers; none: all")
    parser.add_argument("--data", type=Path, default=Path("runs/papers-data"))
    parser.add_argument("--seeds", type=int, help="default: those of the authors' code, or 5")
    parser.add_argument("--out", type=Path, default=Path("runs/papers"))
    parsed = parser.parse_args()
    with TABLE.open(newline="") as file:
        rows = {row["name"]: row for row in csv.DictReader(file)}
    for name in parsed.names or papers():
        missing = [
            x.name for x in read_paper(name)[1].files if not (parsed.data / x.name).is_file()
        ]
        if missing:
            print(f"{name}: left out, {parsed.data} has no {', '.join(missing)}")
            continue
        done = reproduce(name, parsed.data, seeds=parsed.seeds, out=parsed.out / name)
        if done.exit_code:
            raise SystemExit(done.exit_code)
        rows[name] = row_of(done)
    with TABLE.open("w", newline="") as file:
        writer = csv.DictWriter(file, next(iter(rows.values())), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[name] for name in sorted(rows))


def row_of(done: Reproduction) -> dict[str, Any]:
    """Return a row of the table."""
    paper, (low, high) = done.paper, done.interval
    return {
        "name": done.name,
        "metric": paper.metric,
        **columns("published", paper.published),
        **columns("authors", None if paper.authors is None else paper.authors.figures),
        **columns("ours", done.ours),
        "low": f"{low:.2f}",
        "high": f"{high:.2f}",
        "verdict": done.verdict,
        "commit": commit(),
        "command": f"fusionzoo reproduce {done.name} --data FOLDER --seeds {len(done.values)}",
    }


def columns(side: str, figures: PaperFigures | None) -> dict[str, Any]:
    """Return mean, standard deviation and number of trainings; empty where not known."""
    values = (None,) * 3 if figures is None else (figures.mean, figures.spread, figures.runs)
    mean, spread, runs = ("" if x is None else round(x, 2) for x in values)
    return {side: mean, f"{side}_sd": spread, f"{side}_n": runs}


def commit() -> str:
    """Return the short name of the commit, with `-dirty` where the tree has changes."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
