"""Open mutated and hand-made hostile files: `python perf/hostile.py` writes results/hostile.csv.

More than 2,000 seeded mutations and 500 hand-made files over all formats, parsers and the files of
a model folder (tests/helpers/hostile). Each is opened in a process of its own, with a limit on
memory and time, the way a user's file is: a manifest of it is opened, decoded and made a batch, or
a recipe is read, or a model folder loaded and asked. What is read from tars, spreadsheets, the
feature cache, and by runs whose data changed is also compared with what was written. Each must end
well or as one line (`FusionZooError`); a crash, a hang, another exception, wrong values, memory
beyond the budget, or a file opened outside of the root is a fault, which is named, and makes the
script fail. Takes about nine minutes on two cores; `pytest -m slow tests/datasets/test_hostile.py`
opens a sample.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from helpers.hostile.jobs import Job
    from helpers.hostile.run import Outcome

ROOT = Path(__file__).parents[1]
OUT = ROOT / "results" / "hostile.csv"
PER_FORMAT = 100  # mutations
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


def main() -> int:
    """Run all files; return 1 if any is a fault."""
    sys.path.insert(0, str(ROOT / "tests"))
    from helpers.hostile.jobs import make_jobs, run_jobs

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a format")
    parser.add_argument("--per-format", type=int, default=PER_FORMAT)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="hostile-") as folder:
        jobs = list(make_jobs(Path(folder), options.per_format, options.seed))
        jobs = [job for job in jobs if options.only in ("", job.format)]
        results = run_jobs(jobs, Path(folder))
    faults = write_table(results, options.out)
    total = Counter(outcome.result for _, outcome in results)
    seconds = f"{time.monotonic() - start:.0f} s, {sum(os.times()[:4]):.0f} s of CPU time"
    print(f"{len(results)} files, {dict(total)}, {seconds}")
    return 1 if faults else 0


def write_table(results: list[tuple[Job, Outcome]], path: Path) -> int:
    """Write a row per format and source, others stay (`--only`); return the number of faults."""
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
    done = {(str(row[0]), str(row[1])) for row in rows}
    stored = path.read_text(encoding="utf-8").splitlines()[1:] if path.is_file() else []
    others = [tuple(row) for row in csv.reader(stored) if (row[0], row[1]) not in done]
    rows = sorted([*rows, *others], key=lambda row: (row[1] != "mutated", row[0]))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([COLUMNS, *rows])
    return sum(outcome.result == "fault" for _, outcome in results)


if __name__ == "__main__":
    sys.exit(main())
