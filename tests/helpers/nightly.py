"""The tests that `.ci/run` leaves out, and what each last showed: results/nightly.csv.

    cd tests && python -m helpers.nightly run --minutes 20    # `make nightly`
    cd tests && python -m helpers.nightly status --check      # `make nightly-status`, a release
    cd tests && python -m helpers.nightly landing             # `.ci/run`

`run` takes what is most due until the minutes are full: what failed, what never ran, what a change
since its row's commit can reach (helpers/reach.py), the oldest first, what is a week old. The next
call goes on from there. `landing` runs the slow tests that this landing's changes reach, the
cheapest first by their recorded seconds, and names the rest.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest

from helpers import reach

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "results" / "nightly.csv"
COLUMNS = ("part", "test", "outcome", "seconds", "figures", "commit", "date", "versions")
VERSIONS = ("torch", "torchvision", "transformers", "timm")
WEEK = timedelta(days=7)
URGENCY = ("failed", "never ran", "changed", "a week old")
Row = dict[str, str]


@dataclass(frozen=True)
class Part:
    """Tests that run in one environment."""

    name: str
    selection: tuple[str, ...]  # pytest's arguments
    workers: int = 2
    by_file: bool = False  # a row for each file, not for each test
    assumed: float = 10.0  # seconds of a test that never ran
    variables: Mapping[str, str] = field(default_factory=dict)
    extra: str = ""  # installed besides, in an environment of its own


SLOW = Part("slow", ("-m", "(slow or needs) and not nightly"))
PARTS = (
    SLOW,
    # Measurements, one at a time; in a worker, so that one that crashes stops no other.
    Part("nightly", ("-m", "nightly", "-o", "faulthandler_timeout=3700"), 1, assumed=60.0),
    # No test may depend on the last bits of one CPU. Two files compare runs of one machine with
    # each other, which takes most of the time.
    Part(
        "older CPU",
        (
            *("tests/benchmark", "tests/evaluation"),
            "--ignore=tests/benchmark/test_benchmark.py",
            "--ignore=tests/benchmark/test_api.py",
        ),
        by_file=True,
        variables={"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    ),
    # Beside it torchaudio can be imported.
    Part("oldest torch", (), by_file=True, extra="torchaudio"),
)
BY_NAME = {part.name: part for part in PARTS}


# ---- what pytest calls (tests/conftest.py)


def record(reports: Sequence[pytest.TestReport], path: Path, part: Part) -> None:
    """Write a row for each test, or file, that ran; rows of others stay.

    Figures are what a test gave to pytest's `record_property`, as `name=value`, or why it was
    skipped. Seconds are those of its set-up and end, too.
    """
    by_test: dict[str, list[pytest.TestReport]] = defaultdict(list)
    for report in reports:
        by_test[_file(report.nodeid) if part.by_file else report.nodeid].append(report)
    git = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    installed = f"python {platform.python_version()} "
    installed += " ".join(f"{name} {version(name)}" for name in VERSIONS)
    rows = read(path)
    for test, of_test in by_test.items():
        skipped = [] if part.by_file else [x for x in of_test if x.skipped]
        worst = next((x for x in of_test if x.failed), (skipped or of_test)[0])
        figures = {f"{name}={value}": None for x in of_test for name, value in x.user_properties}
        figures |= {x.longrepr[2]: None for x in skipped if isinstance(x.longrepr, tuple)}
        rows[part.name, test] = {
            "part": part.name,
            "test": test,
            "outcome": worst.outcome,
            "seconds": f"{sum(x.duration for x in of_test):.1f}",
            "figures": " ".join(figures),
            "commit": commit,
            "date": date.today().isoformat(),
            "versions": installed,
        }
    write(rows, path)


def read(path: Path = TABLE) -> dict[tuple[str, str], Row]:
    """Return the rows by part and test."""
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        return {(row["part"], row["test"]): row for row in csv.DictReader(file)}


def write(rows: Mapping[tuple[str, str], Row], path: Path = TABLE) -> None:
    """Write rows in order."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[key] for key in sorted(rows))


