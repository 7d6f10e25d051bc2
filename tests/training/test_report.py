"""What a run says at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fusionzoo.config import RunConfig
from fusionzoo.training.report import next_steps

FILE = {"name": "manifest", "root": "my table.csv"}
STORED = {"name": "manifest", "root": "/cache/tables/data-0123456789ab.parquet"}


@pytest.mark.parametrize(
    ("data", "first"),
    [
        (FILE, "fusionzoo predict runs/a 'my table.csv' --out predictions.csv"),
        ({"name": "digits"}, "fusionzoo predict runs/a digits --out predictions.csv"),
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
