"""Splits that the user chooses: drawn at random by a seed, listed in a file, or by time."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
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


# ---- by time


START = datetime.datetime(2023, 12, 30, 6)
DAYS = [START + datetime.timedelta(hours=7 * n) for n in range(40)]
FORMS: dict[str, Any] = {
    "ISO": [x.isoformat(sep=" ") for x in DAYS],
    "European": [x.strftime("%d.%m.%Y %H:%M") for x in DAYS],
    "US": [x.strftime("%m/%d/%Y %H:%M:%S") for x in DAYS],
    "with an offset": [f"{x.isoformat()}+01:00" for x in DAYS],
    "datetimes": DAYS,
    "pandas": pd.Series(DAYS).tolist(),
    "seconds": [x.timestamp() for x in DAYS],
    "numbers as text": [f"{n + 0.5}" for n in range(40)],
}


def timed(times: Any, **more: Any) -> list[dict[str, Any]]:
    rows = [
        {"id": f"s{n}", "text": f"word {n}", "target": "ab"[n % 2], "when": times[n]}
        | {name: values[n] for name, values in more.items()}
        for n in range(40)
    ]
    return [rows[(n * 17) % 40] for n in range(40)]  # not in the order of time


@pytest.mark.parametrize("form", FORMS)
def test_the_latest_rows_are_test_and_the_earliest_train(form: str) -> None:
    data = fz.create_dataset(timed(FORMS[form]), time_column="when", shares=[0.5, 0.25, 0.25])
    place = {f"s{n}": n for n in range(40)}
    of = {split: [place[x] for x in data.split(split).ids] for split in data.splits}
    assert sorted(of["train"]) == list(range(20))
    assert sorted(of["val"]) == list(range(20, 30))
    assert sorted(of["test"]) == list(range(30, 40))


def test_the_summary_says_where_each_split_begins() -> None:
    data = fz.create_dataset(timed(FORMS["ISO"]), time_column="when", shares=[0.5, 0.25, 0.25])
    assert data.provenance.split_rule == (
        "by time in 'when': train from 2023-12-30 06:00:00, val from 2024-01-05 02:00:00,"
        " test from 2024-01-08 00:00:00"
    )


def test_rows_of_one_day_and_of_one_group_stay_together() -> None:
    days = [x.date().isoformat() for x in DAYS]
    data = fz.create_dataset(timed(days), time_column="when")
    split_of = dict(zip(data.ids, data.split_names, strict=True))
    by_day: dict[str, set[str]] = {}
    for n, day in enumerate(days):
        by_day.setdefault(day, set()).add(split_of[f"s{n}"])
    assert all(len(splits) == 1 for splits in by_day.values())
    patients = [f"p{n % 5}" if n in (0, 39) else f"q{n}" for n in range(40)]
    patients[0] = patients[39] = "p"  # the first row and the last one
    data = fz.create_dataset(timed(days, patient=patients), time_column="when", group="patient")
    split_of = dict(zip(data.ids, data.split_names, strict=True))
    assert split_of["s0"] == split_of["s39"] == "test"


def test_a_column_of_times_is_an_input_too() -> None:
    rows = timed(FORMS["European"])
    data = fz.create_dataset(rows, target="target", time_column="when")
    assert "when days" in data[0].values["tabular"]
    assert data.provenance.split_rule.startswith("by time in 'when'")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({3: "soon"}, "'when' is 'soon', no date, time or number (time_column=)"),
        ({3: ""}, "'when' is empty (time_column=)"),
        (dict.fromkeys(range(40), "2024-01-01"), "no row is left for val"),
    ],
)
def test_times_that_make_no_splits_are_one_line(change: dict[int, str], says: str) -> None:
    times = [change.get(n, day) for n, day in enumerate(FORMS["ISO"])]
    with pytest.raises(FusionZooError) as caught:
        fz.create_dataset(timed(times), time_column="when")
    assert says in str(caught.value)


def test_splits_of_a_column_and_by_time_exclude_each_other() -> None:
    rows = [{**row, "split": "train"} for row in timed(FORMS["ISO"])]
    with pytest.raises(FusionZooError, match="has splits: leave out"):
        fz.create_dataset(rows, time_column="when")
