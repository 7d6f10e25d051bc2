"""Every encoder that the libraries offer is usable, or says in one line why it is not."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LEAST = {  # encoders that work, of each kind and prefix
    ("image", "timm"): 95,
    ("image", "torchvision"): 22,
    ("image", "hf"): 50,
    ("text", "hf"): 100,
    ("audio", "hf"): 30,
}
JOINT = 18  # types with a tower that works


def read() -> list[dict[str, str]]:
    with (ROOT / "results" / "encoders.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def assert_fine(rows: list[dict[str, str]]) -> None:
    failed = [f"{row['name']}: {row['reason']}" for row in rows if row["result"] == "failed"]
    assert not failed, failed
    fine = [row for row in rows if row["result"] == "ok"]
    counts = Counter((row["kind"], row["name"].partition("/")[0]) for row in fine)
    for key, least in LEAST.items():
        assert counts[key] >= least, (key, counts[key])
    assert len({row["name"] for row in fine if row["name"].startswith("hf-clip/")}) >= JOINT


def test_the_recorded_sweep_has_no_failure() -> None:
    assert_fine(read())


@pytest.mark.nightly
def test_no_encoder_fails() -> None:
    """Half an hour: perf/encoders.py, which writes results/encoders.csv anew."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "perf/encoders.py"], cwd=ROOT, env=environment, check=True)
    assert_fine(read())
