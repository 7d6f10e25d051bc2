"""Mutated and hand-made files end well or as one line; nightly, all of them, in nine minutes.

More than 2,000 seeded mutations and 400 hand-made files over all formats, parsers and the files of
a model folder (tests/helpers/hostile). Each is opened in a process of its own, with a limit on
memory and time, the way a user's file is: a manifest of it is opened, decoded and made a batch, or
a recipe is read, or a model folder loaded and asked. What is read from spreadsheets is also
compared with what was written. A crash, a hang, another exception, wrong values, memory beyond the
budget, or a file opened outside of the root is a fault.
`python -m pytest -m nightly -n 0 tests/datasets/test_hostile.py` writes results/hostile.csv.
"""

from __future__ import annotations

import csv
import os
import random
import time
from collections import Counter
from pathlib import Path

import pytest

from fusionzoo.errors import FusionZooError
from helpers.hostile import run as run_module
from helpers.hostile.files import FORMATS, mutate, originals
from helpers.hostile.jobs import Job, _opener, make_jobs, run_jobs, warm_up, write_secrets
from helpers.hostile.run import Outcome, run
from helpers.hostile.table import OUT, write_table

QUICK = ("png", "jpg", "gif", "tiff", "wav", "flac", "ogg", "npy", "csv", "jsonl", "parquet")


@pytest.fixture(scope="module", autouse=True)
def warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    warm_up(tmp_path_factory.mktemp("warm"))


def test_sixty_mutated_files_end_well_or_as_one_line(tmp_path: Path) -> None:
    files = originals()
    donors = [contents for group in files.values() for contents in group]
    outcomes = []
    for number, name in enumerate((*QUICK, "yaml")):
        draw = random.Random(number)
        for count in range(5):
            root = tmp_path / f"{name}-{count}"
            root.mkdir()
            index = draw.randrange(len(files[name]))
            _, data = mutate(files[name][index], donors, draw)
            work = _opener(name, index, data, tmp_path)(root)
            outcomes.append((name, run(work, root)))
    assert not [(name, x.message) for name, x in outcomes if x.result == "fault"]
    assert sum(x.result == "refused" for _, x in outcomes) > 20  # some mutations do no harm
    assert any(x.result == "ok" for _, x in outcomes)


def test_what_it_must_notice_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash, a hang, another exception, memory, a file outside, a message of several lines."""
    secret = write_secrets(tmp_path / "secret")
    root = tmp_path / "root"
    root.mkdir()
    monkeypatch.setattr(run_module, "SECONDS", 1)
    monkeypatch.setattr(run_module, "BUDGET", 300 << 20)

    def lines() -> None:
        raise FusionZooError("two\nlines")

    def refused() -> None:
        raise FusionZooError("one line")

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
        outcome = run(work, root)
        assert (outcome.result, words in outcome.message) == ("fault", True), outcome
    assert run(refused, root).result == "refused"
    assert run(lambda: (root / "a").write_text("x"), root).result == "ok"


def test_the_table_counts_every_file_and_names_faults(tmp_path: Path) -> None:
    job = Job("png", "mutated", "flip 3", lambda root: None)
    results = [
        (job, Outcome("ok", "", 0.5, 10.0)),
        (job, Outcome("fault", "crash: SIGSEGV", 1.5, 20.0)),
    ]
    assert write_table(results, tmp_path / "a.csv") == 1
    (row,) = csv.DictReader((tmp_path / "a.csv").read_text().splitlines())
    assert (row["files"], row["ok"], row["refused"], row["faults"]) == ("2", "1", "0", "1")
    assert row["named"] == "flip 3: crash: SIGSEGV" and row["most_mb"] == "20"


def test_the_stored_table_has_two_thousand_mutations_and_no_fault() -> None:
    rows = list(csv.DictReader(OUT.read_text().splitlines()))
    files = {source: 0 for source in ("mutated", "hand-made")}
    for row in rows:
        files[row["source"]] += int(row["files"])
        assert row["faults"] == "0", row["named"]
    assert files["mutated"] >= 2000 and files["hand-made"] >= 200
    assert {row["format"] for row in rows} >= set(FORMATS)


@pytest.mark.nightly
def test_all_files_end_well_or_as_one_line_and_the_table_says_so(tmp_path: Path) -> None:
    results = run_jobs(list(make_jobs(tmp_path, per_format=100, seed=0)), tmp_path)
    assert write_table(results, OUT) == 0, OUT
    counts = Counter(job.format for job, _ in results)
    assert counts.keys() >= {*FORMATS}
