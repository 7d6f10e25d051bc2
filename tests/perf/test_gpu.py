"""perf/gpu.py: the same parts on a CPU; a part that fails is a row."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
def test_a_part_that_fails_is_a_row_with_its_error(tmp_path: Path) -> None:
    out = tmp_path / "gpu.csv"
    command = [sys.executable, "perf/gpu.py", "--device", "nonsense", "--tiny", "--out", str(out)]
    done = subprocess.run([*command, "--only", "fusions"], cwd=ROOT, check=False)
    assert done.returncode == 1
    with out.open(newline="") as file:
        errors = [row["error"] for row in csv.DictReader(file) if row["error"]]
    assert errors[-1].startswith("exit code 1") and "nonsense" in errors[-1]


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
