"""A model remembers its table: evaluate, predict and embed need the run and new data alone."""

from __future__ import annotations

import csv
import json
import random
import re
import shutil
import socket
import unicodedata
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import fusionzoo as fz
from fusionzoo.cli import main
from fusionzoo.errors import FusionZooError
from fusionzoo.model.trained_on import TrainedOn, hash_texts

WORDS = ("rot", "blau", "hell", "dunkel", "stabil", "akut", "ruhig")
LABELS = ("Husten", "Fieber", "Atemnot")
TARGETS = {
    "classes": "Schwere",
    "regression": "Dauer",
    "multilabel": "Zeichen",
    "several": ["Schwere", "Dauer"],
}
NAMES = ("Schwere", "Dauer", "Zeichen")  # of targets
QUICK: dict[str, Any] = {
    **{"epochs": 1, "fusion": {"name": "concat", "dim": 16}, "batch_size": 16, "num_workers": 0},
    **{"log": "none", "device": "cpu", "out": "runs/a"},
}
TEXT = {"name": "chars", "dim": 16, "num_heads": 2}
ENCODERS = {"text": TEXT, "tabular": {"name": "tabular/mlp", "dim": 16}}
ANSWER: dict[str, Any] = {"num_workers": 0, "device": "cpu"}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSIONZOO_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def make_rows(count: int = 48) -> list[dict[str, str]]:
    """Return the rows of a German table: ids, a unit, dates, decimal commas, text, targets."""
    chance = random.Random(0)
    rows = []
    for number in range(count):
        level = number % 3
        weight, crp = 60 + 10 * level + chance.gauss(0, 3), 5 * level + chance.random()
        words = [chance.choice(WORDS) for _ in range(4)]
        rows.append(
            {
                "Fall": f"F{number:04d}",
                "Gewicht": f"{weight:.1f} kg".replace(".", ","),
                "Aufnahme": f"{chance.randrange(1, 29):02d}.{chance.randrange(1, 13):02d}.2021",
                "CRP": f"{crp:.2f}".replace(".", ","),
                "Station": chance.choice(("A1", "B2", "C3")),
                "Befund": f"{' '.join(words)} Zimmer {number}",
                "Schwere": ("leicht", "mittel", "schwer")[level],
                "Dauer": f"{3 + 2 * level + chance.random():.1f} Tage".replace(".", ","),
                "Zeichen": ";".join(LABELS[: level + 1]),
            }
        )
    return rows


def only(rows: Sequence[Mapping[str, str]], names: Sequence[str]) -> list[dict[str, str]]:
    return [{name: row.get(name, "-") for name in names} for row in rows]


def write(kind: str, rows: Sequence[Mapping[str, str]], name: str) -> Any:
    """Return the rows as data of a kind: a file, shards, or what is in memory."""
    file = f"{name}.{kind}"
    if kind == "list":
        return [dict(row) for row in rows]
    if kind == "frame":
        return pd.DataFrame(rows, index=pd.Index(range(100, 100 + len(rows)), name="Zeile"))
    if kind == "csv":
        with open(file, "w", newline="", encoding="utf-8") as out:
            writer = csv.DictWriter(out, list(rows[0]), delimiter=";")
            writer.writeheader()
            writer.writerows(rows)
    elif kind == "xlsx":
        from openpyxl import Workbook

        book = Workbook()
        for line in ([*rows[0]], *([*row.values()] for row in rows)):
            book.active.append(line)  # type: ignore[union-attr]
        book.save(file)
    elif kind == "jsonl":
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        Path(file).write_text("\n".join(lines), encoding="utf-8")
    else:
        pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), file)
    return file


def by_id(predictions: Any) -> dict[str, dict[str, Any]]:
    """Return the rows of predictions by the user's ids."""
    if isinstance(predictions, pd.DataFrame):
        predictions = predictions.to_dict("records")
    rows = predictions if isinstance(predictions, list) else predictions.to_pylist()
    return {row.get("Fall", row.get("id")): row for row in rows}


def assert_same(new: Any, old: Any, tolerance: float = 1e-6) -> None:
    """Compare the predictions of rows, also in another order."""
    new, old = by_id(new), by_id(old)
    assert new.keys() == old.keys()
    for key, row in new.items():
        assert row.keys() == old[key].keys()
        for name, value in row.items():
            wanted = old[key][name]
            if isinstance(wanted, float):
                wanted = pytest.approx(wanted, abs=tolerance)
            assert value == wanted, (key, name)


