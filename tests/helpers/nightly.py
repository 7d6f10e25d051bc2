"""`--record FILE.csv`: keep what each test last showed; `make nightly` does so."""

from __future__ import annotations

import csv
import datetime
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

COLUMNS = ("test", "outcome", "seconds", "figures", "commit", "date")


def record(reports: Sequence[pytest.TestReport], path: Path) -> None:
    """Write a row for each test that ran; rows of other tests stay.

    Figures are what a test gave to pytest's `record_property`, as `name=value`.
    """
    rows: dict[str, dict[str, object]] = {}
    if path.exists():
        with path.open(newline="") as file:
            rows = {row["test"]: dict(row) for row in csv.DictReader(file)}
    git = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    for report in reports:
        figures = " ".join(f"{name}={value}" for name, value in report.user_properties)
        rows[report.nodeid] = {
            "test": report.nodeid,
            "outcome": report.outcome,
            "seconds": round(report.duration),
            "figures": figures,
            "commit": commit,
            "date": datetime.date.today().isoformat(),
        }
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[test] for test in sorted(rows))
