"""What the columns of a table are found to hold, and the settings that say so."""

from __future__ import annotations

import datetime
import random
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

import fusionzoo
from fusionzoo.datasets.opening.as_trained import complete_for_model
from fusionzoo.datasets.opening.complete import complete
from fusionzoo.datasets.opening.spec import DataSpec
from fusionzoo.datasets.sources.cell_kinds import find_date_order
from fusionzoo.datasets.sources.infer import find_column, target_kind, tells_alone
from fusionzoo.datasets.summary import data_summary
from fusionzoo.datasets.tables.provenance import LoadedTable
from fusionzoo.errors import FusionZooError
from fusionzoo.ground.cells import whole_dates

N = 60


def column(cells: list[Any]) -> Any:
    return pa.array((cells * N)[: max(N, len(cells))])


@pytest.mark.parametrize(
    ("cells", "kind"),
    [
        (["60,0 kg", "72,5 kg", ""], "number kg"),
        (["3.5%", "4 %", "7%"], "number %"),
        (["12", "13", "k.A.", "15", "16", "17"], "number"),
        (["2021-02-03", "2020-12-28T08:00"], "date iso time"),
        (["28/02/2021", "01/12/2020"], "date dmy"),
        (["1-2", "3-4"], "category"),
    ],
)
def test_columns_are_read_as_people_write_them(cells: list[Any], kind: str) -> None:
    assert find_column("x", column(cells)).kind == kind


@pytest.mark.parametrize(
    ("cells", "kind"),
    [
        (["0", "1", "2"], "classification"),
        (["yes", "no"], "classification"),
        (["1,5", "2,5", "7,25"], "regression"),
        ([1.5, 2.5, None, 4.0], "regression"),
        ([str(n * n) for n in range(N)], "regression"),
        (["sun;sea", "sun", "sea"], "multilabel"),
        (["sun, sea", "sun", "sea"], "multilabel"),
        ([["sun"], ["sun", "sea"], []], "multilabel"),
        ([[0, 1], [1, 1]], "multilabel"),
        (["3 %", "4 %", "7 %"], "regression"),
        (["1.234,50 €", "2.000,00 €", "950,00 €"], "regression"),
    ],
)
def test_the_kind_of_a_target_is_found(cells: list[Any], kind: str) -> None:
    assert target_kind("y", column(cells)).kind == kind


@pytest.mark.parametrize("name", ["Grade", "star_rating", "Schweregrad", "pain level"])
def test_a_few_whole_numbers_in_a_row_are_levels_if_the_name_says_so(name: str) -> None:
    assert target_kind(name, column([1, 2, 3, 4, 5])).kind == "ordinal"
    assert target_kind(name, column([1, 2, 7])).kind == "classification"
    assert target_kind("digit", column([1, 2, 3, 4, 5])).kind == "classification"


@pytest.mark.parametrize(
    ("cells", "targets"),
    [
        (["60,5 kg", "71,0 kg", "82,5 kg"], [60.5, 71.0, 82.5]),
        (["$1,200.50", "$800.00", "$2,000.00"], [1200.5, 800.0, 2000.0]),
        (["60,5 kg", "n.v.", "82,5 kg", "71 kg", "75,5 kg", "77 kg"], None),
    ],
)
def test_a_target_in_a_unit_is_read_as_its_numbers(
    cells: list[str], targets: list[float] | None
) -> None:
    rows = pa.table({"x": [n % 7 + 0.5 for n in range(N)], "y": column(cells)})
    if targets is None:  # another word among numbers with a unit may be anything
        assert target_kind("y", rows["y"]).kind == "classification"
        return
    data = fusionzoo.create_dataset(rows, target="y")
    (target,) = data.scheme or ()
    values = data.targets[:3, 0] * target.deviation + target.mean
    assert values.tolist() == pytest.approx(targets, rel=1e-5)


VECTORS = np.arange(2.0 * N).reshape(N, 2)


