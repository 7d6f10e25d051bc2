"""Runs that are killed at random steps, in a checkpoint, by a full disk, and under torchrun.

tests/helpers/faults.py has all faults, and writes results/faults.csv; here are a few of each kind.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def faults(*kinds: str, sample: int) -> list[str]:
    """Return a line for each fault, after which the resumed run equals an undisturbed one."""
    command = [sys.executable, "tests/helpers/faults.py", "--sample", str(sample), "--only", *kinds]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert all(line.startswith("ok ") for line in lines)
    return lines


def can_mount(folder: Path) -> bool:
    if os.geteuid():
        return False
    command = ["mount", "-t", "tmpfs", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        return False  # in a container
    subprocess.run(["umount", str(folder)], check=True)
    return True


@pytest.mark.nightly
def test_a_killed_run_goes_on_to_the_bits_of_an_undisturbed_one() -> None:
    lines = faults("killed", "killed_in_writing", sample=2)
    assert len(lines) == 4
    assert all("bit for bit" in line for line in lines)


@pytest.mark.nightly
def test_a_full_disk_ends_a_run_in_one_line_and_it_goes_on_later(tmp_path: Path) -> None:
    if not can_mount(tmp_path):
        pytest.skip("no small disk can be mounted here")
    (line,) = faults("disk", sample=1)
    assert "full disk" in line
    assert "bit for bit" in line


@pytest.mark.nightly
def test_a_process_killed_under_torchrun_ends_all_and_they_go_on() -> None:
    (line,) = faults("processes", sample=1)
    assert "one of two" in line
    assert "bit for bit" in line
