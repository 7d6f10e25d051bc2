"""Columns of a table as one modality: cells, statistics of the training split, whole runs."""

from __future__ import annotations

import csv
import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv as pv
import pyarrow.parquet as pq
import pytest

import fusionzoo
from fusionzoo import PairedDataset, create_dataset
from fusionzoo.cli import main as console
from fusionzoo.datasets.base import from_memory
from fusionzoo.datasets.opening.in_memory import store_table
from fusionzoo.datasets.sources.open_table import open_table
from fusionzoo.datasets.sources.table_settings import TableSettings
from fusionzoo.datasets.summary import data_summary
from fusionzoo.datasets.tables.provenance import LoadedTable
from fusionzoo.datasets.tables.tabular import learn_columns, strange_cells
from fusionzoo.encoders.tabular import Categories
from fusionzoo.errors import FusionZooError
from fusionzoo.evaluation.robustness import corrupted
from fusionzoo.scripts.train import main as train
from fusionzoo.training.build import choose_encoders

HEADER = ("id", "split", "target", "Age", "colour", "code", "text")
ROWS = [
    ("a", "train", "x", "30", "red", "1", "one"),
    ("b", "train", "y", " 50.0", "blue ", "2", "two"),
    ("c", "train", "x", "", "red", "2", "three"),
    ("d", "val", "y", "1000", "green", "3", "four"),
    ("e", "test", "x", "", "  ", "", "five"),
]
NAMES = "age,colour,code"


def write(
    folder: Path, rows: Sequence[Sequence[str]] = ROWS, header: Sequence[str] = HEADER
) -> str:
    with (folder / "m.csv").open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return str(folder / "m.csv")


def opened(folder: Path, rows: Sequence[Sequence[str]] = ROWS, **settings: Any) -> PairedDataset:
    settings = {"columns": {"tabular": NAMES}, **settings}
    return create_dataset("manifest", root=write(folder, rows), **settings)


def cells(data: PairedDataset, modality: str = "tabular") -> list[Any]:
    samples = [data[row] for row in range(len(data))]
    return [sample and sample.values[modality] for sample in samples]


def learnt(data: PairedDataset, modality: str = "tabular") -> dict[str, Any]:
    columns = data.default_encoders[modality]["columns"]
    return {column["name"]: {k: x for k, x in column.items() if k != "name"} for column in columns}


def test_a_sample_has_a_cell_per_column_and_none_where_all_are_empty(tmp_path: Path) -> None:
    data = opened(tmp_path)
    assert data.modalities == {"tabular": "tabular", "text": "text"}
    assert cells(data)[1:3] == [
        {"Age": "50.0", "colour": "blue", "code": "2"},
        {"Age": None, "colour": "red", "code": "2"},
    ]
    assert cells(data)[4] is None
    assert data.present[:, 0].tolist() == [True] * 4 + [False]
    assert data.provenance.unused == ()


def test_statistics_come_from_the_training_split_alone(tmp_path: Path) -> None:
    expected = {
        "Age": {"mean": 40.0, "std": 10.0, "range": [30.0, 50.0], "edges": [30, 50]},
        "colour": {"values": ["blue", "red"]},
        "code": {
            "edges": [1, 2],
            "mean": pytest.approx(5 / 3),
            "std": pytest.approx((2 / 9) ** 0.5),
            "range": [1, 2],
        },
    }
    data = opened(tmp_path)
    assert learnt(data) == expected
    assert learnt(data.split("val")) == expected
    assert learnt(data.subset([4])) == expected
    assert data.default_encoders["tabular"]["name"] == "tabular/tabm"
    constant = opened(tmp_path, [(*row[:3], "7", *row[4:]) for row in ROWS])
    assert learnt(constant)["Age"] == {"mean": 7.0, "std": 1.0, "range": [7, 7], "edges": [7]}


