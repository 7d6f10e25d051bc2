"""A manifest's columns and the files that its cells name: none lost in silence, none outside."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import fusionzoo as fz
from fusionzoo import PairedDataset, create_dataset
from fusionzoo.datasets import Provenance, TableReader, TableSettings, split_by_hash
from fusionzoo.datasets.summary import data_summary
from fusionzoo.datasets.tables.splits import SHARES, make_splits
from fusionzoo.errors import FusionZooError

ROWS = [("a", "train", "x", "one"), ("b", "val", "x", "two"), ("c", "test", "x", "three")]


def write(folder: Path, suffix: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    path = folder / f"m.{suffix}"
    table = [dict(zip(header, row, strict=True)) for row in rows]
    if suffix == "jsonl":
        path.write_text("\n".join(map(json.dumps, table)))
    elif suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(table), path)
    else:
        comma = "\t" if suffix == "tsv" else ","
        path.write_text("\n".join(comma.join(map(str, row)) for row in [header, *rows]) + "\n")
    return str(path)


def opened(folder: Path, header: Sequence[str], rows: Sequence[Any] = ROWS, **more: Any) -> Any:
    return create_dataset("manifest", root=write(folder, "jsonl", header, rows), **more)


def summary(dataset: PairedDataset) -> dict[str, str]:
    lines = data_summary(dataset)
    assert all("\n" not in line for line in lines)
    return {line[:10].strip(): line[10:] for line in lines}


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "parquet"])
@pytest.mark.parametrize(
    "header", [("id ", " split", "target", " text"), ("ID", "Split", "TARGET", "Text ")]
)
def test_names_are_stripped_and_compared_without_case(
    header: Sequence[str], suffix: str, tmp_path: Path
) -> None:
    data = create_dataset("manifest", root=write(tmp_path, suffix, header, ROWS))
    assert data.ids == ["a", "b", "c"]
    assert data.splits == {"train": 1, "val": 1, "test": 1}
    assert data.classes == ["x"]
    assert data.modalities == {"text": "text"}
    assert summary(data)["unused"] == "no column"


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_spaces_around_ids_splits_targets_and_groups_do_not_count(
    suffix: str, tmp_path: Path
) -> None:
    rows = [("a ", " train", "x", " one", "p"), ("b", "train ", " x", "two", " p")]
    header = ("id", "split", "target", "text", "group")
    data = create_dataset("manifest", root=write(tmp_path, suffix, header, rows))
    assert (data.ids, data.splits, data.classes) == (["a", "b"], {"train": 2}, ["x"])
    assert data.groups == ["p", "p"]
    assert data[0].values["text"] == " one"  # text stays as it is


def test_what_the_user_names_is_found_in_the_same_way(tmp_path: Path) -> None:
    header = (" Key", "Part ", "LABEL", "My Note")
    columns = {"id": "key", "split": "part", "target": "label", "words": "my note"}
    data = opened(tmp_path, header, columns=columns, kinds={"words": "text"})
    assert (data.ids, data.classes) == (["a", "b", "c"], ["x"])
    assert data.modalities == {"words": "text"}
    header, rows = ("id", "split", "Age", "text"), [("a", "train", "3", "x")]
    data = opened(tmp_path, header, rows, targets={"age": "regression"})
    assert data.scheme[0].mean == 3


@pytest.mark.parametrize(("first", "second"), [("Text", "text"), (" text", "text "), ("id", "ID")])
@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_two_columns_of_one_name_are_an_error_that_names_both(
    first: str, second: str, suffix: str, tmp_path: Path
) -> None:
    root = write(tmp_path, suffix, (first, second, "image"), [("a", "b", "c")])
    problem = f"the columns {first!r} and {second!r} have the same name"
    with pytest.raises(FusionZooError, match=problem):
        create_dataset("manifest", root=root)


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_two_columns_of_one_name_are_one_clear_error(suffix: str, tmp_path: Path) -> None:
    path = write(tmp_path, suffix, ["x", "y", "x"], [[1, "a", 2], [3, "b", 4]])
    with pytest.raises(FusionZooError, match=r"has two columns 'x': rename one"):
        create_dataset("manifest", root=path, columns={"tabular": "x", "target": "y"})


def test_a_column_that_has_a_name_of_its_own_is_no_second_modality(tmp_path: Path) -> None:
    (tmp_path / "m.csv").write_text("id,text\na,b\n")
    root = str(tmp_path / "m.csv")
    data = create_dataset("manifest", root=root, columns={"note": "text"}, kinds={"note": "text"})
    assert data.modalities == {"note": "text"}


PATIENTS = [(f"s{row}", f"p{row % 6}", f"text {row}") for row in range(60)]


@pytest.mark.parametrize(
    ("column", "settings"),
    [("group", {}), (" Group", {}), ("patient", {"group_column": "Patient"})],
)
@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_samples_of_one_group_stay_together(
    column: str, settings: Any, suffix: str, tmp_path: Path
) -> None:
    root = write(tmp_path, suffix, ("id", column, "text"), PATIENTS)
    data = create_dataset("manifest", root=root, **settings)
    pairs = set(zip(data.groups, data.split_names, strict=True))
    assert len(pairs) == 6
    assert set(data.splits) == {"train", "val", "test"}
    assert data.groups[:2] == ["p0", "p1"]  # and folds keep them together
    said = summary(data)
    assert said["splits"].endswith(f"(by a hash of {column!r})") or "moved to" in said["splits"]
    assert said["groups"] == f"6, each in one split (column {column!r})"
    assert said["unused"] == "no column"


def assign(keys: Sequence[str], *shares: float) -> tuple[dict[str, str], dict[str, str]]:
    made = make_splits(pa.array(keys), (), shares or SHARES)
    return dict(zip(keys, made.splits.to_pylist(), strict=True)), made.moved


def test_a_group_goes_where_its_hash_says_whatever_else_there_is() -> None:
    keys = [f"patient {number}" for number in range(300)]
    splits, moved = assign(keys)
    assert not moved
    assert splits == {key: split_by_hash(key) for key in keys}


@pytest.mark.parametrize("start", range(0, 200, 7))
def test_few_groups_leave_no_split_empty(start: int) -> None:
    keys = [f"p{number}" for number in range(start, start + 3)]
    splits, moved = assign(keys)
    assert set(splits.values()) == {"train", "val", "test"}
    assert all(splits[key] == split_by_hash(key) for key in keys if key not in moved)
    assert set(assign(keys, 1, 0, 0)[0].values()) == {"train"}
    assert set(assign(keys[:1])[0].values()) == {"train"}


def test_the_ids_as_groups_leave_every_sample_alone(tmp_path: Path) -> None:
    data = opened(tmp_path, ("id", "group", "text"), PATIENTS, group_column="id")
    assert data.groups == data.ids
    assert data.split_names == [split_by_hash(key) for key in data.ids]
    assert summary(data)["unused"] == "column 'group'"


def test_groups_that_the_own_splits_tear_apart_are_counted(tmp_path: Path) -> None:
    rows = [("a", "p", "x", "train"), ("b", "p", "y", "test"), ("c", "q", "z", "test")]
    data = opened(tmp_path, ("id", "group", "text", "split"), rows)
    assert data.split_names == ["train", "test", "test"]
    assert summary(data)["groups"] == "2, 1 of them in more than one split (column 'group')"


def test_a_group_column_that_is_something_else_is_not_used_as_one(tmp_path: Path) -> None:
    header, rows = ("id", "group", "text"), [("a", "x", "one"), ("b", "x", "two")]
    data = opened(tmp_path, header, rows, columns={"target": "group"}, shares=(1, 0, 0))
    assert (data.labels, data.groups) == (["x", "x"], ["a", "b"])
    for settings in ({"columns": {"group": "id"}}, {"kinds": {"group": "text"}}):
        with pytest.raises(FusionZooError, match="group is no modality: group_column="):
            opened(tmp_path, header, rows, **settings)
    with pytest.raises(FusionZooError, match=r"no column 'patent' for group_column="):
        opened(tmp_path, header, rows, group_column="patent")


def test_every_column_that_nothing_uses_is_named(tmp_path: Path) -> None:
    header = ("id", "split", "target", "text", "Note", "weight")
    rows = [(*row, "n", 1.5) for row in ROWS]
    data = opened(tmp_path, header, rows)
    assert summary(data) == {
        "data": f"{data.source}: 3 samples",
        "splits": "train 1, val 1, test 1 (column 'split')",
        "classes": "1: x 3",
        "have": "text 3",
        "unused": "columns 'Note', 'weight'",
    }
    labels = opened(tmp_path, header, rows, targets={"weight": "regression"})
    assert summary(labels)["unused"] == "columns 'target', 'Note'"
    assert summary(labels)["target"] == "weight (regression): 3 samples"
    header = (*header[:4], *(f"c{n}" for n in range(30)))
    many = opened(tmp_path, header, [(*row, *"x" * 30) for row in ROWS])
    assert summary(many)["unused"].endswith("'c19' and 10 more")


def test_the_summary_says_how_the_splits_came_about(tmp_path: Path) -> None:
    rows = [(key, text) for key, _, _, text in ROWS]
    assert "by a hash of 'id'" in summary(opened(tmp_path, ("id", "text"), rows))["splits"]
    assert "by a hash of the row" in summary(opened(tmp_path, ("x", "text"), rows))["splits"]
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.txt").write_text("a cat")
    folders = create_dataset("folders", root=str(tmp_path), shares=(1, 0, 0))
    assert "by a hash of folder and stem" in summary(folders)["splits"]
    assert "fixed" in summary(create_dataset("digits"))["splits"]


def test_modalities_and_samples_that_are_left_out_are_said(tmp_path: Path) -> None:
    rows = [("a", "train", "one", [1.0]), ("b", "train", None, [2.0])]
    data = opened(tmp_path, ("id", "split", "text", "vector"), rows, modalities="text")
    assert summary(data)["left out"] == "vector (--data.modalities); 1 sample without text"
    assert summary(data)["have"] == "text 1"
    assert "left out" not in summary(opened(tmp_path, ("id", "split", "text", "vector"), rows))


def test_text_that_looks_like_file_names_is_pointed_out(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"{number}.txt").write_text("words")
    header, rows = ("id", "text"), [("a", "0.txt"), ("b", "1.txt"), ("c", "words")]
    assert "--data.paths text reads the files" in summary(opened(tmp_path, header, rows))["hint"]
    assert "hint" not in summary(opened(tmp_path, header, rows[:2], paths="text"))


def test_a_reader_of_another_ending_is_one_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forget_plugins: object
) -> None:
    class Bars(TableReader):
        """Text, with bars between the cells."""

        def read(self, path: Path, settings: TableSettings) -> tuple[pa.Table, Provenance]:
            lines = [line.split("|") for line in path.read_text().splitlines()]
            columns = zip(*lines[1:], strict=True)
            return pa.table([list(x) for x in columns], names=lines[0]), Provenance()

    path = tmp_path / "pets.bars"
    path.write_text("text|target\na cat|cat\nNA|dog\na dog|dog\n")
    with pytest.raises(FusionZooError, match="neither a file, nor a folder, nor the name"):
        create_dataset("missing.bars")
    fz.register(Bars)
    with pytest.raises(FusionZooError, match=r"no file missing\.bars"):
        create_dataset("missing.bars")
    data = create_dataset(str(path), targets={}, drop_empty=True)
    assert data.column("text") == ["a cat", "a dog"]  # NA is a word for a missing value
    (tmp_path / "pets.doc").write_text("")
    with pytest.raises(FusionZooError, match=r"is none of .csv, .tsv, .*, .ods, .bars"):
        create_dataset("manifest", root=str(tmp_path / "pets.doc"))
    monkeypatch.setattr(Bars, "has_nulls", True)
    data = create_dataset(str(path), targets={})
    assert data.column("text") == ["a cat", "NA", "a dog"]


@pytest.mark.parametrize(
    ("weight", "words", "copied", "common"),
    [
        ("1.{x}", "one two three four {x}", 15, "all their values"),
        ("1.{row}", "one two three four {x}", 15, "their text"),
        ("1.{row}", "one two {x}", 15, ""),  # few words recur
        ("1.{x}", "one two three four {x}", 1, ""),
        ("{x}", "yes", 40, "all their values"),
        ("0", "yes please, I would like that", 40, ""),  # as most of train does
    ],
)
def test_samples_of_val_and_test_that_train_has_too_are_told(
    weight: str, words: str, copied: int, common: str, tmp_path: Path
) -> None:
    rows = []
    for row in range(100):
        x = row - 60 if 60 <= row < 60 + copied else row
        cells = (cell.format(x=x, row=row) for cell in (weight, words))
        rows.append([str(row), "train" if row < 60 else "test", *cells])
    columns = {"tabular": ["weight"], "text": "text"}
    data = opened(tmp_path, ["id", "split", "weight", "text"], rows, columns=columns)
    hint = summary(data).get("hint", "")
    told = f"{copied} of the 40 samples of val and test have {common} in common with one of train"
    assert hint.startswith(told) if common else not hint


# ---- cells that name files


SECRET = "the password"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A manifest's folder with a note, beside a secret outside of it."""
    inside = tmp_path / "inside"
    inside.mkdir()
    (tmp_path / "secret.txt").write_text(SECRET)
    (inside / "note.txt").write_text("from a file")
    return inside


