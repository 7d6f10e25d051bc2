"""tests/helpers/results.py knows every table, and when its code has changed since."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from helpers import results

ROOT = Path(__file__).parents[2]


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one table, committed after its code."""
    monkeypatch.setattr(results, "ROOT", tmp_path)
    git(tmp_path, "init", "--quiet")
    commit(tmp_path, "code.py", "x = 1\n")
    commit(tmp_path, "results/table.csv", "seed,accuracy\n0,0.5\n")
    return tmp_path


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=A", "-c", "user.email=a@b.example")
    command = ["git", "-C", str(folder), *identity, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit(folder: Path, name: str, text: str) -> str:
    """Commit one file; return the commit's short name."""
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    git(folder, "add", name)
    git(folder, "commit", "--quiet", "--message", f"Change {name}")
    return git(folder, "rev-parse", "--short", "HEAD")


def test_every_table_has_a_command_and_code_that_exist() -> None:
    folder = ROOT / "results"
    tables = [*folder.glob("*.csv"), *(folder / "benchmark").iterdir()]
    assert len(tables) > 10
    listed = {table.path for table in results.TABLES}
    measured = {str(path.relative_to(folder)) for path in tables}
    assert measured - {*results.RETIRED, results.OF_TESTS} == listed
    log = (folder / "LOG.md").read_text()
    assert all(f"results/{name}" in log for name in results.RETIRED)
    for table in results.TABLES:
        words = shlex.split(table.command)
        assert words[0] == "python"
        script = () if words[1] == "-m" else (words[1],)
        for path in (*script, *table.code):
            assert (ROOT / path).exists(), path
        if words[1].startswith("perf/") and words[1] != "perf/recipes.py":
            assert f'"{table.path}"' in (ROOT / words[1]).read_text()
        if table.partial.endswith(".jsonl"):
            assert f'"{Path(table.partial).name}"' in (ROOT / words[1]).read_text()


def test_a_table_is_stale_once_its_code_changes(repository: Path) -> None:
    table = results.Table("table.csv", "python code.py", ("code.py",))
    assert not results.age(table).stale
    commit(repository, "other.py", "")
    assert not results.age(table).stale
    (repository / "code.py").write_text("x = 2\n")
    assert results.age(table).uncommitted
    commit(repository, "code.py", "x = 3\n")
    age = results.age(table)
    assert (age.commits_since, age.uncommitted, age.stale) == (1, False, True)


def test_a_commit_that_the_rows_name_counts_rather_than_the_table_s_own(repository: Path) -> None:
    measured_at = git(repository, "rev-parse", "--short", "HEAD")
    commit(repository, "code.py", "x = 2\n")
    commit(repository, "results/table.csv", f"seed,commit\n0,{measured_at}\n")
    age = results.age(results.Table("table.csv", "python code.py", ("code.py",)))
    assert (age.commit, age.commits_since) == (measured_at, 1)


def test_running_a_table_starts_anew_and_takes_over_the_report(repository: Path) -> None:
    (repository / "code.py").write_text(
        "from pathlib import Path\n"
        "out = Path('report/mine')\n"
        "out.mkdir(parents=True, exist_ok=True)\n"
        "old = (out / 'table.md').exists()\n"
        "(out / 'table.md').write_text('resumed' if old else 'new')\n"
        "(out / 'cells').write_text('')\n"
    )
    (repository / "results" / "mine").mkdir()
    written = repository / "results" / "mine" / "table.md"
    written.write_text("old")
    table = results.Table("mine", "python code.py", (), "report/mine", "report/mine")
    assert results.run(table, resume=False) == 0
    assert results.run(table, resume=False) == 0
    assert written.read_text() == "new"
    assert results.run(table, resume=True) == 0
    assert written.read_text() == "resumed"
    assert [path.name for path in written.parent.iterdir()] == ["table.md"]