def test_bins_have_equally_many_training_rows_and_a_column_of_few_values_has_fewer() -> None:
    draw = np.random.default_rng(0)
    many, held_out = draw.normal(size=400), 1e6
    rows: list[dict[str, Any]] = [
        {"many": x, "few": n % 3, "same": 7, "gaps": x if n % 2 else None, "split": "train"}
        for n, x in enumerate(many)
    ]
    rows.append({"many": held_out, "few": 9, "same": 8, "gaps": held_out, "split": "test"})
    columns = {"tabular": ["many", "few", "same", "gaps"]}
    numbers = create_dataset(rows, columns=columns)
    text = [{k: x if x is None else str(x) for k, x in row.items()} for row in rows]
    learned = [
        learn_columns(x, "tabular", 8) for x in (numbers, create_dataset(text, columns=columns))
    ]
    assert learned[0] == [
        {**x, "mean": pytest.approx(x["mean"]), "std": pytest.approx(x["std"])} for x in learned[1]
    ]
    edges = {column["name"]: column["edges"] for column in learned[0]}
    counts, _ = np.histogram(many, edges["many"])
    assert counts.tolist() == [50] * 8
    assert edges["many"][0] == many.min() and edges["many"][-1] == many.max()
    assert (edges["few"], edges["same"]) == ([0, 1, 2], [7])
    assert edges["gaps"][-1] == many[1::2].max() and len(edges["gaps"]) == 9


@pytest.mark.parametrize(("chosen", "count"), [({}, 6), ({"bins": 5}, 5)])
def test_an_encoder_that_codes_numbers_piecewise_gets_their_bins(
    chosen: dict[str, Any], count: int
) -> None:
    rows = [{"tabular": {"age": n, "colour": "ab"[n % 2]}, "target": "x"} for n in range(90)]
    data = create_dataset(rows)
    settings = {"tabular": {"name": "tabular/mlp", "numbers": "piecewise", **chosen}}
    columns: Any = choose_encoders(data, settings)["tabular"]["columns"]
    assert [len(x.get("edges", ())) for x in columns] == [count + 1, 0]
    mine = {"tabular": {**settings["tabular"], "columns": columns[:1]}}
    assert choose_encoders(data, mine)["tabular"]["columns"] == columns[:1]


def test_the_summary_says_what_was_learnt_of_each_column(tmp_path: Path) -> None:
    data = opened(tmp_path, kinds={"code": "category"})
    assert learnt(data)["code"] == {"values": ["1", "2"]}
    described = "Age 40 ± 10 (2 missing), colour 2 categories (1 missing), code 2 categories"
    assert f"columns   {described} (1 missing)" in data_summary(data)


def test_the_summary_counts_the_words_that_were_read_as_missing_cells(tmp_path: Path) -> None:
    rows = [(f"s{n}", "train", "x", ("31", "NA", "")[n % 3], "red", "null", "t") for n in range(6)]
    rows[0] = ("s0", "train", "x", "31", "red", "7", "t")
    lines = data_summary(opened(tmp_path, rows))
    assert "missing   'NA' 2 in Age; 'null' 5 in code (--data.na)" in lines
    described = next(line for line in lines if line.startswith("columns"))
    assert (
        described == "columns   Age 31 ± 1 (4 missing), colour 1 category, code 7 ± 1 (5 missing)"
    )


@pytest.mark.parametrize("odd", [3.5, "three"])
def test_rows_of_dicts_in_memory_are_a_tabular_modality(odd: float | str) -> None:
    rows = [{"age": 31, "colour": "red"}, {"age": odd}, None, {"age": None, "colour": "blue"}]
    data = create_dataset([{"text": "x", "tabular": row, "split": "train"} for row in rows])
    first = str(31) if isinstance(odd, str) else 31.0
    assert cells(data) == [
        {"age": first, "colour": "red"},
        {"age": odd, "colour": None},
        None,
        {"age": None, "colour": "blue"},
    ]
    assert "colour 2 categories (2 missing)" in "\n".join(data_summary(data))


def test_one_odd_cell_among_numbers_is_an_error_that_names_it(tmp_path: Path) -> None:
    odd = [*ROWS, ("f", *ROWS[0][1:]), ("g", "train", "x", "?", "", "", "")]
    data = opened(tmp_path, odd)
    with pytest.raises(FusionZooError) as caught:
        _ = data.default_encoders
    for part in ("row 8", "'g'", "'Age'", "'?'", "3 of 4 cells", "--data.kinds."):
        assert part in str(caught.value)
    assert "'?' is not a number" in "\n".join(data_summary(data))
    odd[-1] = ("g", "train", "x", "40,5", "", "", "")
    with pytest.raises(FusionZooError, match=r"--data\.decimal ,"):
        _ = opened(tmp_path, odd).default_encoders


