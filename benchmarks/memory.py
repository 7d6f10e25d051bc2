"""Time a frozen image encoder with and without `keep_freed_memory`, in processes of their own.

`python benchmarks/memory.py`. glibc's setting holds for a whole process, so each side gets its own.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

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


def main() -> None:
    """Print one JSON line."""
    pairs = [(rate("keep"), rate("default")) for _ in range(3)]
    print(
        json.dumps(
            {
                "benchmark": "memory",
                "kept_per_s": round(statistics.median(a for a, _ in pairs), 1),
                "default_per_s": round(statistics.median(b for _, b in pairs), 1),
                "ratio": round(statistics.median(a / b for a, b in pairs), 2),
            }
        )
    )


if __name__ == "__main__":
    main()
