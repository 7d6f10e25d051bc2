"""What a change reaches, and what of the night is due (helpers/reach.py, helpers/nightly.py)."""

from __future__ import annotations

import csv
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest

from helpers import nightly, reach

ROOT = Path(__file__).parents[1]
TODAY = date(2027, 1, 31)
CONTRACT, SEARCH = "tests/fusion/test_contract.py", "tests/tools/test_search.py"
SUITE = "tests/test_suite.py"


@pytest.mark.parametrize(
    ("changed", "test", "is_reached"),
    [
        ("fusion/late/qmf.py", CONTRACT, True),  # found by its file name in a linked folder
        ("fusion/late/qmf.py", SUITE, False),
        ("fusionzoo/ground/registry.py", CONTRACT, True),
        ("fusionzoo/tools/search/vectors.py", SEARCH, True),
        ("fusionzoo/tools/search/vectors.py", CONTRACT, False),
        ("fusionzoo/benchmark/report/page.html", "tests/benchmark/test_page.py", True),
        ("fusionzoo/machine/distributed.py", "tests/training/test_gradients.py", True),
        ("train.py", "tests/training/test_interrupted_runs.py", True),  # by a helper's script
        ("fusionzoo/training/trainer.py", "tests/training/test_interrupted_runs.py", True),
        ("configs/stamps.yaml", "tests/test_readme.py", True),
        ("docs/data.md", "tests/test_docs.py", True),
        ("docs/data.md", CONTRACT, False),
        ("tests/helpers/planted.py", "tests/benchmark/test_page.py", True),
        ("tests/helpers/planted.py", CONTRACT, False),
        ("tests/helpers/leftovers.py", CONTRACT, True),  # of the conftest.py above it
        ("tests/benchmark/conftest.py", CONTRACT, False),
        ("pyproject.toml", CONTRACT, True),
    ],
)
def test_a_change_reaches_what_imports_or_names_its_file(
    changed: str, test: str, is_reached: bool
) -> None:
    assert (ROOT / changed).is_file()
    assert (test in reach.reached([changed])) == is_reached


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=A", "-c", "user.email=a@b.example")
    command = ["git", "-C", str(folder), *identity, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_a_landing_begins_where_main_was_left_or_three_hours_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach, "ROOT", tmp_path)
    git(tmp_path, "init", "--quiet", "--initial-branch", "main")
    commits = []
    for hour in ("08", "10", "12"):
        monkeypatch.setenv("GIT_COMMITTER_DATE", f"2027-01-31T{hour}:00:00")
        git(tmp_path, "commit", "--quiet", "--allow-empty", "--message", f"At {hour}")
        commits.append(git(tmp_path, "rev-parse", "HEAD"))
    assert reach.before_this_landing() == commits[0]
    git(tmp_path, "update-ref", "refs/remotes/origin/main", commits[1])
    assert reach.before_this_landing() == commits[1]
    (tmp_path / "new.py").write_text("")
    assert reach.changed_since(commits[1]) == {"new.py"}


def row(outcome: str, day: str, commit: str = "abc", seconds: str = "3.0") -> nightly.Row:
    return {"outcome": outcome, "date": day, "commit": commit, "seconds": seconds}


@pytest.mark.parametrize(
    ("last", "why"),
    [
        (None, "never ran"),
        (row("failed", "2027-01-31"), "failed"),
        (row("passed", "2027-01-31"), ""),
        (row("skipped", "2027-01-31"), ""),
        (row("passed", "2027-01-23"), "a week old"),
        (row("passed", "2027-01-31", "old"), "changed"),
        (row("failed", "2027-01-31", "old"), "failed"),
    ],
)
def test_a_test_is_due_by_its_last_row(
    last: nightly.Row | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nightly, "_changed", lambda commit: {CONTRACT} if commit == "old" else {})
    due = nightly._due(nightly.SLOW, f"{CONTRACT}::test_x[a::b]", last, TODAY)
    assert (due.why, due.seconds) == (why, 3.0 if last else nightly.SLOW.assumed)


def test_a_run_takes_what_fits_its_minutes_and_at_least_one() -> None:
    slow = [nightly.Due(nightly.SLOW, str(n), "changed", 10.0 * n) for n in range(1, 5)]
    assert nightly.that_fit(slow, 15) == slow[:2]  # 5 and 10 s on two workers
    assert nightly.that_fit(slow[3:], 1) == slow[3:]
    assert nightly.that_fit([], 1) == []


def test_what_ran_has_a_row_and_other_rows_stay(tmp_path: Path) -> None:
    table, only, tests = tmp_path / "nightly.csv", tmp_path / "only", tmp_path / "test_it.py"
    tests.write_text(
        "import pytest\n"
        "def test_one(record_property): record_property('gain', 2)\n"
        "@pytest.mark.parametrize('x', [1, 2])\n"
        "def test_two(x): assert x == 1\n"
        "@pytest.mark.needs('no_such_module')\n"
        "def test_three(): pass\n"
        "def test_four(): pass\n"
    )
    other = dict.fromkeys(nightly.COLUMNS, "") | {"part": "nightly", "test": "x::test_one"}
    nightly.write({("nightly", "x::test_one"): other}, table)
    name = f"{tests.relative_to(tmp_path)}::"
    only.write_text("".join(f"{name}{x}\n" for x in ("test_one", "test_two[2]", "test_three")))
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    command += ["--rootdir", str(tmp_path), "--confcutdir", str(ROOT / "tests"), str(tests)]
    command += ["-c", str(ROOT / "pyproject.toml"), "-p", "conftest", "--record", str(table)]
    command += ["--part", "slow", "--only", str(only), "-m", ""]
    done = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    with table.open(newline="") as file:
        rows = {(x["part"], x["test"].partition("::")[2]): x for x in csv.DictReader(file)}
    assert rows.pop(("nightly", "test_one")) == other
    assert {key[1]: x["outcome"] for key, x in rows.items()} == {
        "test_one": "passed",
        "test_two[2]": "failed",
        "test_three": "skipped",
    }
    assert rows["slow", "test_one"]["figures"] == "gain=2"
    assert "needs no_such_module" in rows["slow", "test_three"]["figures"]
    assert "torch " in rows["slow", "test_one"]["versions"]
