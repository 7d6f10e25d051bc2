"""The page of a run: results, mistakes, samples; users' words stay text; data that are gone."""

from __future__ import annotations

import base64
import csv
import io
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from markupsafe import escape
from PIL import Image

import fusionzoo as fz
from fusionzoo import FusionZooError
from fusionzoo.cli import main
from fusionzoo.structures import Prediction
from fusionzoo.targets import OneOf
from fusionzoo.tools.run_report import page as page_of_run
from fusionzoo.tools.run_report.mistakes import MAX_CLASSES, confusion

EVIL = '<script>alert("x")</script>'
NET: dict[str, Any] = {"pretrained": False, "channels": [8, 8, 8, 8]}
ENCODERS: dict[str, Any] = {
    "image": {"name": "timm/resnet10t", "size": 32, **NET},
    "text": {"name": "chars", "dim": 16},
    "audio": {"name": "mel/stats"},
}
QUICK: dict[str, Any] = {"epochs": 1, "num_workers": 0, "log": "none", "device": "cpu"}
RunOf = Callable[[str], fz.Run]
USE: dict[str, Any] = {"num_workers": 0, "device": "cpu"}
WORDS = (EVIL, "green and long", "blue $5 $x_")
COLUMNS = {"image": "photo", "text": "note", "audio": "sound"}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSIONZOO_CACHE", str(tmp_path / "cache"))


def write_data(folder: Path, targets: dict[str, Any]) -> Path:
    """Write 40 rows with a picture, a text and a clip; the text names the class."""
    folder.mkdir()
    rows, noise = [], np.random.default_rng(0)
    splits = ("train", "val", "train", "test", "train")
    for number in range(40):
        pixels = noise.integers(0, 255, (200, 400, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        soundfile.write(folder / f"{number}.wav", noise.normal(0, 0.1, 4000), 16000)
        row = {"id": f"{EVIL}{number}", "split": splits[number % 5], "photo": f"{number}.png"}
        row |= {"note": "" if number % 4 == 3 else WORDS[number % 3], "sound": f"{number}.wav"}
        rows.append(row | {name: cells[number % 3] for name, cells in targets.items()})
    file = folder / "data.csv"
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, [*rows[0]])
        writer.writeheader()
        writer.writerows(rows)
    return file


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "classes": ({"kind": (f"a{EVIL}", "b", "c")}, {}),
    "regression": ({"age": ("1.5", "2", "7")}, {"objective": "regression"}),
    "multilabel": ({"tags": (f"sun;{EVIL}", "sun", ";")}, {"objective": "multilabel"}),
    "both": (
        {"kind": (f"a{EVIL}", "b", "c"), "age": ("1.5", "2", "7")},
        {"targets": {"kind": "classification", "age": "regression"}},
    ),
}


def train(folder: Path, case: str) -> fz.Run:
    targets, settings = CASES[case]
    file = write_data(folder / "data", targets)
    read = [*COLUMNS] if case == "classes" else ["text", "audio"]  # pictures take time
    columns = {name: COLUMNS[name] for name in read}
    columns |= {} if case == "both" else {"target": next(iter(targets))}
    data = {"name": "manifest", "root": str(file), "columns": columns}
    encoders = {name: ENCODERS[name] for name in read}
    return fz.train(data, **QUICK, encoders=encoders, **settings, out=folder / "run")


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> RunOf:
    """Train each case once."""
    return cache(lambda case: train(tmp_path_factory.mktemp(case), case))


def sections(page: str) -> list[str]:
    return re.findall(r"<h2>(.*?)</h2>", page)


def in_order(page: str) -> list[float]:
    return [float(x) for x in re.findall(r"<span>loss ([\d.]+)</span>", page)]


@pytest.mark.parametrize(
    ("case", "shown"),
    [
        ("classes", ("matrix", "true one")),
        ("regression", ("predicted - true age", "90 % are below")),
        ("multilabel", ("<th>precision</th>", "<td>sun</td>")),
        ("both", ("<h3>kind</h3>", 'class="matrix"', "predicted - true age")),
    ],
)
def test_the_page_shows_results_mistakes_and_the_worst_samples(
    run_of: RunOf, case: str, shown: tuple[str, ...]
) -> None:
    run = run_of(case)
    path = fz.report(run, **USE)
    assert path == run.folder / "report.html"
    page = path.read_text(encoding="utf-8")
    assert sections(page) == [
        *("Data", "Learning curves", "Results", "Mistakes"),
        *("Subsets of the modalities", "The worst samples"),
    ]
    for words in shown:
        assert words in page
    header, rows = run.results()
    for cell in [*header[1:], *(cell for row in rows for cell in row)]:
        assert str(escape(cell)) in page
    # 8 test samples, a quarter without a text
    has_images = case == "classes"
    assert '<td class="words">note</td>' in page and "<td>text</td><td>6</td>" in page
    losses = in_order(page)
    assert len(losses) == 8 and losses == sorted(losses, reverse=True)
    # pictures and players within, and no script of the users
    assert page.count("<audio") == 8 and page.count("<img") == 8 * has_images
    assert "<script" not in page and str(escape(EVIL)) in page
    assert "blue $5 $x_" in page
    assert len(page) < 500_000


