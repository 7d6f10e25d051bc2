"""Mutated and hand-made files end well or as one line: perf/hostile.py; nightly, all of them."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "results" / "hostile.csv"
QUICK = ("png", "jpg", "gif", "tiff", "wav", "flac", "ogg", "npy", "csv", "jsonl", "parquet")
PLANTED = (
    "abort: crash: SIGABRT",
    "sleep: hang: more than 2 s",
    "divide: ZeroDivisionError",
    "allocate: MemoryError",
    "open outside: opened outside of the root",
    "return outside: read a file outside of the root",
    "two lines: not one line",
)


def hostile(out: Path, *flags: str) -> tuple[int, list[dict[str, str]]]:
    """Run perf/hostile.py; return its exit code and the rows of its table."""
    command = [sys.executable, "perf/hostile.py", "--out", str(out), *flags]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    return code, list(csv.DictReader(out.read_text().splitlines()))


def test_sixty_mutated_files_end_well_or_as_one_line_and_planted_faults_are_noticed(
    tmp_path: Path,
) -> None:
    flags = ("--per_format", "5", "--formats", *QUICK, "yaml")
    code, (*rows, planted) = hostile(tmp_path / "a.csv", *flags, "--sources", "mutated", "planted")
    assert not [row["named"] for row in rows if row["faults"] != "0"]
    assert sum(int(row["files"]) for row in rows) == 60
    assert sum(int(row["refused"]) for row in rows) > 20  # some mutations do no harm
    assert any(row["ok"] != "0" for row in rows)
    assert [planted[x] for x in ("files", "ok", "refused", "faults")] == ["9", "1", "1", "7"]
    for message, words in zip(planted["named"].split("; "), PLANTED, strict=True):
        assert message.startswith(words)
    assert code == 1


def test_the_stored_table_has_two_thousand_mutations_and_no_fault() -> None:
    rows = list(csv.DictReader(TABLE.read_text().splitlines()))
    files = {source: 0 for source in ("mutated", "hand-made")}
    for row in rows:
        files[row["source"]] += int(row["files"])
        assert row["faults"] == "0", row["named"]
    assert files["mutated"] >= 2000 and files["hand-made"] >= 200
    formats = {row["format"] for row in rows}
    assert formats >= {*QUICK, "config.json", "tar", "pickle", "cache", "resume", "evaluation"}


@pytest.mark.nightly
def test_all_files_end_well_or_as_one_line_and_the_table_says_so() -> None:
    code, rows = hostile(TABLE)
    assert code == 0, [row["named"] for row in rows if row["faults"] != "0"]
