"""What every fusion reached: results/zoo.csv, its reports, and where it is shown."""

from __future__ import annotations

import csv
import runpy
from pathlib import Path
from typing import Any

import pytest

import fusionzoo as fz
from fusionzoo.cli import main
from fusionzoo.errors import FusionZooError
from fusionzoo.zoo.facts import measured

ROOT = Path(__file__).parents[2]
with (ROOT / "results" / "zoo.csv").open() as file:
    ROWS = list(csv.DictReader(file))
SETS = sorted({row["set"] for row in ROWS})


@pytest.fixture(scope="module")
def zoo() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "perf" / "zoo.py"))


@pytest.mark.parametrize("data", SETS)
def test_the_table_says_what_the_stored_report_says(data: str, zoo: dict[str, Any]) -> None:
    rows = [row for row in ROWS if row["set"] == data]
    assert rows == zoo["rows"](zoo["KEPT"] / data)
    fusions = [row["candidate"] for row in rows if row["kind"] == "fusion"]
    assert sorted(fusions) == fz.list_fusions()
    assert fz.list_fusions(by=data) == fusions == [*measured(data)]
    accuracies = [float(row["accuracy"]) for row in rows]
    assert accuracies == sorted(accuracies, reverse=True)


def test_the_table_of_strategies_says_what_the_stored_reports_say(zoo: dict[str, Any]) -> None:
    kept = zoo["KEPT_OF_STRATEGIES"]
    with zoo["TABLES"][kept].open() as file:
        table = list(csv.DictReader(file))
    assert table == [row for folder in sorted(kept.iterdir()) for row in zoo["rows"](folder)]
    measured_here = {row["candidate"].partition(" + ")[2] for row in table} - {""}
    *_, names, _, _ = zoo["of_strategies"]()
    assert {"none", *measured_here} == {*names.split(",")}


@pytest.mark.parametrize("data", SETS)
def test_the_zoo_is_listed_by_a_data_set(data: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = fz.list_fusions("m*", by=data)
    assert 1 < len(names) < 59
    assert main(["zoo", "list", "m*", "--by", data]) == 0
    shown = capsys.readouterr().out
    places = [shown.index(f" {name} ") for name in names]
    assert places == sorted(places)
    assert main(["zoo", "info", names[0]]) == 0
    accuracy = f"{measured(data)[names[0]]['accuracy']:.3f}"
    assert f"measured on {data}: accuracy {accuracy} (" in capsys.readouterr().out


def test_a_set_on_which_nothing_was_measured_is_named() -> None:
    with pytest.raises(FusionZooError, match="no fusion was measured on 'digit'"):
        fz.list_fusions(by="digit")
