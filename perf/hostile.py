"""Open mutated and hand-made hostile files; each must end well or be refused in one line.

`python perf/hostile.py` opens 2,300 seeded mutations and 500 hand-made files over all formats,
parsers and the files of a model folder in nine minutes, each in a process of its own, with a limit
on memory and time, the way a user's file is: a manifest of it is opened, decoded and made a batch,
or a recipe is read, or a model folder loaded and asked. What is read from tars, spreadsheets, the
feature cache, and by runs whose data changed is also compared with what was written. A crash, a
hang, another exception, wrong values, memory beyond the budget, or a file opened outside of the
root is a fault; `--sources planted` runs faults on purpose, all of which must be noticed.
Writes results/hostile.csv, a row for each format and source; exits with 1 where there is a fault.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from _hostile.files import FORMATS, ONLY_BY_HAND
from _hostile.jobs import Job, made_by_hand, mutated, planted, run_jobs
from _hostile.run import Outcome

OUT = Path(__file__).parents[1] / "results" / "hostile.csv"
SOURCES = ("mutated", "hand-made", "planted")
COLUMNS = (
    "format",
    "source",
    "files",
    "ok",
    "refused",
    "faults",
    "most_seconds",
    "most_mb",
    "named",
)


def write_table(results: list[tuple[Job, Outcome]], path: Path) -> int:
    """Write a row per format and source; return the number of faults."""
    rows: list[tuple[Any, ...]] = []
    for format, source in dict.fromkeys((job.format, job.source) for job, _ in results):
        group = [(j, o) for j, o in results if (j.format, j.source) == (format, source)]
        counts = Counter(outcome.result for _, outcome in group)
        faults = [f"{job.name}: {o.message}" for job, o in group if o.result == "fault"]
        most = [max(getattr(o, x) for _, o in group) for x in ("seconds", "megabytes")]
        numbers = (len(group), counts["ok"], counts["refused"], counts["fault"])
        rows.append(
            (format, source, *numbers, f"{most[0]:.2f}", f"{most[1]:.0f}", "; ".join(faults))
        )
    rows.sort(key=lambda row: (row[1] != "mutated", row[0]))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([COLUMNS, *rows])
    return sum(outcome.result == "fault" for _, outcome in results)


def main() -> int:
    """Open the files and write the table; return 1 where there is a fault."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--per_format", type=int, default=100, help="mutated files of each format")
    parser.add_argument("--seed", type=int, default=0, help="of the mutations")
    parser.add_argument(
        "--formats", nargs="*", default=(*FORMATS, *ONLY_BY_HAND), help="such as png"
    )
    parser.add_argument("--sources", nargs="*", default=SOURCES[:2], choices=SOURCES)
    parser.add_argument("--out", type=Path, default=OUT)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        makers = {
            "mutated": lambda: mutated(folder, flags.formats, flags.per_format, flags.seed),
            "hand-made": lambda: made_by_hand(folder, flags.formats),
            "planted": lambda: planted(folder),
        }
        jobs = [job for source in flags.sources for job in makers[source]()]
        return int(write_table(run_jobs(jobs, folder), flags.out) > 0)


if __name__ == "__main__":
    sys.exit(main())
