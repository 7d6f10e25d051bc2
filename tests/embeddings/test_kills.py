"""Killed extractions go on and write the file of an uninterrupted one: processes, ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def kills(*args: str) -> dict[str, Any]:
    """Run tests/helpers/embed_kills.py, which compares the files byte for byte."""
    command = [sys.executable, "tests/helpers/embed_kills.py", *args]
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