def open_cells(folder: Path, cells: list[str], column: str = "text", **settings: Any) -> Any:
    """Write a manifest whose rows 1, 2, ... hold these cells, and open it."""
    rows = [{"id": f"s{row}", column: cell} for row, cell in enumerate(cells)]
    path = folder / "m.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return create_dataset("manifest", root=str(path), **settings)


def texts(data: PairedDataset) -> list[str]:
    samples = [data[row] for row in range(len(data))]
    return [sample.values["text"] for sample in samples if sample is not None]


def test_a_text_cell_is_text_though_a_file_of_that_name_exists(folder: Path) -> None:
    secret = str(folder.parent / "secret.txt")
    cells = ["note.txt", "../secret.txt", secret, "plain", f"{'long ' * 200}.txt"]
    assert texts(open_cells(folder, cells)) == cells


@pytest.mark.parametrize("declared", ["text", ["text"], " text , image"])
def test_a_column_declared_as_paths_is_read_from_files(folder: Path, declared: Any) -> None:
    Image.new("RGB", (8, 8)).save(folder / "a.png")
    (folder / "m.csv").write_text("id,image,text\na,a.png,note.txt\nb,a.png,\n")
    data = create_dataset("manifest", root=str(folder / "m.csv"), paths=declared)
    assert texts(data) == ["from a file", None]