def test_decimal_commas_and_words_for_missing_cells_are_read_as_elsewhere(tmp_path: Path) -> None:
    rows = [f's{row},train,x,{row or "NA"},"{row},5"' for row in range(4)]
    (tmp_path / "a.csv").write_text("\n".join(["id,split,target,n,x", *rows]))
    settings = {"root": str(tmp_path / "a.csv"), "columns": {"tabular": "n,x"}, "decimal": ","}
    cells = create_dataset("manifest", **settings).table["tabular"].to_pylist()
    assert cells[:2] == [{"n": None, "x": "0.5"}, {"n": "1", "x": "1.5"}]
    cells = create_dataset("manifest", **settings, na="3").table["tabular"].to_pylist()
    assert [cell["n"] for cell in cells] == ["NA", "1", "2", None]


def test_of_many_categories_the_most_frequent_are_kept() -> None:
    names = ["common"] * 5 + [f"rare {n:04d}" for n in range(1500)]
    ids = [str(n) for n in range(len(names))]
    table = pa.table({"id": ids, "target": ["a"] * len(ids), "word": names})
    data = open_table(
        LoadedTable(table=table, source="t"), TableSettings(columns={"tabular": "word"})
    )
    values = learnt(data)["word"]["values"]
    assert len(values) == 1000
    assert "common" in values
    assert values == sorted(values)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"columns": {"tabular": "age,colr"}}, r"no column 'colr' for columns="),
        ({"columns": {"tabular": "age,target"}}, "'target' is the target, and"),
        ({"columns": {"tabular": "age,colour", "target": "colour"}}, "'colour' is the target"),
        ({"columns": {"tabular": "age,id"}}, "'id' is the id"),
        ({"targets": {"colour": "classification"}}, "'colour' is the target"),
        ({"columns": {"tabular": "age,AGE"}}, "names a column twice"),
        ({"columns": {"image": ["age", "code"]}}, "takes one column"),
    ],
)
def test_columns_that_cannot_be_inputs_are_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(FusionZooError, match=message):
        opened(tmp_path, **settings)


def test_a_tabular_modality_may_have_another_name_and_there_may_be_two(tmp_path: Path) -> None:
    data = opened(
        tmp_path,
        columns={"patient": ["age", "code"], "look": "colour"},
        kinds={"patient": "tabular", "look": "tabular"},
    )
    assert data.modalities == {"patient": "tabular", "look": "tabular", "text": "text"}
    assert cells(data, "look")[0] == {"colour": "red"}
    assert list(learnt(data, "patient")) == ["Age", "code"]
    alone = opened(tmp_path, columns={}, kinds={"colour": "tabular"})
    assert cells(alone, "colour")[0] == {"colour": "red"}


def test_the_same_cells_come_from_every_kind_of_table(tmp_path: Path) -> None:
    """Text of a CSV, numbers of Parquet, structs of JSON lines, categories of pandas."""
    csv_file = opened(tmp_path)
    typed = pv.read_csv(tmp_path / "m.csv")
    pq.write_table(typed, tmp_path / "m.parquet")
    parquet = create_dataset(
        "manifest", root=str(tmp_path / "m.parquet"), columns={"tabular": NAMES}
    )
    lines = []
    for row in typed.to_pylist():
        struct = {name: row.pop(name) for name in ("Age", "colour", "code")}
        lines.append(json.dumps({**row, "tabular": struct}))
    (tmp_path / "m.jsonl").write_text("\n".join(lines))
    jsonl = create_dataset("manifest", root=str(tmp_path / "m.jsonl"))
    frame = typed.to_pandas()
    frame["colour"] = frame["colour"].astype("category")
    pandas = create_dataset(
        **store_table({"name": "manifest", "root": frame, "columns": {"tabular": NAMES}}, tmp_path)
    )
    expected = learnt(csv_file)
    for data in (parquet, jsonl, pandas):
        assert learnt(data) == expected, data.source
        assert [row is None for row in cells(data)] == [row is None for row in cells(csv_file)]