# ---- what is due


@dataclass(frozen=True)
class Due:
    """A test of a part, or a file of one by files, and why it has to run."""

    part: Part
    test: str
    why: str  # of URGENCY, or "" if it need not
    seconds: float
    date: str = ""  # when it last ran


def all_of(part: Part, rows: Mapping[tuple[str, str], Row], today: date) -> list[Due]:
    """Return every test of a part with why it is due; collects them, which takes 20 s."""
    return [_due(part, test, rows.get((part.name, test)), today) for test in _collected(part)]


def _due(part: Part, test: str, row: Row | None, today: date) -> Due:
    if row is None:
        return Due(part, test, "never ran", part.assumed)
    if row["outcome"] == "failed":
        why = "failed"
    elif _file(test) in _changed(row["commit"]):
        why = "changed"
    else:
        why = "a week old" if _is_old(row["date"], today) else ""
    return Due(part, test, why, float(row["seconds"]), row["date"])


def _is_old(day: str, today: date) -> bool:
    return today - date.fromisoformat(day) > WEEK


@cache
def _changed(commit: str) -> set[str]:
    """Return the test files that changes since a commit reach; all, where nobody knows it."""
    try:
        return _reached_since(commit.removesuffix("-dirty"))
    except subprocess.CalledProcessError:
        return reach.reached(reach.EVERYTHING)


def _reached_since(revision: str) -> set[str]:
    """Return the test files that changes since a revision reach; the table's own reach none."""
    return reach.reached(reach.changed_since(revision) - {str(TABLE.relative_to(ROOT))})


def _collected(part: Part) -> list[str]:
    command = [sys.executable, "-P", "-m", "pytest", "--collect-only", "-q", "-n", "0"]
    done = subprocess.run(
        [*command, *part.selection], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"the tests of '{part.name}' cannot be collected:\n{done.stdout[-4000:]}")
    tests = [line for line in done.stdout.splitlines() if "::" in line]
    return list(dict.fromkeys(map(_file, tests))) if part.by_file else tests


def _file(test: str) -> str:
    return test.partition("::")[0]


def that_fit(tests: Iterable[Due], seconds: float) -> list[Due]:
    """Return the first tests that take so long together, each on one of its part's workers; one
    that alone takes longer stands alone."""
    chosen, total = [], 0.0
    for due in tests:
        total += due.seconds / due.part.workers
        if chosen and total > seconds:
            break
        chosen.append(due)
    return chosen


# ---- commands


def run(minutes: float) -> int:
    """Run what is most due and record it; return 1 if something failed."""
    rows = read()
    tests = [x for part in PARTS for x in all_of(part, rows, date.today()) if x.why]
    tests.sort(key=lambda x: (URGENCY.index(x.why), x.date, PARTS.index(x.part), _file(x.test)))
    chosen = that_fit(tests, 60 * minutes)
    print(f"the night: {_counts(tests)}; this run takes {_counts(chosen)}", flush=True)
    failed = False
    for part in PARTS:
        if names := [x.test for x in chosen if x.part is part]:
            failed |= bool(_pytest(part, names, f"--record={TABLE}"))
    if left := len(tests) - len(chosen):
        print(f"{left} are due still, about {_minutes(tests[len(chosen) :])}: `make nightly`")
    return int(failed)


