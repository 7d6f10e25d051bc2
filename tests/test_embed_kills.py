"""Killed extractions go on and write the file of an uninterrupted one: processes, ranks, Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def kills(*args: str) -> dict[str, Any]:
    """Run perf/embed_kills.py, which compares the files byte for byte."""
    command = [sys.executable, "perf/embed_kills.py", *args]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=550, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-500:]
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert figures["same"]
    return figures


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_killed_extraction_goes_on_to_the_same_bytes(ranks: str) -> None:
    figures = kills("--ranks", ranks, "--kills", "3", "--rows", "3000", "--part", "100")
    assert figures["kills"] > 0
    assert any(figures["parts_after_each"])


@pytest.mark.slow
def test_ray_goes_on_with_another_actor_after_a_kill() -> None:
    figures = kills("--engine", "ray", "--rows", "800", "--part", "20")
    assert figures["kills"] == 1
    assert figures["parts_after_each"][0] < 800 / 20