def test_pictures_are_small_and_the_command_names_the_page(
    run_of: RunOf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, flags = str(run_of("classes").folder), ["--num_workers", "0", "--device", "cpu"]
    assert main(["report", folder]) == 0
    printed = capsys.readouterr().out
    assert "fusion: gmu" in printed and "accuracy" in printed
    out = tmp_path / "new" / "page.html"
    assert main(["report", folder, "--html", str(out), "--split", "val", *flags]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"wrote {out}"
    page = out.read_text()
    assert "validated on 8" in page  # figures of samples that chose the epoch are not new ones
    for data in re.findall(r'src="data:image/jpeg;base64,([^"]+)"', page):
        assert Image.open(io.BytesIO(base64.b64decode(data))).size == (160, 80)
    assert main(["report", folder, "--html", *flags]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"wrote {Path(folder) / 'report.html'}"


def test_clips_beyond_the_room_for_sound_are_drawn_only(
    run_of: RunOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_of_run, "MAX_SOUND", 1)
    page = fz.report(run_of("classes"), tmp_path / "page.html", **USE).read_text()
    assert page.count("<audio") == 1 and page.count('class="wave"') == 8


def test_without_its_data_the_page_has_no_samples_and_says_why(
    run_of: RunOf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of("classes")
    data = run.folder.parent / "data"
    data.rename(tmp_path / "moved")
    try:
        page = fz.report(run.folder, tmp_path / "page.html", **USE).read_text()
        assert sections(page) == ["Data", "Learning curves", "Results"]
        assert f"shows none of its samples: no file {data / 'data.csv'}" in page
        assert "train 24, val 8, test 8" in page
        assert str(data) in capsys.readouterr().out
        moved = tmp_path / "moved" / "data.csv"
        page = fz.report(run, tmp_path / "page.html", data={"root": moved}, **USE).read_text()
        assert len(in_order(page)) == 8
        with pytest.raises(FusionZooError, match=r"absent\.csv"):
            fz.report(run, tmp_path / "page.html", data=tmp_path / "absent.csv", **USE)
    finally:
        (tmp_path / "moved").rename(data)


def test_data_that_have_changed_since_are_noted(run_of: RunOf) -> None:
    run = run_of("regression")
    file = run.folder.parent / "data" / "data.csv"
    before = file.read_bytes()
    assert "may have changed since" not in fz.report(run, **USE).read_text()
    file.write_bytes(before.replace(b",7\r\n", b",70\r\n"))
    assert "may have changed since" in fz.report(run, **USE).read_text()
    file.write_bytes(before)


def test_a_folder_that_is_no_finished_run_is_one_clear_sentence(
    run_of: RunOf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_of("regression").folder
    stopped = tmp_path / "stopped"
    shutil.copytree(folder, stopped)
    (stopped / "metrics.json").unlink()
    for args, words in (
        ([], "the folder of a run is missing"),
        ([str(tmp_path / "none")], "none is not there: name what `fusionzoo train` wrote"),
        ([str(tmp_path)], "is no run folder"),
        ([str(folder / "model")], f"its run is {folder}"),
        ([str(stopped)], "holds no results: the run was stopped"),
        ([str(folder), "new.csv"], "add --html"),
        ([str(folder), "--html", "--split", "tset", "--device", "cpu"], "split 'tset' is empty"),
    ):
        assert main(["report", *args]) == 2
        assert words in capsys.readouterr().err
    file = folder.parent / "data" / "data.csv"
    with pytest.raises(FusionZooError, match="from which the data are read"):
        fz.report(folder, file, **USE)


def test_many_classes_are_listed_by_their_confusions() -> None:
    target = OneOf("target", tuple(f"c{x:02}" for x in range(MAX_CLASSES + 1)))
    labels = torch.tensor([[0.0], [0], [1], [2]])
    answers = [Prediction(x, 1.0, {x: 1.0}) for x in ("c05", "c05", "c00", "c02")]
    found = confusion(target, labels, answers)
    assert (found["right"], found["of"], found["matrix"]) == (1, 4, None)
    assert found["table"][1] == [["c00", "c05", "2"], ["c01", "c00", "1"]]