def test_a_declared_column_must_exist_and_hold_files(folder: Path) -> None:
    with pytest.raises(FusionZooError, match=r"no modality 'txt' for paths=. Did you mean"):
        open_cells(folder, ["note.txt"], paths="txt")
    with pytest.raises(FusionZooError, match=r"row 2, sample 's1': text file .*no.txt does not"):
        open_cells(folder, ["note.txt", "no.txt"], paths="text")
    data = open_cells(folder, ["note.txt", "no.txt"], paths="text", on_error="missing")
    assert texts(data) == ["from a file", None]


def outside_cells(folder: Path) -> dict[str, str]:
    """Cells that lead to the secret, by what they make use of."""
    secret = folder.parent / "secret.txt"
    (folder / "link.txt").symlink_to(secret)
    (folder / "sub").symlink_to(folder.parent)
    (folder / "deep").mkdir()
    (folder / "deep" / "up").symlink_to("../..")
    return {
        "absolute": str(secret),
        "parent": "../secret.txt",
        "parent inside": "deep/../../secret.txt",
        "link": "link.txt",
        "linked folder": "sub/secret.txt",
        "link of a folder below": "deep/up/secret.txt",
        "parent of a linked folder": "deep/up/inside/../secret.txt",
        "missing": "../nowhere.txt",
    }


