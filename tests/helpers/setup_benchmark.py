"""A benchmark small enough to run in a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fusionzoo.config import BenchmarkConfig, from_tree, merge

SMALL: dict[str, Any] = {
    "data": {"name": "interactions", "task": "and", "samples": 400, "noise": 1.0},
    "encoders": {name: {"name": "vector/identity"} for name in "ab"},
    "fusions": "sum,gmu",
    "fusion": {"dim": 16},
    "seeds": 2,
    "folds": 0,
    "tune": 0,
    "epochs": 4,
    "optim": {"lr": 3e-3},
    "jobs": 1,
    "analyses": False,
}


def small(out: Path, **changes: Any) -> BenchmarkConfig:
    """Settings of a small benchmark on frozen vectors."""
    return from_tree(BenchmarkConfig, merge(merge(SMALL, {"out": str(out)}), changes))
