"""What a run says at its end."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fusionzoo.config import RunConfig
from fusionzoo.distributed import World
from fusionzoo.training.checkpoint import State
from fusionzoo.training.report import next_steps
from fusionzoo.training.tracker import Tracker

FILE = {"name": "manifest", "root": "my table.csv"}
STORED = {"name": "manifest", "root": "/cache/tables/data-0123456789ab.parquet"}


@pytest.mark.parametrize(
    ("data", "first"),
    [
        (FILE, "fusionzoo predict runs/a 'my table.csv' --out predictions.csv"),
        ({"name": "digits"}, "fusionzoo predict runs/a --split test --out predictions.csv"),
        (STORED, 'fusionzoo.predict("runs/a", data)'),
        ({"name": "in_memory"}, 'fusionzoo.predict("runs/a", data)'),
    ],
)
def test_the_next_steps_name_the_users_data_as_they_were_given(
    data: dict[str, Any], first: str
) -> None:
    steps = next_steps(Path("runs/a"), RunConfig(data=data), has_target=True)
    assert steps[0] == first
    assert len(steps) == 4
    alone = next_steps(Path("runs/a"), RunConfig(data=data), has_target=False)
    assert alone == steps[3:]
    assert "embed" in alone[0]


def test_plugins_are_among_the_next_steps() -> None:
    steps = next_steps(Path("runs/a"), RunConfig(data=FILE, plugins="mine.py"), has_target=True)
    assert all(step.endswith(" --plugins mine.py") for step in steps)


def test_progress_says_loss_rate_memory_epoch_and_metric() -> None:
    tracker = Tracker(World())
    tracker.progress(10, 0)
    assert tracker.bar is not None
    tracker.log(1, "step", {"loss": 0.5, "lr": {"image": 1e-3, "text": 1e-3}})
    assert re.fullmatch(r"loss 0\.500, lr 1\.0e-03, memory \d+\.\d GB", tracker.bar.postfix)
    val: dict[str, Any] = {"loss": 0.4, "accuracy": 0.75, "unimodal": {}}
    tasks: Any = SimpleNamespace(leading="accuracy", higher=True)
    tracker.log_epoch(State(evaluated=2), 0.5, val, tasks, rows=10)
    assert tracker.bar.postfix.endswith("GB, epoch 2, val accuracy 0.750")
    tracker.close()