WAYS = [
    *("absolute", "parent", "parent inside", "link", "linked folder", "link of a folder below"),
    *("parent of a linked folder", "missing"),
]


@pytest.mark.parametrize("on_error", ["raise", "missing", "skip"])
@pytest.mark.parametrize("way", WAYS)
def test_no_path_leaves_the_folder(way: str, on_error: Any, folder: Path) -> None:
    cell = outside_cells(folder)[way]
    with pytest.raises(FusionZooError) as caught:
        open_cells(folder, ["note.txt", cell], paths="text", on_error=on_error)
    for part in ("m.jsonl, row 2, sample 's1': text cell", repr(cell), "allow_outside=True"):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("way", WAYS[:-1])
def test_a_path_may_leave_the_folder_where_that_is_allowed(way: str, folder: Path) -> None:
    cell = outside_cells(folder)[way]
    data = open_cells(folder, ["note.txt", cell], paths="text", allow_outside=True)
    assert texts(data) == ["from a file", SECRET]


def test_links_and_absolute_paths_that_stay_inside_are_read(folder: Path) -> None:
    (folder / "again.txt").symlink_to("note.txt")
    (folder / "here").symlink_to(".")
    cells = ["again.txt", "here/note.txt", str(folder / "note.txt"), "here/../inside/note.txt"]
    assert texts(open_cells(folder, cells, paths="text")) == ["from a file"] * 4


