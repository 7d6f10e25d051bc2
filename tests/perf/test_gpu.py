"""perf/gpu.py: the same parts on a CPU; a part that fails or hangs is a row."""

from __future__ import annotations

import argparse
import csv
import importlib.util
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def gpu() -> ModuleType:
    """perf/gpu.py, a script, as a module."""
    spec = importlib.util.spec_from_file_location("perf_gpu", ROOT / "perf" / "gpu.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_parts_limits_fit_in_nine_minutes(gpu: ModuleType) -> None:
    assert sum(gpu.SECONDS.values()) <= gpu.LIMIT < 9 * 60


def test_a_part_past_its_limit_is_ended_and_is_a_row(gpu: ModuleType) -> None:
    flags = argparse.Namespace(device="cpu", tiny=True)
    began = time.monotonic()
    rows = gpu.start_part("steps", flags, 0.3)
    assert time.monotonic() - began < 20
    assert len(rows) == 1
    assert rows[0]["error"].startswith("not finished after 0 s")


def test_a_part_that_fails_is_a_row_with_its_error(gpu: ModuleType) -> None:
    flags = argparse.Namespace(device="nonsense", tiny=True)
    rows = gpu.start_part("fusions", flags, 60)
    assert rows[-1]["error"].startswith("exit code 1")
    assert "nonsense" in rows[-1]["error"]


@pytest.mark.nightly
def test_all_parts_run_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "gpu.csv"
    command = [sys.executable, "perf/gpu.py", "--device", "cpu", "--tiny", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row for row in rows if row["error"]] == []
    assert done.returncode == 0, done.stderr
    values = {(row["part"], row["case"], row["figure"]): row["value"] for row in rows}
    for amp in ("bf16", "fp16"):
        for mode in ("eager", "compiled"):
            assert float(values["steps", f"{amp} {mode}", "samples_per_s"]) > 0
            assert 0 <= float(values["steps", f"{amp} {mode}", "share_of_data_wait"]) < 1
            assert float(values["steps", f"{amp} {mode}", "GFLOP_per_sample"]) > 0
    assert values["fusions", "mbt", "finite_gradients"] == "yes"
    assert values["cells", "finetune, 1 processes", "accuracy of gmu"]
    assert float(values["distributed", "fsdp, gloo, 1 process", "largest_gap_of_losses"]) < 1e-4
    assert values["distributed", "fsdp, gloo, 2 processes", "exit_code"] == "0"
    assert "out of memory" in values["out_of_memory", "error raised by hand", "message"]
    assert values["resume", "fp32", "resumed"] == "bit for bit"