def test_cells_in_memory_and_joined_ones_are_learnt_from_too(tmp_path: Path) -> None:
    rows = [{"age": 30, "flag": True}, {"age": 50.0, "flag": False}, {"age": None, "flag": None}]
    data = from_memory(
        {"tabular": rows},
        {"tabular": "tabular"},
        ids=["a", "b", "c"],
        splits=["train"] * 3,
        target=["x", "y", "x"],
    )
    age = {"mean": 40.0, "std": 10.0, "range": [30.0, 50.0], "edges": [30, 50]}
    expected = {"age": age, "flag": {"values": ["false", "true"]}}
    assert learnt(data) == expected
    joined = PairedDataset.join({"tabular": data, "text": opened(tmp_path).select("text")})
    assert learnt(joined) == expected
    assert cells(joined)[0] == {"age": 30.0, "flag": "true"}


def test_removed_pickled_and_damaged_cells_stay_cells(tmp_path: Path) -> None:
    data = opened(tmp_path, kinds={"code": "category"})
    assert cells(pickle.loads(pickle.dumps(data))) == cells(data)
    dropped = data.drop(0.5, seed=1)
    assert 0 < sum(row is None for row in cells(dropped)) < len(dropped)
    damaged = corrupted(data, "tabular", "empty_cells", 5)
    lost = [row for row in cells(damaged) if row is not None]
    assert all(any(cell is not None for cell in row.values()) for row in lost)
    assert lost != [row for row in cells(data) if row is not None]


@pytest.mark.parametrize(
    ("cells", "says"),
    [
        (["01001", "01002", None, "01001"], []),
        ([1001, 1002, None, 1001], ["zip in 3 of 3 cells, such as '1001'"]),
        ([1001.0, 1002.0, float("nan"), 1001.0], ["zip in 3 of 3 cells, such as '1001'"]),
        (["Z01001", "01002", "", " 01001"], ["zip in 1 of 3 cells, such as 'Z01001'"]),
        ([True, False, None, True], ["zip in 3 of 3 cells, such as 'true'"]),
    ],
)
@pytest.mark.parametrize("way", ["frame", "rows"])
def test_cells_with_categories_unseen_in_training_are_counted(
    cells: list[Any], says: list[str], way: str
) -> None:
    frame = pd.DataFrame({"zip": pd.Series(cells, dtype=object), "n": [1, 2, 3, 4]})
    source: Any = frame
    columns: Any = {"columns": {"tabular": ["zip", "n"]}, "kinds": {"zip": "category"}}
    if way == "rows":
        source, columns = [{"tabular": row} for row in frame.to_dict("records")], {}
    data = create_dataset(source, **columns)
    zips = Categories("Zip", ("01001", "01002"))
    assert [*strange_cells(data, "tabular", {"Zip": zips.is_strange}).values()] == says


@pytest.mark.parametrize("cell", ["1e300", "-4e38", "179769313486231570000" + "0" * 280])
def test_a_number_that_float32_cannot_hold_is_refused(cell: str, tmp_path: Path) -> None:
    data = opened(tmp_path, [*ROWS, ("f", "train", "x", cell, "red", "1", "six")])
    with pytest.raises(FusionZooError, match=r"column 'Age' holds .*, beyond what float32 can"):
        learnt(data)
    path = write(tmp_path, [("a", "train", "1", "1", "", "", "t"), ("b", "train", cell, *"1111")])
    with pytest.raises(FusionZooError, match=r"row 3, sample 'b', column 'target': .* is beyond"):
        create_dataset(path, targets={"target": "regression"})


# ---- whole runs


def write_people(path: Path, count: int) -> None:
    draw = np.random.default_rng(0)
    rows = []
    for number in range(count):
        label = number % 2
        age = f"{40 + 15 * label + draw.normal():.1f}" if draw.random() < 0.8 else ""
        colour = ("red", "blue")[label] if draw.random() < 0.8 else ""
        split = ("train", "train", "val", "test")[number // 2 % 4]
        rows.append((f"p{number}", split, "ab"[label], age, colour, f"text {draw.integers(9)}"))
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("id", "split", "target", "age", "colour", "text"), *rows])


