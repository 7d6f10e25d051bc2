"""A column of weights: read with the data, kept by every view, refused where a cell is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fusionzoo as fz
from fusionzoo.datasets import PairedDataset
from fusionzoo.datasets.shards.write import Settings, write_shards
from fusionzoo.datasets.summary import data_summary
from fusionzoo.errors import FusionZooError
from fusionzoo.inputs.identity import data_identity

ROWS = 24


def table(**columns: Any) -> dict[str, list[Any]]:
    return {
        "id": [f"r{row}" for row in range(ROWS)],
        "age": [20 + row % 7 for row in range(ROWS)],
        "text": [f"word {row % 5}" for row in range(ROWS)],
        "target": ["yes" if row % 2 else "no" for row in range(ROWS)],
        "w": [row / 2 for row in range(ROWS)],
        **columns,
    }


def opened(**settings: Any) -> PairedDataset:
    chosen = {"weight_column": "w", "columns": {"tabular": "age"}, **settings}
    return fz.create_dataset(table(), **chosen)


def weights_of(data: PairedDataset) -> dict[str, float]:
    return dict(zip(data.ids, data.weights.tolist(), strict=True))


def test_a_column_of_weights_is_read_and_is_no_input() -> None:
    inferred = fz.create_dataset(table(), target="target", weight_column="W ")
    assert inferred.weight_column == "w"
    sample = inferred[3]
    assert sample is not None and {*sample.values["tabular"]} == {"age"} and sample.weight == 1.5
    assert inferred.weights is not None and inferred.weights.dtype == torch.float32
    assert inferred.weights.tolist() == table()["w"]
    assert "weights   0 to 11.5, mean 5.75 (column 'w')" in data_summary(inferred)
    assert opened(weight_column=None).weights is None
    unweighted = opened(weight_column=None)[3]
    assert unweighted is not None and unweighted.weight is None


VIEWS = {
    "subset": lambda data: data.subset([7, 3]),
    "split": lambda data: data.split("val"),
    "select": lambda data: data.select("text"),
    "only": lambda data: data.only("tabular"),
    "edited": lambda data: data.edited(lambda sample: sample),
    "hold_out": lambda data: data.with_splits(
        {key: "test" if row % 3 else "train" for row, key in enumerate(data.ids)}, "list"
    ).hold_out(0.3),
    "with_splits": lambda data: data.with_splits({"r9": "train", "r4": "train"}, "list"),
    "draw_splits": lambda data: data.draw_splits(1, (0.5, 0.25, 0.25)),
    "drop": lambda data: data.drop(0.3),
    "with_policy": lambda data: data.with_policy(on_error="skip"),
    "with_targets": lambda data: data.with_targets({"target": "classification"}),
}


@pytest.mark.parametrize("name", VIEWS)
def test_every_view_keeps_its_samples_weights(name: str) -> None:
    data = opened()
    wanted, view = weights_of(data), VIEWS[name](data)
    assert len(view) and weights_of(view) == {key: wanted[key] for key in view.ids}
    samples = [view[row] for row in range(len(view))]
    assert {x.id: x.weight for x in samples if x} == weights_of(view)


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.parquet"])
def test_a_written_manifest_opens_with_its_weights(name: str, tmp_path: Path) -> None:
    data = opened(columns={})
    again = fz.create_dataset(**data.to_manifest(tmp_path / name))
    assert weights_of(again) == weights_of(data)


def test_shards_of_a_data_set_have_its_weights(tmp_path: Path) -> None:
    data = opened(columns={})
    write_shards(data, tmp_path / "shards", Settings())
    again = fz.create_dataset(tmp_path / "shards", weight_column="w")
    assert weights_of(again) == weights_of(data)


def test_joined_sources_keep_the_weights_of_the_one_that_has_them() -> None:
    left = opened(columns={})
    right = fz.create_dataset({"id": table()["id"], "vector": [[1.0, row] for row in range(ROWS)]})
    joined = PairedDataset.join({"text": left, "vector": right})
    assert weights_of(joined) == weights_of(left)
    by_settings = fz.create_dataset(table(), weight_column="w", join={"vector": right})
    assert weights_of(by_settings) == weights_of(left)
    other = fz.create_dataset(
        {"id": table()["id"], "vector": [[1.0]] * ROWS, "v": [1] * ROWS}, weight_column="v"
    )
    with pytest.raises(FusionZooError, match="different weights: 'w' of text, 'v'"):
        PairedDataset.join({"text": left, "vector": other})


@pytest.mark.parametrize(
    ("cell", "said"),
    [(None, "is empty"), ("NaN", "is 'NaN'"), (-0.5, "is '-0.5'"), ("x", "is 'x'"), ("inf", "inf")],
)
def test_a_cell_that_is_no_weight_is_one_error_with_its_place(cell: Any, said: str) -> None:
    cells: list[str | None] = [str(x) for x in table()["w"]]
    cells[4] = cell if cell is None else str(cell)
    place = r"row 5, sample 'r4': the weight in column 'w' "
    with pytest.raises(FusionZooError, match=place + f".*{said}"):
        fz.create_dataset(table(w=cells), columns={"tabular": "age"}, weight_column="w")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"weight_column": "weigth"}, "no column 'weigth'"),
        ({"weight_column": "target"}, "'target' is the target, and the weight"),
        ({"weight_column": "age"}, "'age' is the weight"),
        ({"weight_column": "text", "columns": {"text": "text"}}, "is the text, and the weight"),
    ],
)
def test_a_column_that_is_something_else_is_no_weight(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(FusionZooError, match=said):
        opened(**settings)


def test_decimal_commas_and_words_for_missing_cells_hold_for_weights(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("id;text;w\na;x;1,5\nb;y;0,25\n")
    data = fz.create_dataset(path, weight_column="w", decimal=",", delimiter=";")
    assert data.weights is not None and data.weights.tolist() == [1.5, 0.25]


def test_other_weights_are_other_data() -> None:
    before, after = data_identity(opened()), data_identity(opened(weight_column=None))
    assert "weights" in before and {x: y for x, y in before.items() if x != "weights"} == after
