"""Time a frozen image encoder with and without `keep_freed_memory`, in processes of their own, and
measure the peak of the stamps' recipe.

`python perf/memory.py`. glibc's setting holds for a whole process, so each side gets its own.
Bar: an epoch of configs/stamps.yaml, evaluation and test included, peaks below 2.0 GB (`--stamps`:
this part alone). It was 1.87 GB when measured. Commit a7f1335 peaked at 4.0 GB: 0.35 GB in use,
0.7 GB of libraries, the rest freed and kept by glibc, after 32 pictures at once in training and 64
in evaluation.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

CODE = """
import sys, time, torch
from fusionzoo import create_encoder
from fusionzoo.training.memory import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
encoder = create_encoder("image", "timm/tf_efficientnet_lite0", pretrained=False, freeze="all")
pixels = {"pixels": torch.zeros(32, 3, 224, 224, dtype=torch.uint8)}
encoder(pixels)
start = time.perf_counter()
for _ in range(3):
    encoder(pixels)
print(96 / (time.perf_counter() - start))
"""


def rate(how: str) -> float:
    """Return pictures per second."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, how], check=True, capture_output=True, text=True
    )
    return float(done.stdout)


def stamps_peak() -> float:
    """Return the peak resident memory of an epoch on the stamps, in GB."""
    recipe = Path(__file__).parents[1] / "configs" / "stamps.yaml"
    with tempfile.TemporaryDirectory() as folder:
        settings = ["--train.epochs", "1", "--log", "none", "--out", folder]
        command = [sys.executable, "-m", "fusionzoo.cli", "train", "--config", str(recipe)]
        subprocess.run([*command, *settings], check=True, stdout=subprocess.DEVNULL)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9  # from KiB


def main() -> None:
    """Print one JSON line for each part."""
    peak = {"benchmark": "memory of configs/stamps.yaml", "peak_gb": round(stamps_peak(), 2)}
    if sys.argv[1:] == ["--stamps"]:
        print(json.dumps(peak))
        return
    pairs = [(rate("keep"), rate("default")) for _ in range(3)]
    figures = {
        "benchmark": "memory",
        "kept_per_s": round(statistics.median(a for a, _ in pairs), 1),
        "default_per_s": round(statistics.median(b for _, b in pairs), 1),
        "ratio": round(statistics.median(a / b for a, b in pairs), 2),
    }
    print(json.dumps(peak))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
