"""A miniature of perf/hostile.py: mutated files end well or as one line."""

from __future__ import annotations

import csv
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

PERF = Path(__file__).parents[2] / "perf"
MODULES = ("hostile", "_hostile_run", "_hostile_files", "_hostile_cases")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    sys.path.insert(0, str(PERF))
    try:
        import hostile

        hostile.warm_up(tmp_path_factory.mktemp("warm"))
        yield hostile
    finally:
        sys.path.remove(str(PERF))
        for name in MODULES:
            sys.modules.pop(name, None)


FORMATS = ("png", "jpg", "gif", "tiff", "wav", "flac", "ogg", "npy", "csv", "jsonl", "parquet")


def test_sixty_mutated_files_end_well_or_as_one_line(hostile: ModuleType, tmp_path: Path) -> None:
    files = hostile.originals()
    donors = [contents for group in files.values() for contents in group]
    outcomes = []
    for number, name in enumerate((*FORMATS, "yaml")):
        draw = random.Random(number)
        for count in range(5):
            root = tmp_path / f"{name}-{count}"
            root.mkdir()
            index = draw.randrange(len(files[name]))
            _, data = hostile.mutate(files[name][index], donors, draw)
            work = hostile._opener(name, index, data, tmp_path)(root)
            outcomes.append((name, hostile.run(work, root)))
    assert not [(name, x.message) for name, x in outcomes if x.result == "fault"]
    assert sum(x.result == "refused" for _, x in outcomes) > 20  # some mutations do no harm
    assert any(x.result == "ok" for _, x in outcomes)


def test_what_it_must_notice_is_noticed(
    hostile: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash, a hang, another exception, memory, a file outside, a message of several lines."""
    import os
    import time

    run_module = sys.modules["_hostile_run"]
    secret = hostile.write_secrets(tmp_path / "secret")
    root = tmp_path / "root"
    root.mkdir()
    monkeypatch.setattr(run_module, "SECONDS", 1)
    monkeypatch.setattr(run_module, "BUDGET", 300 << 20)

    def lines() -> None:
        raise run_module.FusionZooError("two\nlines")

    def refused() -> None:
        raise run_module.FusionZooError("one line")

    expected = {
        "crash: SIGABRT": os.abort,
        "hang: more than": lambda: time.sleep(60),
        "ZeroDivisionError": lambda: 1 / 0,
        "MemoryError": lambda: bytearray(1 << 36),
        "opened outside of the root": (secret / "secret.txt").read_text,
        "read a file outside": lambda: ["a text with " + run_module.SECRET],
        "not one line": lines,
    }
    for words, work in expected.items():
        outcome = hostile.run(work, root)
        assert (outcome.result, words in outcome.message) == ("fault", True), outcome
    assert hostile.run(refused, root).result == "refused"
    assert hostile.run(lambda: (root / "a").write_text("x"), root).result == "ok"


def test_the_table_counts_every_file_and_names_faults(hostile: ModuleType, tmp_path: Path) -> None:
    job = hostile.Job("png", "mutated", "flip 3", lambda root: None)
    results = [
        (job, hostile.Outcome("ok", "", 0.5, 10.0)),
        (job, hostile.Outcome("fault", "crash: SIGSEGV", 1.5, 20.0)),
    ]
    assert hostile.write_table(results, tmp_path / "a.csv") == 1
    (row,) = csv.DictReader((tmp_path / "a.csv").read_text().splitlines())
    assert (row["files"], row["ok"], row["refused"], row["faults"]) == ("2", "1", "0", "1")
    assert row["named"] == "flip 3: crash: SIGSEGV" and row["most_mb"] == "20"


def test_the_stored_table_has_two_thousand_mutations_and_no_fault(hostile: ModuleType) -> None:
    rows = list(csv.DictReader(hostile.OUT.read_text().splitlines()))
    files = {source: 0 for source in ("mutated", "hand-made")}
    for row in rows:
        files[row["source"]] += int(row["files"])
        assert row["faults"] == "0", row["named"]
    assert files["mutated"] >= 2000 and files["hand-made"] >= 200
    assert {row["format"] for row in rows} >= set(hostile.FORMATS)