def status(check: bool) -> int:
    """Say what has not passed since which commit; with `check`, refuse to release over it."""
    today = date.today()
    rows, refused = read(), False
    for part in PARTS:
        tests = all_of(part, rows, today)
        outcomes = Counter(rows[part.name, x.test]["outcome"] for x in tests if not x.why)
        passed, skipped = outcomes["passed"], outcomes["skipped"]
        print(f"{part.name}: {len(tests)} tests, {passed} passed, {skipped} skipped")
        for why in URGENCY:
            since: dict[str, list[Due]] = defaultdict(list)
            for due in (x for x in tests if x.why == why):
                row = rows.get((part.name, due.test))
                since[f" since {row['commit']} ({row['date']})" if row else ""].append(due)
            for words, those in since.items():
                files = Counter(_file(x.test) for x in those)
                shown = ", ".join(f"{name} ({n})" for name, n in files.most_common(4))
                more = f" and {len(files) - 4} files more" if len(files) > 4 else ""
                print(f"  {why}{words}: {len(those)}, {_minutes(those)}: {shown}{more}")
        refused |= any(x.why in ("failed", "never ran") or _is_old(x.date, today) for x in tests)
    if check and refused:
        print("error: something failed, never ran or last ran over a week ago; run `make nightly`")
    return int(check and refused)


def landing(revision: str, seconds: float) -> int:
    """Run the slow tests that changes since a revision reach, as many of the cheapest as fit."""
    rows, today = read(), date.today()
    files = _reached_since(revision)
    tests = [x for x in all_of(SLOW, rows, today) if _file(x.test) in files]
    tests.sort(key=lambda x: x.seconds)
    chosen = that_fit(tests, seconds / SLOW.workers)
    left = Counter(_file(x.test) for x in tests[len(chosen) :])
    names = ", ".join(f"{name} ({n})" for name, n in sorted(left.items()))
    print(f"slow tests that changes since {revision[:8]} reach: {_counts(tests)}; this run takes")
    print(f"{_counts(chosen)}; left to the night: {names or 'none'}", flush=True)
    return _pytest(SLOW, [x.test for x in chosen]) if chosen else 0


def _counts(tests: Sequence[Due]) -> str:
    return f"{len(tests)} tests of {_minutes(tests)}"


def _minutes(tests: Iterable[Due]) -> str:
    return f"{sum(x.seconds / x.part.workers for x in tests) / 60:.0f} min"


def _pytest(part: Part, tests: Sequence[str], *options: str) -> int:
    """Run some tests of a part; return pytest's exit code."""
    with tempfile.TemporaryDirectory() as folder:
        only = Path(folder) / "only"
        only.write_text("".join(f"{test}\n" for test in tests), encoding="utf-8")
        selection = [x for x in part.selection if not x.startswith("tests/")]
        command = [_python(part), "-P", "-m", "pytest", "-q", "--durations", "25", *selection]
        command += ["-n", str(part.workers), f"--part={part.name}", f"--only={only}", *options]
        command += sorted({_file(test) for test in tests})
        variables = os.environ | part.variables
        return subprocess.run(command, check=False, cwd=ROOT, env=variables).returncode


def _python(part: Part) -> str:
    """Return the interpreter of a part; one with an extra has an environment in build/."""
    if not part.extra:
        return sys.executable
    folder = ROOT / "build" / part.name.replace(" ", "-")
    python = str(folder / "bin" / "python")
    subprocess.run(["uv", "venv", "--quiet", "--clear", str(folder)], check=True)
    install = ["uv", "pip", "install", "--quiet", "--python", python]
    subprocess.run([*install, "-e", f"{ROOT}[all,loops,test,{part.extra}]"], check=True)
    return python


def main() -> int:
    """Run a command of this module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    night = commands.add_parser("run", help="run what is most due, and record it")
    night.add_argument("--minutes", type=float, default=20)
    state = commands.add_parser("status", help="say what has not passed since which commit")
    state.add_argument("--check", action="store_true", help="exit 1 if a release has to wait")
    of_change = commands.add_parser("landing", help="run the slow tests that changes reach")
    of_change.add_argument("--since", help="a revision; main, or three hours before HEAD")
    of_change.add_argument("--seconds", type=float, default=600, help="of tests, at most")
    parsed = parser.parse_args()
    if parsed.command == "run":
        return run(parsed.minutes)
    if parsed.command == "status":
        return status(parsed.check)
    return landing(parsed.since or reach.before_this_landing(), parsed.seconds)


if __name__ == "__main__":
    sys.exit(main())
