"""results/hostile.csv: how the files of a hostile run ended, a row for each format and source."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path
from typing import Any

from helpers.hostile.jobs import Job
from helpers.hostile.run import Outcome

OUT = Path(__file__).parents[3] / "results" / "hostile.csv"
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
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])
    return sum(outcome.result == "fault" for _, outcome in results)