@pytest.mark.parametrize(
    ("cells", "kind"),
    [
        (VECTORS.tolist(), "vector"),
        ([*VECTORS], "vector"),
        ([None, *VECTORS.tolist()[1:]], "vector"),
        ([*torch.tensor(VECTORS)], "vector"),
        ([[x] * (1 + n % 2) for n, x in enumerate(VECTORS.tolist())], "sequence"),
        ([np.tile(x, (1 + n % 2, 1)) for n, x in enumerate(VECTORS)], "sequence"),
    ],
    ids=["lists", "arrays", "one missing", "tensors", "lists of lists", "matrices"],
)
def test_lists_of_numbers_and_arrays_are_vectors_and_sequences(cells: Any, kind: str) -> None:
    rows = {"age": [n % 9 for n in range(N)], "y": ["a", "b"] * (N // 2)}
    frame = pd.DataFrame({**rows, "numbers": pd.Series(list(cells), dtype=object)})
    items = [
        {**row, "numbers": cell} for row, cell in zip(frame.to_dict("records"), cells, strict=True)
    ]
    for source in (frame, items):
        data = fusionzoo.create_dataset(source, target="y")
        assert data.modalities == {"tabular": "tabular", kind: kind}
        value = data[1].values[kind]  # type: ignore[union-attr]
        assert np.asarray(value).reshape(-1, 2)[0].tolist() == VECTORS[1].tolist()
    with pytest.raises(FusionZooError, match="left out: 2 to 3 numbers: of one length"):
        fusionzoo.create_dataset(
            [{"numbers": [1.0] * (2 + n % 2), "y": n % 2} for n in range(N)], target="y"
        )


def test_a_column_called_split_may_be_an_input() -> None:
    rows = {
        "split": [n / 7 for n in range(N)],
        "age": [n % 9 for n in range(N)],
        "y": [0, 1] * (N // 2),
    }
    number: dict[str, Any] = {"kinds": {"split": "number"}}
    with pytest.raises(FusionZooError, match="if column 'split' is an input"):
        fusionzoo.create_dataset(rows, target="y").split("train")
    for settings in (number, {**number, "columns": {"tabular": ["split", "age"]}}):
        data = fusionzoo.create_dataset(rows, target="y", **settings)
        assert [*data[0].values["tabular"]] == ["split", "age"]  # type: ignore[union-attr]
        assert {*data.splits} == {"train", "val", "test"}
    assert (
        "split"
        not in fusionzoo.create_dataset(rows, target="y", kinds={"split": "none"})[0].values[
            "tabular"
        ]
    )  # type: ignore[union-attr]
    with pytest.raises(FusionZooError, match="split is no modality"):
        fusionzoo.create_dataset(rows, target="y", kinds={"split": "text"})


@pytest.mark.parametrize("kind", [set, frozenset, lambda x: str({*x}) if x else "set()"])
def test_sets_of_labels_are_lists(kind: Any) -> None:
    rows = [{"age": n % 9, "y": kind(["b", "a"][: n % 3])} for n in range(N)]
    data = fusionzoo.create_dataset(rows, target="y")
    assert data.scheme is not None and data.scheme[0].kind == "multilabel"
    assert [[*x] for x in data.targets[:3].tolist()] == [[0, 0], [0, 1], [1, 1]]


@pytest.mark.parametrize("kind", ["list", "struct", "binary"])
def test_columns_that_no_text_can_hold_are_named_with_the_columns_kept(kind: str) -> None:
    odd = {"list": [[0] * (1 + n % 3) for n in range(N)], "struct": [{"a": n} for n in range(N)]}
    cells = odd.get(kind, [b"\xff%d" % n for n in range(N)])
    done = complete({"name": "manifest", "root": table().append_column("odd", [cells])}, "klasse")
    assert ("odd", "left out") in [row[:2] for row in done.rows]
    tags = table().append_column("tags", pa.array([["a", "b"][: 1 + n % 2] for n in range(N)]))
    done = complete({"name": "manifest", "root": tags}, "tags")
    assert done.target_kinds == {"tags": "multilabel"}
    with pytest.raises(FusionZooError, match="target 'odd' holds struct<a: int64>, no labels"):
        structs = table().append_column("odd", [odd["struct"]])
        complete({"name": "manifest", "root": structs}, "odd")


@pytest.mark.parametrize(
    ("cells", "problem"),
    [
        ([None], "'y' is empty in all rows"),
        ([[]], "'y' is empty in all rows"),
        (["a"], "'y' has a single value"),
        ([f"name {n}" for n in range(N)], "'y' has 60 different values in 60 rows, too many"),
    ],
)
def test_a_target_of_which_nothing_can_be_learnt_is_refused_in_training_alone(
    cells: list[Any], problem: str
) -> None:
    kind = pa.list_(pa.string()) if isinstance(cells[0], list) else pa.string()
    rows = table().append_column("y", pa.array((cells * N)[:N], kind))
    settings = {"name": "manifest", "root": rows}
    with pytest.raises(FusionZooError, match=problem):
        complete(settings, "y", to_train=True)
    assert complete(settings, "y").target_kinds


def test_columns_that_their_names_explain_are_in_the_table_of_columns() -> None:
    rows = table().append_column("image", pa.array([f"{n}.png" for n in range(N)]))
    rows = rows.append_column("split", pa.array(["train", "test", None] * (N // 3)))
    done = complete({"name": "manifest", "root": rows}, "klasse")
    assert ("image", "image", "by its name, such as '0.png'") in done.rows
    assert ("split", "split", "by its name, such as 'train', 20 missing") in done.rows


def test_days_stand_first_only_where_the_cells_allow_nothing_else() -> None:
    assert find_date_order(["01/02/2021"]) == "mdy"
    assert find_date_order(["01/02/2021", "31/02/2021"]) == ""
    assert find_date_order(["13.13.2021"]) == ""


def table() -> pa.Table:
    codes = [f"P{n // 3}" for n in range(N)]
    return pa.table(
        {
            "Patient": codes,
            "Tag": [f"{1 + n % 28:02d}.03.2021" for n in range(N)],
            "Gewicht": [f"{50 + n % 7},5 kg" for n in range(N)],
            "Klasse": [("a", "b", "c")[n % 3] for n in range(N)],
            "Kopie": [("x", "y", "z")[n % 3] for n in range(N)],
        }
    )


def test_the_settings_are_explicit_and_a_leak_is_said() -> None:
    done = complete({"name": "manifest", "root": table()}, "klasse")
    kinds = {"Tag": "date dmy", "Gewicht": "number kg", "Kopie": "category"}
    assert done.settings["columns"] == {"target": "Klasse", "tabular": list(kinds)}
    assert done.settings["kinds"] == kinds
    assert done.settings["decimal"] == ","
    assert done.settings["group_column"] == "Patient"
    assert any("'Kopie' alone predicts 'Klasse'" in note for note in done.notes)
    again = complete(done.settings, "Klasse")
    assert again.settings == done.settings


def test_many_phrases_that_are_read_as_categories_are_said() -> None:
    phrases = [f"chest pain since {n} days" for n in range(30)] * 4
    frame = pd.DataFrame({"a note": phrases, "site": ["of the north", "south"] * 60})
    notes = complete({"name": "manifest", "root": frame.assign(y=range(120))}, "y").notes
    wanted = "has 30 categories of 5 words on average: --data.kinds.'a note' text reads the words"
    assert [x for x in notes if "categories" in x] == [f"column 'a note' {wanted}"]


def test_a_kind_of_the_users_is_taken_and_none_leaves_a_column_out() -> None:
    kinds = {"Kopie": "none", "Gewicht": "category"}
    done = complete({"name": "manifest", "root": table(), "kinds": kinds}, "Klasse")
    assert done.settings["columns"]["tabular"] == ["Tag", "Gewicht"]
    assert done.settings["kinds"]["Gewicht"] == "category"
    assert not any("alone predicts" in note for note in done.notes)


def test_dates_become_year_month_weekday_and_days() -> None:
    data = fusionzoo.create_dataset(table(), target="Klasse")
    cells = data[0].values["tabular"]
    assert [cells[f"Tag {x}"] for x in ("year", "month", "weekday")] == [2021.0, "3", "Mon"]
    assert cells["Tag days"] == (datetime.date(2021, 3, 1) - datetime.date(1970, 1, 1)).days
    assert float(cells["Gewicht"]) == 50.5
    assert whole_dates(cells)["Tag"] == "2021-03-01"
    assert any("Tag 2021-03-14 ± 7.89 days" in x for x in data_summary(data))
    # Days of a spreadsheet are dates if the user says so.
    days = pa.table({"on": [44228 + n % 9 for n in range(N)], "y": ["a", "b"] * (N // 2)})
    data = fusionzoo.create_dataset(days, target="y", kinds={"on": "date"})
    assert data[0].values["tabular"]["on year"] == 2021.0


def test_a_table_of_other_order_and_columns_is_read_as_the_training_table() -> None:
    stored = complete({"name": "manifest", "root": table()}, "Klasse").settings
    shuffled = table().select(["Kopie", "Gewicht", "Patient"])
    shuffled = shuffled.append_column("neu", pa.nulls(N, pa.string()))
    done = complete_for_model({"name": "manifest", "root": shuffled}, stored)
    assert "target" not in done.settings["columns"]
    assert done.notes == (
        "columns as the model was trained: tabular of Tag, Gewicht, Kopie",
        f"no column Tag in {done.loaded and done.loaded.source}: its cells are missing",
    )


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("Gewicht_kg", "(is it 'Gewicht_kg'?)"),
        ("gewicht in kg", "(is it 'gewicht in kg'?)"),
        ("Gewich", "(is it 'Gewich'?)"),
        ("Haarfarbe", ""),
    ],
)
def test_a_column_that_is_called_otherwise_is_suggested(name: str, hint: str) -> None:
    stored = complete({"name": "manifest", "root": table()}, "Klasse").settings
    renamed = table().rename_columns({"Gewicht": name})
    done = complete_for_model({"name": "manifest", "root": renamed}, stored)
    wanted = f"no column Gewicht {hint}".strip()
    assert done.notes[1:] == (
        f"{wanted} in {done.loaded and done.loaded.source}: its cells are missing",
    )


def test_a_column_of_another_unit_is_named_with_both_units() -> None:
    stored = {"name": "manifest", "columns": {"tabular": ["Dosis (mg)", "Alter"], "text": "Befund"}}
    new = pa.table({"Dosis (g)": ["1"], "Alter": ["3"], "Befunde": ["ohne"]})
    notes = complete_for_model({"name": "manifest", "root": new}, stored).notes
    unit = "no column Dosis (mg) (is it 'Dosis (g)'? its unit is g instead of mg) in the Table"
    assert notes[1:] == (
        "no column Befund (is it 'Befunde'?: --data.columns.text names it)",
        f"{unit}: its cells are missing",
    )


@pytest.mark.parametrize(
    ("name", "cells", "problem"),
    [
        ("Gewicht", ["50,5 kg", "50500 g"], r"'50500 g', in g; the model was trained on kg: conv"),
        ("Gewicht", ["schwer"], "'schwer', which is no number; the model was trained on numbers"),
        ("Tag", ["gestern"], "'gestern', which is no date of day, month, year"),
        ("Gewicht", ["50,5", "k.A."], None),
        ("Tag", [datetime.date(2021, 3, 4)], None),
        ("Tag", ["2021-03-04", ""], None),
    ],
)
def test_another_unit_or_type_than_in_training_is_refused_in_one_line(
    name: str, cells: list[Any], problem: str | None
) -> None:
    stored = complete({"name": "manifest", "root": table()}, "Klasse").settings
    stored["na"] = ["k.A."]
    new = table().drop_columns(name).append_column(name, column(cells)[:N])
    settings = {"name": "manifest", "root": new}
    if problem is None:
        assert complete_for_model(settings, stored).settings["kinds"] == stored["kinds"]
        return
    with pytest.raises(FusionZooError, match=f"Table: column '{name}' holds {problem}") as found:
        complete_for_model(settings, stored)
    assert "\n" not in str(found.value)


def test_paths_in_a_table_in_memory_start_from_the_base(tmp_path: Path) -> None:
    from PIL import Image

    for name in ("a.png", "b.png"):
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    frame = pd.DataFrame({"photo": ["b.png", "a.png"] * (N // 2), "y": ["a", "b"] * (N // 2)})
    frame.loc[0, "photo"] = ""
    frame["size"] = [float(n % 4) for n in range(N)]
    data = fusionzoo.create_dataset(frame, target="y", base=str(tmp_path))
    assert data[1].values["image"].shape == (3, 8, 8)


def test_a_number_alone_that_sorts_the_classes_is_a_leak() -> None:
    score = pa.array([str(n) for n in range(N)])
    classes = pa.array(["low" if n < N // 2 else "high" for n in range(N)])
    assert tells_alone(score, "number", classes, "classification")
    assert not tells_alone(score, "number", pa.array(["a", "b"] * (N // 2)), "classification")


def test_the_sheet_that_has_the_target_is_read_and_dates_of_excel_are_dates(tmp_path: Path) -> None:
    import openpyxl

    book = openpyxl.Workbook()
    book.active.append(["note"])
    book.active.append(["made by hand"])
    sheet = book.create_sheet("Daten")
    sheet.append(["on", "size", "y"])
    for n in range(N):
        sheet.append([datetime.datetime(2021, 2, 1 + n % 9), n % 5 + 0.5, "ab"[n % 2]])
    book.save(tmp_path / "my.xlsx")
    done = complete({"name": "manifest", "root": str(tmp_path / "my.xlsx")}, "y")
    assert done.settings["sheet"] == "Daten"
    assert done.settings["kinds"] == {"on": "date iso"}
    with pytest.raises(FusionZooError, match="no sheet of Sheet, Daten has the columns"):
        complete({"name": "manifest", "root": str(tmp_path / "my.xlsx")}, "z")


def test_the_sheet_with_the_columns_of_the_model_is_read(tmp_path: Path) -> None:
    from openpyxl import Workbook

    stored = {"name": "manifest", "columns": {"tabular": ["a", "b"], "target": "y"}, "sheet": "old"}

    def read_sheet(**sheets: list[str]) -> str:
        book = Workbook()
        for name, columns in sheets.items():
            rows = book.create_sheet(name)
            for line in ([columns] if columns else []), [[1.5] * len(columns)] * 3:
                for row in line:
                    rows.append(row)
        book.save(tmp_path / "book.xlsx")
        return complete_for_model({"name": str(tmp_path / "book.xlsx")}, stored).settings["sheet"]

    assert read_sheet(cover=["title"], new=["b", "a"], part=["a"]) == "new"
    assert read_sheet(new=["a", "b"], old=["a", "b"]) == "old"
    assert read_sheet(cover=[], part=["b"]) == "part"


def test_the_file_of_another_data_set_is_not_read_as_a_table(tmp_path: Path) -> None:
    (tmp_path / "mine.bin").write_bytes(b"\x00\x01")
    settings = {"name": "stamps", "root": str(tmp_path / "mine.bin")}
    assert complete(settings, to_train=True).settings == settings


@pytest.mark.parametrize("empty", [None, "", "NA"])
def test_rows_without_a_label_are_said_and_not_trained_on(
    empty: str | None, tmp_path: Path
) -> None:
    labels = [empty if n % 5 == 0 else "abc"[n % 3] for n in range(N)]
    rows = pd.DataFrame({"x": [n + 0.5 for n in range(N)], "y": labels})
    rows.to_csv(tmp_path / "m.csv", index=False)
    done = complete({"name": str(tmp_path / "m.csv")}, "y", to_train=True)
    said = "12 of 60 rows have no 'y'"
    if empty == "NA":  # it may be a class
        said = f"warning: {said}, as 'NA' is read as missing (--data.na '' makes it a class)"
    assert f"{said}: they are not trained on" in done.notes
    assert "target" not in done.settings["columns"]
    data = fusionzoo.create_dataset(str(tmp_path / "m.csv"), target="y")
    (target,) = data.scheme or ()
    assert (target.name, target.classes) == ("y", ("a", "b", "c"))
    assert int(data.targets.isnan().sum()) == 12


def test_an_empty_list_is_a_label_and_an_empty_table_says_so() -> None:
    rows = table().append_column("tags", pa.array([["a", "b"][: n % 3] for n in range(N)]))
    done = complete({"name": "manifest", "root": rows}, "tags", to_train=True)
    assert not any("have no 'tags'" in note for note in done.notes)
    with pytest.raises(FusionZooError, match="has no rows"):
        complete({"name": "manifest", "root": rows.slice(0, 0)}, "tags", to_train=True)


# ---- sixty columns of twenty kinds


WORDS = ["the", "patient", "was", "well", "today", "and", "slept", "before", "pain", "came"]
DAY = datetime.date(2021, 11, 28)
DAYS = [DAY + datetime.timedelta(days=9 * n) for n in range(N)]


def drawn(values: Any, seed: int = 0) -> list[Any]:
    return random.Random(seed).choices(list(values), k=N)


def sentences(low: int, high: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(low, high))) for _ in range(N)]


def numbers(text: str, low: float, high: float, seed: int, comma: bool = False) -> list[str]:
    draw = random.Random(seed)
    cells = [text.format(draw.uniform(low, high)) for _ in range(N)]
    swap = str.maketrans(",.", ".,")
    return [cell.translate(swap) for cell in cells] if comma else cells


def gaps(cells: list[Any]) -> list[Any]:
    return [cell if n % 7 else None for n, cell in enumerate(cells)]


# name -> cells, and what a person would say that the column is
COLUMNS: dict[str, tuple[list[Any], str]] = {
    # files
    "photo": ([f"photos/{n}.jpg" for n in range(N)], "image"),
    "scan": (gaps([f"sub folder/{n}.PNG" for n in range(N)]), "image"),
    "Bild": ([f"img_{n % 9}.webp" for n in range(N)], "image"),
    "clip": ([f"{n}.wav" for n in range(N)], "audio"),
    "voice": (gaps([f"x/{n}.mp3" for n in range(N)]), "audio"),
    "Aufnahme": ([f"{n}.flac" for n in range(N)], "audio"),
    "film": ([f"{n}.mp4" for n in range(N)], "image"),
    "features": ([f"v{n % 2}.npy" for n in range(N)], "vector"),
    "frames": (gaps([f"s{n % 2}.npy" for n in range(N)]), "sequence"),
    # text
    "notes": (sentences(4, 12, 1), "text"),
    "title": (gaps(sentences(3, 5, 2)), "text"),
    "Befund": ([f"{x}." for x in sentences(6, 20, 3)], "text"),
    # numbers
    "age": (drawn(range(20, 90)), "number"),
    "siblings": ([str(x) for x in drawn(range(6))], "number"),
    "score": (drawn([0.5, 1.25, 3.75, 8.125]), "number"),
    "CRP": (numbers("{:.1f}", 0.5, 90, 4, comma=True), "number"),
    "lab value": (["n.d." if n % 20 == 3 else str(n % 13 + 0.5) for n in range(N)], "number"),
    "delta": (numbers("{:+.3f}", -2, 2, 5), "number"),
    "scientific": (numbers("{:.2e}", 1, 900_000, 6), "number"),
    # numbers with a unit, a currency or signs between thousands
    "Gewicht": (numbers("{:.1f} kg", 45, 110, 7, comma=True), "number kg"),
    "dose": (gaps(numbers("{:.0f} mg", 5, 80, 8)), "number mg"),
    "temperature": (numbers("{:.1f}°C", 35, 41, 9), "number °C"),
    "humidity": (numbers("{:.0f} %", 10, 90, 10), "number %"),
    "Preis": (numbers("{:,.2f} €", 400, 90_000, 11, comma=True), "number €"),
    "price": (numbers("${:,.2f}", 400, 90_000, 12), "number $"),
    "population": (numbers("{:,.0f}", 90_000, 9_000_000, 13), "number"),
    "Einwohner": (numbers("{:,.0f}", 90_000, 9_000_000, 14, comma=True), "number"),
    "belopp": (
        [x.replace(",", " ") for x in numbers("{:,.0f} kr", 10_000, 90_000, 15)],
        "number kr",
    ),
    # dates and times
    "admission": ([x.isoformat() for x in DAYS], "date iso"),
    "Aufnahmedatum": ([x.strftime("%d.%m.%Y") for x in DAYS], "date dmy"),
    "visit": ([x.strftime("%m/%d/%Y") for x in DAYS], "date mdy"),
    "created_at": ([f"{x.isoformat()}T08:30:00Z" for x in DAYS], "date iso"),
    "timestamp": ([datetime.datetime.combine(x, datetime.time(9)) for x in DAYS], "date iso"),
    "birthday": (gaps(DAYS), "date iso"),
    # categories and booleans
    "sex": (drawn("mf"), "category"),
    "colour": (gaps(drawn(["red", "green", "dark blue"])), "category"),
    "Stadium": (drawn(["I", "II", "IIIa", "IIIb"]), "category"),
    "smoker": (drawn([True, False]), "category"),
    "consent": (drawn(["yes", "no"]), "category"),
    "flag": (drawn(["True", "False"]), "category"),
    "postcode": (drawn(["D-10115", "D-80331", "D-50667"]), "category"),
    "icd10": (drawn(["J18.9", "I21.0", "C34.1", "E11.9"]), "category"),
    "time of day": (drawn(["08:15", "12:30", "23:59"]), "category"),
    "range": (drawn(["10-20", "20-30", "30-40"]), "category"),
    "version": (drawn(["1.0.2", "1.10.0", "2.0.0"]), "category"),
    # what is left out
    "uuid": ([f"9f0{n:05d}-1234-4abc-9def-0123456789ab" for n in range(N)], "id"),
    "sample_id": ([f"S{n:04d}" for n in range(N)], "id"),
    "Nr.": (list(range(1, N + 1)), "id"),
    "row": ([str(n) for n in range(N)], "id"),
    "e-mail": ([f"person{n}@example.org" for n in range(N)], "id"),
    "study": (["fusion 1"] * N, "constant"),
    "scanner": ([3.0] * N, "constant"),
    "country": (gaps(["DE"] * N), "constant"),
    "comment": ([None] * N, "empty"),
    "remark": ([""] * N, "empty"),
    "unused": (["  "] * N, "empty"),
    # groups, of which one is taken and the others are inputs by what they hold
    "patient": ([f"p{n // 3}" for n in range(N)], "group"),
    "ward": (drawn(["A1", "A2", "B1"]), "category"),
    "reader": (drawn(["dr. a", "dr. b"]), "category"),
    "batch": ([str(n // 10) for n in range(N)], "number"),
}


def completed(folder: Path) -> DataSpec:
    for n in range(2):
        np.save(folder / f"v{n}.npy", np.zeros(4, np.float32))
        np.save(folder / f"s{n}.npy", np.zeros((2, 4), np.float32))
    columns = {name: pa.array(cells) for name, (cells, _) in COLUMNS.items()}
    table = pa.table({**columns, "y": ["a", "b"] * (N // 2)})
    loaded = LoadedTable(table=table, source="table", root=folder)
    return complete({"name": "manifest", "root": loaded}, "y")


def test_sixty_columns_of_twenty_kinds_are_read_as_a_person_would(tmp_path: Path) -> None:
    shown = {name: kind for name, kind, _ in completed(tmp_path).rows}
    assert len(COLUMNS) >= 60
    wrong = {
        name: (kind, shown[name])
        for name, (_, kind) in COLUMNS.items()
        if shown[name].removeprefix("left out: ") != kind
    }
    assert wrong == {}