FORMATS = ("csv", "xlsx", "jsonl", "parquet", "frame", "list")
QUICK_CASES = {
    *[("csv", "classes"), ("xlsx", "regression"), ("jsonl", "multilabel")],
    *[("parquet", "several"), ("frame", "regression"), ("list", "several")],
}
CASES = [
    pytest.param(*case, marks=() if case in QUICK_CASES else pytest.mark.slow)
    for case in product(FORMATS, TARGETS)
]


@pytest.mark.parametrize(("kind", "targets"), CASES)
def test_each_command_needs_the_run_and_new_data_alone(
    kind: str, targets: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target = TARGETS[targets]
    rows, named = make_rows(), [target] if isinstance(target, str) else target
    inputs = [name for name in rows[0] if name not in NAMES]
    data = write(kind, only(rows, [*inputs, *named]), "kis")
    fz.train(data, target=target, encoders=ENCODERS, **QUICK)
    old = fz.predict("runs/a", data, **ANSWER)
    assert len(by_id(old)) == len(rows)

    assert fz.evaluate("runs/a", **ANSWER)
    every = fz.evaluate("runs/a", data, split="all", **ANSWER)
    shuffled = random.Random(1).sample(rows, len(rows))
    mixed = ["Notiz", *reversed(inputs), *named, "Nummer"]
    moved = write(kind, only(shuffled, mixed), "moved")
    again = fz.evaluate("runs/a", moved, split="all", **ANSWER)
    assert again["loss"] == pytest.approx(every["loss"], abs=1e-5)

    new = write(kind, only(shuffled, [*mixed[:3], "Nummer", *mixed[3 : len(inputs) + 1]]), "new")
    predicted = fz.predict("runs/a", new, **ANSWER)
    assert_same(predicted, old)
    for number, made in enumerate((data, new)):
        path = fz.embed("runs/a", made, out=f"e{number}.parquet", **ANSWER)
        assert len(pq.read_table(path)) == len(rows)

    less = [name for name in inputs if name not in ("Befund", "CRP")]
    capsys.readouterr()
    assert len(by_id(fz.predict("runs/a", write(kind, only(rows, less), "less"), **ANSWER))) == 48
    printed = capsys.readouterr().out
    assert printed.count("no column CRP") == 1
    assert printed.count("missing in all samples") == 1
    assert kind != "frame" or list(predicted.index) == list(new.index)
    assert isinstance(predicted, list) == (kind == "list")


@pytest.mark.parametrize("key", ["id", "Fall"])
def test_joined_files_are_joined_again(key: str) -> None:
    rows = make_rows()
    rows = [{**row, "id": row["Fall"]} for row in rows]
    write("csv", only(rows, [key, "Gewicht", "CRP", "Schwere"]), "kis")
    write("csv", only(rows, ["Befund", key]), "befunde")
    fz.train("kis.csv", target="Schwere", join={"text": "befunde.csv"}, encoders=ENCODERS, **QUICK)
    old = fz.predict("runs/a", "kis.csv", **ANSWER)
    assert old["present_text"].to_pylist() == [True] * 48
    assert old[key].to_pylist() == [row["Fall"] for row in rows]
    shuffled = random.Random(1).sample(rows, 20)
    write("csv", only(shuffled, ["Notiz", "CRP", key, "Gewicht"]), "neu")
    write("csv", only(rows, ["Notiz", key, "Befund"]), "mehr")
    wanted = [row for row in old.to_pylist() if row[key] in {row["Fall"] for row in shuffled}]
    assert_same(fz.predict("runs/a", "neu.csv", **ANSWER), wanted)
    again = fz.predict("runs/a", "neu.csv", join={"text": "mehr.csv"}, **ANSWER)
    assert_same(again, wanted)
    assert fz.evaluate("runs/a", **ANSWER)["loss"] > 0
    assert fz.embed("runs/a", "neu.csv", out="e.parquet", **ANSWER).is_file()
    with pytest.raises(FusionZooError, match=r"joins tables: fusionzoo\.predict\(run, rows, join"):
        fz.load("runs/a").predict(only(shuffled, ["CRP", "Gewicht"]))


def test_shards_are_read_as_the_training_table() -> None:
    rows = make_rows()
    write("csv", only(rows, [name for name in rows[0] if name not in NAMES[1:]]), "kis")
    assert main(["data", "convert", "kis.csv", "shards", "--target", "Schwere"]) == 0
    fz.train("shards", encoders=ENCODERS, **QUICK)
    old = fz.predict("runs/a", "shards", **ANSWER)
    assert len(old) == 48
    assert fz.evaluate("runs/a", **ANSWER)["loss"] > 0
    assert fz.embed("runs/a", "shards", out="e.parquet", **ANSWER).is_file()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run trained on a CSV file, its classes the target."""
    folder = tmp_path_factory.mktemp("trained")
    rows = make_rows()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write("csv", only(rows, [name for name in rows[0] if name not in NAMES[1:]]), "kis")
        fz.train(
            str(folder / "kis.csv"), target="Schwere", encoders=ENCODERS, **{**QUICK, "out": "a"}
        )
    return folder / "a"


def test_a_list_of_dicts_gives_a_list_of_dicts(run: Path) -> None:
    rows = make_rows()
    predicted = fz.predict(run, rows[:3], **ANSWER)
    assert [row["Fall"] for row in predicted] == ["F0000", "F0001", "F0002"]
    assert predicted[0]["label"] in ("leicht", "mittel", "schwer")
    with pytest.raises(FusionZooError, match=r"one row: give a list of rows, \[row\]"):
        fz.predict(run, rows[0], **ANSWER)


def test_a_file_gives_a_file_with_ids_under_the_name_of_their_column(run: Path) -> None:
    rows = make_rows()
    write("csv", rows, "neu")
    path = fz.predict(run, "neu.csv", out="p.csv", **ANSWER)
    table = pd.read_csv(path)
    assert table.columns[:2].tolist() == ["Fall", "label"]
    assert table["Fall"].tolist() == [row["Fall"] for row in rows]
    write("csv", only(rows, ["Gewicht", "Befund"]), "neu")
    without = fz.predict(run, "neu.csv", **ANSWER)
    assert without["id"].to_pylist() == [str(number) for number in range(48)]


def test_ids_of_an_index_stay_in_the_column_id(run: Path) -> None:
    frame = pd.DataFrame(make_rows()).set_index("Fall")
    predicted = fz.predict(run, frame, **ANSWER)
    assert predicted.index.name == "Fall"
    assert "Fall" not in predicted.columns
    frame.index.name = None
    assert fz.predict(run, frame, **ANSWER)["id"].tolist() == frame.index.tolist()
    twice = pd.concat([frame, frame]).rename_axis("Fall")  # no ids by themselves, but by this name
    predicted = fz.predict(run, twice, **ANSWER)
    assert predicted["id"].tolist() == predicted.index.tolist() == twice.index.tolist()


def test_a_column_of_ids_called_as_one_of_the_predictions_does_not_clash() -> None:
    rows = [{**row, "Label": row["Fall"]} for row in make_rows()]
    names = ["Label", "Gewicht", "Befund", "Schwere"]
    write("csv", only(rows, names), "kis")
    fz.train("kis.csv", target="Schwere", encoders=ENCODERS, **QUICK)
    columns = fz.predict("runs/a", "kis.csv", **ANSWER).column_names
    assert columns[:2] == ["id", "label"]


@pytest.mark.parametrize("kind", ["frame", "list", "table"])
def test_a_loaded_model_answers_rows_of_the_training_table(
    kind: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, model = make_rows(), fz.load(run)
    wanted = [row["p_schwer"] for row in fz.predict(run, rows, **ANSWER)]
    mixed = only(rows, ["Notiz", *reversed([x for x in rows[0] if x not in NAMES]), "split"])
    data = pd.DataFrame(mixed) if kind == "frame" else mixed
    data = pa.Table.from_pylist(mixed) if kind == "table" else data
    capsys.readouterr()
    answers = model.predict(data)
    assert capsys.readouterr().out == ""
    assert [answer.probabilities["schwer"] for answer in answers] == pytest.approx(wanted, abs=1e-6)
    assert len(model.embed(data)["fused"]) == 48
    (single,) = model.predict(mixed[:1])
    assert single.probabilities["schwer"] == pytest.approx(wanted[0], abs=1e-6)


def test_rows_that_lack_columns_are_answered_and_that_is_said(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = fz.load(run)
    capsys.readouterr()
    assert len(model.predict([{"Befund": "rot und hell"}, {"Befund": "blau"}])) == 2
    assert len(model.predict([{"Gewicht_kg": "60,0 kg", "Alter": 3, "CRP": 1.5}])) == 1
    printed = capsys.readouterr().out
    assert "no column Gewicht (is it 'Gewicht_kg'?)" in printed
    with pytest.raises(FusionZooError, match=r"in g; the model was trained on kg"):
        model.predict([{"Gewicht": "60000 g"}])


def with_point(row: dict[str, str]) -> dict[str, str]:
    return {**row, **{name: row[name].replace(",", ".") for name in ("Gewicht", "CRP")}}


def test_numbers_with_another_decimal_sign_name_the_setting_that_reads_them(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commas = make_rows()
    points = [with_point(row) for row in commas]
    wanted = fz.predict(run, commas, **ANSWER)
    assert fz.predict(run, points, **ANSWER) == wanted  # what can be read is
    points[1]["Gewicht"] = "1.234 kg"
    with pytest.raises(FusionZooError, match=r"'Gewicht' holds .* and '1.234', which decimal='\.'"):
        fz.predict(run, points, **ANSWER)
    assert len(fz.predict(run, points, decimal=".", **ANSWER)) == len(wanted)

    points[1]["Gewicht"] = "61.2 kg"
    write("csv", only(points, ["Gewicht", "CRP", "Befund", "Schwere"]), "kis")
    fz.train("kis.csv", target="Schwere", encoders=ENCODERS, **QUICK)
    hint = r"neu.csv: column 'Gewicht' holds '62,8'; decimal=\",\" reads it as 62.8"
    write("csv", commas, "neu")
    with pytest.raises(FusionZooError, match=hint):
        fz.predict("runs/a", "neu.csv", **ANSWER)
    model = fz.load("runs/a")
    named = r"reads it as 62.8 \(which is a setting of fusionzoo.predict"
    for samples in (commas, [{"tabular": {"Gewicht": "62,8", "CRP": None}}]):
        with pytest.raises(FusionZooError, match=named):
            model.predict(samples)
    capsys.readouterr()
    assert main(["predict", "runs/a", "neu.csv", "--out", "p.csv"]) == 2
    assert "holds '62,8'; --data.decimal , reads it as 62.8" in capsys.readouterr().err
    assert fz.predict("runs/a", "neu.csv", decimal=",", out="p.csv", **ANSWER).is_file()


@pytest.mark.parametrize(
    ("unit", "cells", "says"),
    [
        ("kg", ["63.200 kg", "71.450 kg"], "far outside of the range .* weight in 2 of 2"),
        ("kg", ["63200", "63,2"], "far outside of the range .* weight in 1 of 2"),
        ("kg", ["95,1 kg", "35 kg"], ""),  # within three times the range
        ("%", ["0,63", "1"], "weight in %: .* such as 0,63 are read as 0,63 %"),
        ("%", [0.63, 0.7], "weight in %: .* such as 0.63 are read as 0.63 %"),
        ("%", ["0,63 %", "0,7"], ""),
        ("%", ["63", "0,7"], ""),
    ],
)
def test_numbers_in_another_unit_than_those_of_training_are_told_of(
    unit: str, cells: list[Any], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    low = 40 if unit == "kg" else 0
    rows = [{"weight": f"{low + n},5 {unit}", "y": "ab"[n % 2]} for n in range(40)]
    encoders = {"tabular": ENCODERS["tabular"]}
    run = fz.train(rows, target="y", **{**QUICK, "encoders": encoders, "max_steps": 1})
    capsys.readouterr()
    asked = [{"weight": cell} for cell in cells]
    fz.predict(run, asked, **ANSWER)
    predicted = warnings(capsys)
    fz.embed(run, asked, **ANSWER)
    assert predicted == warnings(capsys)
    assert re.search(says, predicted) if says else not predicted


def warnings(capsys: pytest.CaptureFixture[str]) -> str:
    lines = capsys.readouterr().out.splitlines()
    return " ".join(line for line in lines if line.startswith("warning"))


@pytest.mark.parametrize("kind", ["csv", "frame", "list"])
def test_rows_that_share_an_id_are_each_answered_in_order(
    kind: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = make_rows()
    wanted = fz.predict(run, rows, **ANSWER)
    order = [0, 3, 0, 1, 3, 3]
    again = [{**rows[row], "Fall": f"F{row:04d}"} for row in order]
    data = write(kind, again, "neu")
    capsys.readouterr()
    answers = fz.predict(run, data, **ANSWER)
    assert "rows with an id that an earlier row has: 3; each" in capsys.readouterr().out
    answers = answers.to_dict("records") if kind == "frame" else answers
    answers = answers if isinstance(answers, list) else answers.to_pylist()
    assert [row["Fall"] for row in answers] == [f"F{row:04d}" for row in order]
    values = [row["p_schwer"] for row in answers]
    assert values == pytest.approx([wanted[row]["p_schwer"] for row in order], abs=1e-6)
    seen = {
        row: fz.evaluate(run, [rows[row]], split="all", **ANSWER)["seen_in_training"]["train"]
        for row in {*order}
    }
    metrics = fz.evaluate(run, data, split="all", **ANSWER)
    assert metrics["seen_in_training"]["train"] == sum(seen[row] for row in order) > 0
    with pytest.raises(FusionZooError, match=r"'F0000' occurs 2 times \(rows .*\): each row needs"):
        fz.embed(run, data, out="e.parquet", **ANSWER)


def test_evaluating_without_labels_names_the_column_that_held_them(run: Path) -> None:
    rows = [{name: x for name, x in row.items() if name not in NAMES} for row in make_rows()]
    write("csv", rows, "neu")
    renamed = pd.DataFrame([{**row, "Schwere_": "leicht"} for row in rows])
    empty = [{**row, "Schwere": ""} for row in rows]
    for data, words in (
        ("neu.csv", r"neu\.csv has no column 'Schwere', which holds the labels \(target= names an"),
        (renamed, r"the DataFrame has no column 'Schwere' \(is it 'Schwere_'\?\)"),
        (empty, "the list: all cells are empty in 'Schwere'"),
    ):
        with pytest.raises(FusionZooError, match=words):
            fz.evaluate(run, data, **ANSWER)
    assert fz.evaluate(run, renamed, target="Schwere_", split="all", **ANSWER)["loss"] > 0
    usual = renamed.rename(columns={"Schwere_": "target"})
    assert fz.evaluate(run, usual, split="all", **ANSWER)["loss"] > 0
    with pytest.raises(FusionZooError, match="has no column 'Dauer'"):
        fz.evaluate(run, usual, target="Dauer", **ANSWER)


def test_samples_by_modality_are_still_taken_and_mistyped_ones_refused(run: Path) -> None:
    model = fz.load(run)
    assert len(model.predict([{"text": "rot"}, {}])) == 2
    with pytest.raises(
        FusionZooError, match=r"the model has no modality 'txt'\. Did you mean 'text'"
    ):
        model.predict([{"txt": "rot"}])


def test_a_model_of_no_table_asks_for_samples_by_modality() -> None:
    model = fz.create_model("concat", {"text": TEXT}, classes=["a", "b"])
    with pytest.raises(FusionZooError, match="not trained on a table: give samples with text"):
        model.predict(pd.DataFrame({"Befund": ["rot"]}))


@pytest.mark.parametrize("name", ["image", "Audio", "vector", "sequence"])
def test_a_further_column_that_the_model_does_not_read_is_not_opened(name: str, run: Path) -> None:
    rows = [{**row, name: "no/such.file"} for row in make_rows()]
    assert len(fz.predict(run, rows, **ANSWER)) == len(rows)


def test_data_in_memory_leave_no_file_behind(run: Path, tmp_path: Path) -> None:
    rows = make_rows()
    for data in (rows, pd.DataFrame(rows)):
        fz.predict(run, data, **ANSWER)
        fz.evaluate(run, data, split="all", **ANSWER)
        fz.load(run).predict(data)
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


def test_a_model_folder_holds_nothing_of_its_author_s_machine(run: Path, tmp_path: Path) -> None:
    own = [str(run.parent), str(Path.home()), socket.gethostname(), str(Path(fz.__file__).parent)]
    for file in (run / "model").rglob("*"):
        contents = file.read_bytes() if file.is_file() else b""
        assert not [word for word in own if len(word) > 5 and word.encode() in contents], file
    assert fz.evaluate(run, **ANSWER)["loss"] > 0  # by the run's config.yaml
    moved = shutil.copytree(run / "model", tmp_path / "elsewhere")
    rows = make_rows()
    assert fz.predict(moved, rows, **ANSWER) == fz.predict(run, rows, **ANSWER)
    with pytest.raises(FusionZooError, match=r"was trained on kis\.csv, as it says"):
        fz.evaluate(moved, **ANSWER)


def test_words_of_a_table_that_look_like_paths_stay() -> None:
    columns = {"tabular": ["/dose", "~x"], "text": "C:/note"}
    settings = {"name": "manifest", "root": "/home/me/a.csv", "columns": columns, "na": ["/", "~"]}
    kinds = {"/dose": "number /min"}
    stored = TrainedOn(settings={**settings, "kinds": kinds, "label_separator": "/"})
    public = stored.without_folders().settings
    assert public == {**settings, "root": "a.csv", "kinds": kinds, "label_separator": "/"}


def rows_for_splits() -> list[dict[str, str]]:
    """Return rows whose splits by a hash of the ids alone are not those that know the classes."""
    rows = [row for n, row in enumerate(make_rows(90)) if n % 3 == 0 or n % 4 == 0]
    more = [("True", str(1 + n % 2)) if n % 3 else ("False", "3") for n in range(len(rows))]
    return [
        {"id": row.pop("Fall"), **row, "Notfall": yes, "Stufe": level}
        for row, (yes, level) in zip(rows, more, strict=True)
    ]


SPLIT_BY: dict[str, dict[str, Any]] = {
    **{name: {"target": columns} for name, columns in TARGETS.items()},
    "yes or no": {"target": ["Notfall", "Dauer"]},
    "levels": {"target": "Stufe", "targets": {"Stufe": "ordinal"}},
}


@pytest.mark.parametrize("kind", SPLIT_BY)
def test_a_model_is_asked_about_the_splits_of_its_training(kind: str) -> None:
    """Splits by hash have the same shares of each class, though predictions need no labels."""
    rows = rows_for_splits()
    run = fz.train(rows, encoders=ENCODERS, **SPLIT_BY[kind], **QUICK)
    tested = json.loads((run.folder / "metrics.json").read_text())["test"]
    found = fz.evaluate(run.folder, rows, **ANSWER)
    assert found["seen_in_training"] == {"train": 0, "val": 0}
    assert found["loss"] == pytest.approx(tested["loss"], rel=1e-4)
    known = fz.load(run.folder).trained_on.ids
    for split in ("train", "val"):
        asked = {**ANSWER, "split": split}
        answered = fz.predict(run.folder, rows, **asked, out="p.parquet")
        embedded = fz.embed(run.folder, rows, **asked, out=f"{split}.parquet")
        for ids in (pq.read_table(answered)["id"].to_pylist(), fz.read_embeddings(embedded).ids):
            assert hash_texts(ids).sort().values.tolist() == known[split].tolist()


@pytest.mark.parametrize("what", ["names", "cells"])
def test_letters_with_an_accent_of_its_own_are_those_of_training(what: str, tmp_path: Path) -> None:
    rows = [
        {"cité": ("São Paulo", "Köln")[n % 2], "mot": f"é {n}", "saison": ("été", "hiver")[n % 2]}
        for n in range(60)
    ]
    settings = {"encoders": {"text": TEXT}, "fusion": "mean", "epochs": 1, "out": tmp_path / "r"}
    columns = {"tabular": "cité", "text": "mot"}
    data = {"root": rows, "columns": columns}
    run = fz.train(data, target="saison", **settings, **ANSWER)
    apart = partial(unicodedata.normalize, "NFD")  # as macOS and PDF files have it
    if what == "names":
        changed = [{apart(name): cell for name, cell in row.items()} for row in rows]
    else:
        changed = [{name: apart(cell) for name, cell in row.items()} for row in rows]
    same, again = (fz.evaluate(run, x, split="all", **ANSWER) for x in (rows, changed))
    assert again["loss"] == pytest.approx(same["loss"], abs=1e-6)
    assert again["accuracy"] == same["accuracy"]
