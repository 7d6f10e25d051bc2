"""Cells that name files: text is never read from one unasked, and no path leaves the folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from fusionzoo import PairedDataset, create_dataset
from fusionzoo.errors import FusionZooError

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
