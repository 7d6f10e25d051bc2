"""A benchmark small enough to run in a test."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fusionzoo.config import BenchmarkConfig, from_tree, merge

SMALL: dict[str, Any] = {
    "data": {"name": "interactions", "task": "and", "samples": 400, "noise": 1.0},
    "encoders": {name: {"name": "vector/identity"} for name in "ab"},
    "fusions": "sum,gmu",
    "fusion": {"dim": 16},
    "baselines": "alone,linear",
    "seeds": 2,
    "folds": 0,
    "tune": 0,
    "epochs": 4,
    "optim": {"lr": 3e-3},
    "jobs": 1,
}


def small(out: Path, **changes: Any) -> BenchmarkConfig:
    """Settings of a small benchmark on frozen vectors."""
    return from_tree(BenchmarkConfig, merge(merge(SMALL, {"out": str(out)}), changes))


def wait(_: None, seconds: float) -> None:
    """Work of a process that can import it: a test module's own functions it cannot."""
    time.sleep(seconds)


def vectors(
    path: Path, labels: Sequence[str], values: Mapping[str, Sequence[list[float] | None]]
) -> dict[str, Any]:
    """Write a manifest of vectors, None where a sample lacks one; return the data's settings."""
    lines = [
        {"id": f"s{row}", "target": label, **{name: x[row] for name, x in values.items()}}
        for row, label in enumerate(labels)
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    kinds = dict.fromkeys(values, "vector")
    return {"name": "manifest", "root": str(path), "kinds": kinds}