@pytest.mark.parametrize("encoder", ["tabular/ft-transformer", "tabular/mlp"])
def test_a_model_of_text_and_columns_predicts_embeds_and_evaluates_new_tables(
    encoder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_people(tmp_path / "people.csv", 80)
    run = tmp_path / "run"
    data = ["--data.name", "manifest", "--data.columns.tabular", "age,colour"]
    small = ["--encoders.tabular.dim", "16", "--encoders.text.name", "chars"]
    small += ["--encoders.text.dim", "16", "--encoders.text.num_layers", "1", "--fusion.dim", "16"]
    if encoder != "tabular/mlp":
        small += ["--encoders.tabular.num_heads", "2", "--encoders.tabular.num_layers", "1"]
    root = ["--data.root", str(tmp_path / "people.csv")]
    args = [*data, *root, "--encoders.tabular.name", encoder, *small, "--fusion", "concat"]
    args += ["--train.epochs", "4", "--log", "none", "--device", "cpu", "--optim.lr", "0.01"]
    assert train([*args, "--out", str(run)]) == 0
    assert json.loads((run / "metrics.json").read_text())["test"]["accuracy"] > 0.7

    new = [("n1", "41", "purple", "hi"), ("n2", "", "", "hi"), ("n3", "54", "blue", "")]
    with (tmp_path / "new.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("id", "Age", "Colour", "text"), *new])
    ask = ["--model", str(run), *data, "--data.root", str(tmp_path / "new.csv")]
    capsys.readouterr()
    assert console(["predict", *ask, "--out", str(tmp_path / "p.csv")]) == 0
    warning = "not trained on: Colour in 1 of 2 cells, such as 'purple' (tabular)"
    assert warning in capsys.readouterr().out
    answers = pv.read_csv(tmp_path / "p.csv").to_pylist()
    assert [row["present_tabular"] for row in answers] == [True, False, True]
    model = fusionzoo.load(run)
    raw = [
        {"text": "hi", "tabular": {"age": 41, "colour": "purple"}},
        {"text": "hi"},
        {"tabular": {"age": "54", "colour": "blue"}},
    ]
    for row, answer in zip(answers, model.predict(raw), strict=True):
        assert row["p_a"] == pytest.approx(answer.probabilities["a"], abs=1e-5)
    assert console(["embed", *ask, "--out", str(tmp_path / "e.parquet")]) == 0
    embedded = {row["id"]: row for row in pq.read_table(tmp_path / "e.parquet").to_pylist()}
    assert not any(embedded["n2"]["tabular"]) and any(embedded["n1"]["tabular"])
    evaluate = ["evaluate", "--model", str(run), *data, *root, "--split", "test"]
    assert console([*evaluate, "--out", str(tmp_path / "m.json")]) == 0
    stored = json.loads((run / "metrics.json").read_text())["test"]["accuracy"]
    measured = json.loads((tmp_path / "m.json").read_text())["accuracy"]
    assert measured == pytest.approx(stored, abs=1e-6)


def test_the_hour_of_a_date_is_part_of_it_and_equal_instants_are_equal() -> None:
    hours = ["2021-03-01 22:30", "2021-03-01T23:30+01:00", "2021-03-02 06:00"]
    kind = {"kinds": {"at": "date iso time"}, "columns": {"tabular": "at"}}
    first, second, third = cells(create_dataset([{"at": x} for x in hours], **kind))
    day = {"at year": 2021, "at days": 18687, "at month": "3", "at weekday": "Mon"}
    assert first == second == {**day, "at hour": 22.5}
    assert third is not None and third["at hour"] == 6
    excel = {"kinds": {"at": "date excel time"}, "columns": {"tabular": "at"}}
    (noon,) = cells(create_dataset([{"at": "44256.5"}], **excel))
    assert noon is not None and (noon["at days"], noon["at hour"]) == (18687, 12)
