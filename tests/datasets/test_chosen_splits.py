"""Splits that the user chooses: drawn at random by a seed, or listed in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fusionzoo as fz
from fusionzoo.errors import FusionZooError

COUNT = 40


def table(**columns: list[str]) -> list[dict[str, Any]]:
    """Return samples s0, s1, ... of two classes, with further columns."""
    return [
        {"id": f"s{n}", "text": f"word {n}", "target": "ab"[n % 2]}
        | {name: values[n] for name, values in columns.items()}
        for n in range(COUNT)
    ]


def members(data: fz.PairedDataset) -> dict[str, list[int]]:
    return {split: [int(x[1:]) for x in data.split(split).ids] for split in data.splits}


def test_a_seed_draws_the_splits_that_numpy_does() -> None:
    """`numpy.random.seed(3)`, `numpy.random.shuffle` of the rows, cut at int(0.7 N)."""
    own = {"split": ["train"] * COUNT}
    data = fz.create_dataset(table(**own), random_splits=3, shares=[0.7, 0, 0.3])
    order = np.random.RandomState(3).permutation(COUNT)
    assert members(data) == {"train": sorted(order[:28]), "test": sorted(order[28:])}
    assert data.provenance.split_rule == "drawn at random with seed 3: 70 % train, 30 % test"
    held_out = fz.create_dataset(
        table(**own), random_splits=3, shares=[0.7, 0, 0.3], val_share=0.25
    )
    assert members(held_out)["test"] == members(data)["test"]
    assert held_out.splits["val"] == 7


def test_drawn_splits_keep_groups_whole() -> None:
    data = fz.create_dataset(
        table(patient=[f"p{n // 4}" for n in range(COUNT)]), group_column="patient", random_splits=0
    )
    split_of = {row // 4: split for split, rows in members(data).items() for row in rows}
    assert [split_of[group] for group in range(10)] == [
        data.split_names[4 * group] for group in range(10)
    ]
    assert set(data.splits) == {"train", "val", "test"}


def test_a_file_lists_the_splits_and_leaves_out_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "split.csv"
    lines = [f"s{n},{['Train', 'dev', 'test', ''][n % 4]}" for n in reversed(range(30))]
    path.write_text("\n".join(["id,split", *lines]))
    data = fz.create_dataset(table(), split_file=str(path))
    assert members(data) == {
        "train": [*range(0, 30, 4)],
        "val": [*range(1, 30, 4)],
        "test": [*range(2, 30, 4)],
    }
    assert "leaves out 17 samples" in data.provenance.split_rule
    path.write_text("id,split\ns0,train\ns2,test")
    assert fz.create_dataset(table(), split_file=str(path)).classes == ["a"]


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ("id,split\ns0,train\nx1,test", "split.csv: id 'x1' is not in .* are like 's0'"),
        ("id,split\ns0,train\ns0,test", "split.csv, row 3: id 's0' is empty or there twice"),
        ("id,split\n,train\ns0,test", "split.csv, row 2: id None is empty"),
        ("key,split\ns0,train", "split.csv has no column 'id'.* It has: key, split"),
        ("id,split\ns0,", "split.csv lists no sample with a split"),
    ],
)
def test_a_file_with_a_mistake_is_refused(tmp_path: Path, contents: str, message: str) -> None:
    path = tmp_path / "split.csv"
    path.write_text(contents)
    with pytest.raises(FusionZooError, match=message):
        fz.create_dataset(table(), split_file=str(path))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"random_splits": 1, "split_file": "a.csv"}, "leave one out"),
        ({"random_splits": 1, "time_column": "text"}, "leave one out"),
        ({"shares": [0.8, 0.2]}, r"expected \[train,val,test\]"),
        ({"shares": [0, 0.5, 0.5]}, r"expected \[train,val,test\]"),
    ],
)
def test_settings_that_cannot_be_met_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(FusionZooError, match=message):
        fz.create_dataset(table(), **settings)


def test_shares_of_data_with_splits_of_its_own_need_a_seed() -> None:
    with pytest.raises(FusionZooError, match="own: random_splits=SEED"):
        fz.create_dataset("digits", shares=[0.8, 0, 0.2])
    drawn = fz.create_dataset("digits", random_splits=0, shares=[0.8, 0, 0.2])
    assert set(drawn.splits) == {"train", "test"}
