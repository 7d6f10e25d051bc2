"""Everything that only a GPU can tell, in under nine minutes: `python perf/gpu.py`.

Training steps in bf16 and fp16, eager and compiled, against a bare PyTorch loop (samples per
second, MFU where the GPU's peak is known, share of time spent waiting for data); forward and
backward of every fusion; cells of the benchmark; FSDP and NCCL on the GPUs that are there (a group
of one process, then all of them); a real out-of-memory; a run stopped and resumed, compared bit
for bit.

Every part is a process with a time limit; time that a part leaves is the next one's. A part or case
that fails is a row with its error, and the others go on; the exit code is 1 then. Writes
results/gpu.csv with hardware, versions and commit. `--device cpu --tiny` runs the same parts on a
CPU in about a minute and writes runs/gpu.csv. `--only resume` runs some parts.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[1]
LIMIT = 530.0  # seconds in all
SECONDS = {  # of each part; what one leaves, later ones may use
    "steps": 190.0,
    "fusions": 90.0,
    "cells": 90.0,
    "distributed": 60.0,
    "out_of_memory": 40.0,
    "resume": 50.0,
}
GRACE = 5.0  # seconds between SIGTERM and SIGKILL
MARK = "FIGURE "  # of the lines that a part prints for this script
COLUMNS = ("part", "case", "figure", "value", "error")


def main() -> int:
    """Run the parts one after another; return 1 if any row is an error."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda", help="cuda | cuda:1 | cpu")
    parser.add_argument("--tiny", action="store_true", help="small models, few steps: a try-out")
    parser.add_argument("--only", nargs="*", choices=SECONDS, default=list(SECONDS))
    parser.add_argument("--out", type=Path, help="CSV file")
    parser.add_argument("--part", choices=SECONDS, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.part:
        return run_part(flags.part, flags.device, flags.tiny)
    import torch

    on_gpu = flags.device.startswith("cuda")
    if on_gpu and not torch.cuda.is_available():
        print("error: no CUDA GPU here; --device cpu --tiny runs the same on a CPU")
        return 2
    out = flags.out or ROOT / ("results" if on_gpu else "runs") / "gpu.csv"
    out.parent.mkdir(parents=True, exist_ok=True)
    facts, rows, began = machine_facts(flags.device), [], time.monotonic()
    for number, name in enumerate(flags.only):
        reserved = sum(SECONDS[later] for later in flags.only[number + 1 :])
        limit = max(LIMIT - (time.monotonic() - began) - reserved, 10.0)
        part_began = time.monotonic()
        part_rows = [{"part": name, **row} for row in start_part(name, flags, limit)]
        taken = f"{time.monotonic() - part_began:.1f}"
        part_rows.append({"part": name, "case": "", "figure": "seconds", "value": taken})
        rows += part_rows
        write(out, rows, facts)
        show(part_rows)
    print(f"wrote {out}; {time.monotonic() - began:.0f} s in all")
    return 1 if any(row.get("error") for row in rows) else 0


def start_part(name: str, flags: argparse.Namespace, limit: float) -> list[dict[str, str]]:
    """Run a part in a process of its own; return its rows, one more if it failed or was late."""
    command = [sys.executable, __file__, "--part", name, "--device", flags.device]
    command += ["--tiny"] if flags.tiny else []
    # torch.use_deterministic_algorithms asks for this size of cuBLAS's workspace.
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONUNBUFFERED": "1"}
    with TemporaryDirectory() as folder:
        paths = [Path(folder) / "stdout", Path(folder) / "stderr"]
        with paths[0].open("w") as stdout, paths[1].open("w") as stderr:
            process = subprocess.Popen(
                command, stdout=stdout, stderr=stderr, env=environment, start_new_session=True
            )
            try:
                code = process.wait(limit)
                failure = f"exit code {code}" if code else ""
            except subprocess.TimeoutExpired:
                failure = f"not finished after {limit:.0f} s"
            finally:
                end(process)
        lines = paths[0].read_text(errors="replace").splitlines()
        rows = [json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK)]
        if failure:
            last = " ".join(paths[1].read_text(errors="replace").split())[-300:]
            rows.append({"case": "", "figure": "", "error": f"{failure}: {last}"})
    return rows


def end(process: subprocess.Popen[bytes]) -> None:
    """End a part and all processes that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                continue


def run_part(name: str, device: str, tiny: bool) -> int:
    """Run a part in this process; print its figures as they come."""
    import torch
    from _gpu_parts import PARTS, Machine

    if device == "cuda":
        device = "cuda:0"
    elif device == "cpu" and tiny:
        torch.set_num_threads(1)
    for case, figure, value in PARTS[name](Machine(torch.device(device), tiny)):
        row = {"case": case, "figure": figure}
        shown = f"{value:.6g}" if isinstance(value, float) else str(value)
        row["error" if figure == "error" else "value"] = shown
        print(MARK + json.dumps(row), flush=True)
    return 0


def machine_facts(device: str) -> dict[str, Any]:
    """Return hardware, versions and commit: the same in every row."""
    import torch

    facts: dict[str, Any] = {"device": platform.processor() or platform.machine(), "gpus": 0}
    if device.startswith("cuda"):
        index = torch.device(device).index or 0
        properties = torch.cuda.get_device_properties(index)
        facts = {"device": properties.name, "gpus": torch.cuda.device_count()}
        facts["memory_GiB"] = round(properties.total_memory / 2**30, 1)
        facts["driver"] = printed(
            "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
        )
    facts |= {"cores": len(os.sched_getaffinity(0)), "torch": torch.__version__}
    facts |= {"cuda": torch.version.cuda or "", "python": platform.python_version()}
    facts["commit"] = printed(
        "git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"
    )
    facts["date"] = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    return facts


def printed(*command: str) -> str:
    """Return the first line that a command prints, empty where it cannot be run."""
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.partition("\n")[0].strip()


def write(out: Path, rows: list[dict[str, str]], facts: dict[str, Any]) -> None:
    """Write all rows so far."""
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*COLUMNS, *facts], restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, **facts} for row in rows)


def show(rows: list[dict[str, str]]) -> None:
    """Print a part's rows."""
    for row in rows:
        value = f"ERROR {row['error']}" if row.get("error") else row.get("value", "")
        print(f"{row['part']:<14}{row['case']:<34}{row['figure']:<26}{value}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
