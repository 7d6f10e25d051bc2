"""Splits by time: training never knows what comes later, whatever form the times have."""

from __future__ import annotations

import datetime
from typing import Any

import pandas as pd
import pytest

import fusionzoo as fz
from fusionzoo.errors import FusionZooError

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


def table(times: Any, **more: Any) -> list[dict[str, Any]]:
    rows = [
        {"id": f"s{n}", "text": f"word {n}", "target": "ab"[n % 2], "when": times[n]}
        | {name: values[n] for name, values in more.items()}
        for n in range(40)
    ]
    return [rows[(n * 17) % 40] for n in range(40)]  # not in the order of time


@pytest.mark.parametrize("form", FORMS)
def test_the_latest_rows_are_test_and_the_earliest_train(form: str) -> None:
    data = fz.create_dataset(table(FORMS[form]), time_column="when", shares=[0.5, 0.25, 0.25])
    place = {f"s{n}": n for n in range(40)}
    of = {split: [place[x] for x in data.split(split).ids] for split in data.splits}
    assert sorted(of["train"]) == list(range(20))
    assert sorted(of["val"]) == list(range(20, 30))
    assert sorted(of["test"]) == list(range(30, 40))


def test_the_summary_says_where_each_split_begins(capsys: pytest.CaptureFixture[str]) -> None:
    data = fz.create_dataset(table(FORMS["ISO"]), time_column="when", shares=[0.5, 0.25, 0.25])
    assert data.provenance.split_rule == (
        "by time in 'when': train from 2023-12-30 06:00:00, val from 2024-01-05 02:00:00,"
        " test from 2024-01-08 00:00:00"
    )


def test_rows_of_one_day_and_of_one_group_stay_together() -> None:
    days = [x.date().isoformat() for x in DAYS]
    data = fz.create_dataset(table(days), time_column="when")
    split_of = dict(zip(data.ids, data.split_names, strict=True))
    by_day: dict[str, set[str]] = {}
    for n, day in enumerate(days):
        by_day.setdefault(day, set()).add(split_of[f"s{n}"])
    assert all(len(splits) == 1 for splits in by_day.values())
    patients = [f"p{n % 5}" if n in (0, 39) else f"q{n}" for n in range(40)]
    patients[0] = patients[39] = "p"  # the first row and the last one
    data = fz.create_dataset(table(days, patient=patients), time_column="when", group="patient")
    split_of = dict(zip(data.ids, data.split_names, strict=True))
    assert split_of["s0"] == split_of["s39"] == "test"


def test_a_column_of_times_is_an_input_too() -> None:
    rows = table(FORMS["European"])
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
        fz.create_dataset(table(times), time_column="when")
    assert says in str(caught.value)


def test_splits_of_a_column_and_by_time_exclude_each_other() -> None:
    rows = [{**row, "split": "train"} for row in table(FORMS["ISO"])]
    with pytest.raises(FusionZooError, match="has splits: leave out"):
        fz.create_dataset(rows, time_column="when")
