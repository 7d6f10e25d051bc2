"""perf/_timing.py: ratios of CPU time with their quartiles."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

PERF = Path(__file__).parents[2] / "perf"


@pytest.fixture
def timing(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """perf/_timing.py, as the scripts beside it import it."""
    monkeypatch.syspath_prepend(PERF)
    import _timing

    yield _timing
    sys.modules.pop("_timing")


def spin(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_waiting_does_not_count(timing: ModuleType) -> None:
    assert timing.seconds(lambda: (spin(0.02), time.sleep(0.2))) < 0.15


def test_the_processes_that_a_work_starts_count(timing: ModuleType) -> None:
    code = "import time\nwhile time.process_time() < 0.1: pass"
    command = [sys.executable, "-S", "-c", code]
    assert timing.seconds(lambda: subprocess.run(command, check=True)) >= 0.1


def test_works_take_turns_whose_direction_changes_after_a_round_that_does_not_count(
    timing: ModuleType,
) -> None:
    calls: list[str] = []
    works = {name: lambda name=name: calls.append(name) for name in "ab"}
    times = timing.interleaved(works, rounds=2)
    assert "".join(calls) == "abbaab"
    assert [len(spent) for spent in times.values()] == [2, 2]


def test_a_run_whose_quartiles_are_far_apart_says_so(
    timing: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    steady = timing.compare([1.02, 1.03, 1.01, 1.02, 9.0], [1.0] * 5)
    assert (steady["quartile_low"], steady["ratio"], steady["quartile_high"]) == (1.02, 1.02, 1.03)
    assert not capsys.readouterr().err
    timing.compare([0.59, 1.0, 1.1, 4.0, 7.1], [1.0] * 5)
    assert (
        "too noisy: half of the 5 rounds lie outside of 1.000 to 4.000" in capsys.readouterr().err
    )