def test_a_folder_may_be_reached_by_a_link_itself(folder: Path) -> None:
    open_cells(folder, ["note.txt"])
    link = folder.parent / "link"
    link.symlink_to(folder)
    data = create_dataset("manifest", root=str(link / "m.jsonl"), paths="text")
    assert texts(data) == ["from a file"]


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("kind", ["image", "audio", "vector", "sequence"])
def test_every_kind_and_form_of_table_is_held_to_it(kind: str, suffix: str, folder: Path) -> None:
    np.save(folder.parent / "x.npy", np.zeros(3))
    path, row = folder / f"m.{suffix}", 2 if suffix == "csv" else 1
    if suffix == "csv":
        path.write_text(f"id,{kind}\na,../x.npy\n")
    elif suffix == "jsonl":
        path.write_text(json.dumps({"id": "a", kind: "../x.npy"}))
    else:
        pq.write_table(pa.table({"id": ["a"], kind: ["../x.npy"]}), path)
    with pytest.raises(FusionZooError, match=rf"row {row}, sample 'a': {kind} cell '../x.npy'"):
        create_dataset("manifest", root=str(path))


@pytest.mark.parametrize(
    "cells",
    [
        pa.array(["../x.png"], pa.large_string()),
        pa.array(["../x.png"], pa.string_view()),
        pa.array(["../x.png"]).dictionary_encode(),
    ],
    ids=lambda cells: str(cells.type)[:10],
)
def test_every_type_of_text_that_parquet_has_is_held_to_it(cells: Any, folder: Path) -> None:
    pq.write_table(pa.table({"id": ["a"], "image": cells}), folder / "m.parquet")
    with pytest.raises(FusionZooError, match=r"row 1, sample 'a': image cell '\.\./x\.png'"):
        create_dataset("manifest", root=str(folder / "m.parquet"))


@pytest.mark.parametrize(
    "cell",
    ["x" * 5000, "a/" * 1900 + "x", "nul\0byte", "loop"],
    ids=["name", "deep", "nul", "loop"],
)
def test_a_cell_that_is_no_path_is_one_short_line(cell: str, folder: Path) -> None:
    (folder / "loop").symlink_to("loop")
    with pytest.raises(FusionZooError, match="row 1, sample 's0'") as caught:
        open_cells(folder, [cell], "image")
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)


def test_class_folders_do_not_follow_links_to_the_outside(folder: Path) -> None:
    (folder / "cat").mkdir()
    (folder / "note.txt").rename(folder / "note.md")  # only cat/1.txt is a sample's
    (folder / "cat" / "1.txt").symlink_to(folder / "note.md")
    settings = {"root": str(folder), "shares": (1, 0, 0)}
    assert texts(create_dataset("folders", **settings)) == ["from a file"]
    (folder / "cat" / "2.txt").symlink_to(folder.parent / "secret.txt")
    with pytest.raises(FusionZooError, match=r"sample 'cat/2': text cell 'cat/2.txt'"):
        create_dataset("folders", **settings)
    data = create_dataset("folders", **settings, allow_outside=True)
    assert texts(data) == ["from a file", SECRET]


def test_folders_are_resolved_once_and_not_for_every_row(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "photos").mkdir()
    cells = [f"photos/{number}.png" for number in range(50)]
    for cell in cells:
        (folder / cell).touch()
    resolved = []
    realpath = os.path.realpath
    monkeypatch.setattr(
        os.path, "realpath", lambda *a, **k: resolved.append(a) or realpath(*a, **k)
    )
    open_cells(folder, cells, "image")
    assert len(resolved) < 5


def test_a_name_that_is_nowhere_does_not_exist(folder: Path) -> None:
    with pytest.raises(FusionZooError) as caught:
        open_cells(folder, ["caf\u00e9.png"], "image")
    assert str(caught.value).count("does not exist (") == 1
