"""Time embed.py on a small and on a large table: the time per row must not grow with the table.

`python perf/embed.py`. CPU time per row of the whole command, data set included;
both sizes run in one process, after a warm-up. Bar: at most 1.2 times.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
import time
from pathlib import Path

from fusionzoo import create_dataset, create_model
from fusionzoo.scripts.embed import main as embed

SMALL, LARGE = 5_000, 50_000


def seconds_per_row(model: Path, rows: int) -> float:
    """Embed `rows` rows in batches of 64; return CPU seconds per row."""
    data = ["--data.name", "interactions", "--data.samples", str(rows), "--split", "all"]
    out = ["--model", str(model), "--out", str(model / "e.parquet"), "--batch_size", "64"]
    start = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert embed([*data, *out]) == 0
    return (time.process_time() - start) / rows


def main() -> None:
    """Print one JSON line."""
    with tempfile.TemporaryDirectory() as folder:
        data = create_dataset("interactions", samples=60)
        model = create_model("sum", data.default_encoders, classes=data.classes, dim=16)
        path = model.save(folder)
        seconds_per_row(path, 640)
        small, large = seconds_per_row(path, SMALL), seconds_per_row(path, LARGE)
    figures = {"small_us": round(1e6 * small, 1), "large_us": round(1e6 * large, 1)}
    rows = {"small_rows": SMALL, "large_rows": LARGE}
    print(json.dumps({"benchmark": "embed", **rows, **figures, "ratio": round(large / small, 2)}))


if __name__ == "__main__":
    main()
