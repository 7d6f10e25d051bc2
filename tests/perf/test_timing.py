"""perf/_timing.py: ratios of CPU time with their quartiles."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PERF = Path(__file__).parents[2] / "perf"


@pytest.mark.nightly
def test_the_examples_of_the_timing_are_true() -> None:
    subprocess.run([sys.executable, "-m", "doctest", str(PERF / "_timing.py")], check=True)
