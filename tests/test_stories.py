"""Newcomers' first hour on data that the test makes: one command per step, none refused."""

from __future__ import annotations

import csv
import datetime
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv as pv
import pyarrow.parquet as pq
import pytest
from PIL import Image
from scipy.io import wavfile

import fusionzoo
from fusionzoo.cli import main
from fusionzoo.config import read_yaml
from fusionzoo.encoders import at_hand

WORDS = {
    "leicht": ("unauffällig", "ohne Befund", "stabil"),
    "mittel": ("leichte Verschattung", "mäßig erweitert", "Kontrolle nötig"),
    "schwer": ("massive Verschattung", "akut", "sofortige Aufnahme"),
}


@pytest.fixture(autouse=True)
def offline_with_small_encoders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No hub and no package of weights; a small network in place of ResNet-18."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(at_hand, "PACKAGES", {})
    small = {"name": "timm/test_resnet", "pretrained": False, "size": 32}
    audio = {"name": "mel/test_resnet", "pretrained": False, "duration": 0.5}
    monkeypatch.setattr(at_hand, "SCRATCH", {**at_hand.SCRATCH, "image": small, "audio": audio})
    monkeypatch.chdir(tmp_path)


def hospital_rows(count: int) -> list[dict[str, str]]:
    """Return the rows of a table as a German clinic exports it, and draw its pictures."""
    chance = random.Random(0)
    Path("bilder").mkdir()
    rows = []
    for number in range(count):
        severity = chance.choice(list(WORDS))
        level = list(WORDS).index(severity)
        pixels = np.full((16, 16, 3), 60 + 60 * level, np.uint8)
        pixels[chance.randrange(4, 12) :] = chance.randrange(255)
        Image.fromarray(pixels).save(f"bilder/{number}.png")
        weight, crp = 60 + 10 * level + chance.gauss(0, 9), 5 * level + abs(chance.gauss(3, 2))
        words = chance.choice(WORDS[severity]), chance.choice(("ruhig", "unruhig", "wach"))
        rows.append(
            {
                "Patient": f"P{number // 3:04d}",
                "Aufnahme": f"{chance.randrange(1, 29):02d}.{chance.randrange(1, 13):02d}.2021",
                "Gewicht": f"{weight:.1f} kg".replace(".", ","),
                "CRP": f"{crp:.2f}".replace(".", ",") if number % 9 else "k.A.",
                "Station": chance.choice(("A1", "B2", "C3")),
                "Befund": f"{words[0]}, Patient {words[1]}, Zimmer {number}" if number % 11 else "",
                "Bild": f"bilder/{number}.png" if number % 7 else "",
                "Befundschwere": severity,
            }
        )
    return rows


def write_rows(path: str, rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        out = csv.DictWriter(file, names, delimiter=";")
        out.writeheader()
        out.writerows({name: row.get(name, "-") for name in names} for row in rows)


@pytest.mark.slow
def test_a_hospital_table_trains_by_its_target_alone_and_a_new_file_is_read_alike(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = hospital_rows(150)
    write_rows("kis.csv", rows, list(rows[0]))
    assert main(["train", "kis.csv", "--target", "Befundschwere"]) == 0
    printed = capsys.readouterr().out
    for found in ("date dmy", "number kg", "decimal comma", "'k.A.' is missing", "category"):
        assert found in printed
    assert "fusionzoo predict runs/kis kis.csv" in printed
    settings = read_yaml(Path("runs/kis/config.yaml"))["data"]
    assert settings["decimal"] == ","
    assert settings["group_column"] == "Patient"
    assert settings["columns"] == {
        "target": "Befundschwere",
        "tabular": ["Aufnahme", "Gewicht", "CRP", "Station"],
        "image": "Bild",
        "text": "Befund",
    }

    chance = random.Random(1)
    picked = chance.sample(range(len(rows)), 40)
    names = [name for name in rows[0] if name != "Befundschwere"]
    chance.shuffle(names)
    write_rows("neu.csv", [rows[n] for n in picked], ["Kommentar", *names, "Nummer"])
    assert main(["predict", "runs/kis", "kis.csv", "--out", "old.csv"]) == 0
    assert main(["predict", "runs/kis", "neu.csv", "--out", "new.csv"]) == 0
    old, new = pv.read_csv("old.csv"), pv.read_csv("new.csv")
    assert old.take(picked).drop_columns("id").equals(new.drop_columns("id"))

    assert main(["evaluate", "runs/kis"]) == 0
    assert main(["embed", "runs/kis", "kis.csv", "--out", "kis.parquet"]) == 0
    without = [name for name in names if name not in ("Bild", "CRP")]
    write_rows("less.csv", [rows[n] for n in picked], without)
    capsys.readouterr()
    assert main(["predict", "runs/kis", "less.csv", "--out", "less.out.csv"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("no column CRP in less.csv: its cells are missing") == 1
    assert printed.count("missing in all samples, as less.csv has none: image") == 1

    frame = pd.DataFrame([rows[n] for n in picked], index=[f"row {n}" for n in picked])
    predictions = fusionzoo.predict("runs/kis", frame[names])
    assert list(predictions.index) == list(frame.index)
    assert predictions["label"].tolist() == new["label"].to_pylist()


def as_cells(row: Mapping[str, str]) -> dict[str, Any]:
    """Return a row of `hospital_rows` as typed cells: a date, a number, a truth value, a list."""
    day, month, year = row["Aufnahme"].split(".")
    severity = list(WORDS).index(row["Befundschwere"])
    return {
        "Aufnahme": datetime.date(int(year), int(month), int(day)),
        "Gewicht": float(row["Gewicht"].removesuffix(" kg").replace(",", ".")),
        "Raucher": severity > 0,
        "Befund": row["Befund"] or None,
        "Bild": row["Bild"] or None,
        "Zeichen": ["Husten", "Fieber", "Atemnot"][: severity + 1],
        "Befundschwere": row["Befundschwere"],
    }


def write_workbook(path: str, rows: Sequence[Mapping[str, Any]]) -> str:
    from openpyxl import Workbook

    book = Workbook()
    cover, sheet = book.active, book.create_sheet("Daten")
    assert cover is not None
    cover.append(["Lungenstudie", "Stand 2021"])
    for line in ([*rows[0]], *([*row.values()] for row in rows)):
        sheet.append([";".join(x) if isinstance(x, list) else x for x in line])
    book.save(path)
    return path


def write_table(kind: str, rows: Sequence[Mapping[str, str]]) -> tuple[Any, str, str]:
    """Write the rows in a format; return what to train on, the target and what it is said to be."""
    cells = [as_cells(row) for row in rows]
    if kind == "cp1252":
        write_rows("kis.csv", rows, [name for name in rows[0] if name != "Patient"])
        Path("kis.csv").write_bytes(Path("kis.csv").read_text().encode("cp1252"))
        return "kis.csv", "Befundschwere", "classes"
    if kind == "xlsx":
        return write_workbook("kis.xlsx", cells), "Befundschwere", "classes"
    if kind == "jsonl":
        lines = [json.dumps(row, default=str, ensure_ascii=False) for row in cells]
        Path("kis.jsonl").write_text("\n".join(lines))
        return "kis.jsonl", "Zeichen", "lists of labels"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(cells), "kis.parquet")
        return "kis.parquet", "Gewicht", "numbers"
    index = [f"P{number // 3}" for number in range(len(cells))]  # several rows a patient
    return pd.DataFrame(cells, index=index), "Befundschwere", "classes"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cp1252", "xlsx", "jsonl", "parquet", "frame"])
def test_a_table_and_a_target_give_a_model_and_a_verdict(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data, target, holds = write_table(kind, hospital_rows(150))
    if isinstance(data, str):
        assert main(["train", data, "--target", target]) == 0
    else:
        fusionzoo.train(data, target=target)
    printed = capsys.readouterr().out
    assert f"target {target!r} holds {holds}" in printed
    assert "fusion: " in printed and "gain over " in printed
    run = next(Path("runs").iterdir())
    columns = read_yaml(run / "config.yaml")["data"]["columns"]
    assert {"Aufnahme", "Gewicht"} - {target} <= {*columns["tabular"]}
    assert (columns["image"], columns["text"]) == ("Bild", "Befund")
    predicted = fusionzoo.predict(str(run), data)
    assert len(predicted) == 150
    if not isinstance(data, str):
        assert list(predicted.index) == list(data.index)


@pytest.mark.slow
def test_spoken_letters_in_two_files_are_joined_by_the_column_that_both_have() -> None:
    chance, rate = np.random.default_rng(0), 8000
    Path("clips").mkdir()
    letters, sounds = [], []
    for number in range(120):
        letter = number % 3
        grey = np.full((12, 12, 3), 70 + 70 * letter, np.uint8)
        Image.fromarray(grey).save(f"clips/{number}.png")
        tone = np.sin(np.arange(rate // 4) * 2 * np.pi * (300 + 300 * letter) / rate)
        noisy = tone + chance.normal(0, 0.5, len(tone))
        wavfile.write(f"clips/{number}.wav", rate, (noisy * 8000).astype(np.int16))
        clip, drawing = f"clip-{number}", f"clips/{number}.png"
        cells = {"clip": clip, "speaker": f"s{number // 6}", "drawing": drawing}
        letters.append({**cells, "letter": "abc"[letter]})
        sounds.append({"recording": f"clips/{number}.wav", "clip": clip})
    write_rows("letters.csv", letters, list(letters[0]))
    write_rows("sounds.csv", sounds, list(sounds[0]))
    joined = ["--join.audio", "sounds.csv"]
    assert main(["train", "letters.csv", *joined, "--target", "letter"]) == 0
    data = read_yaml(Path("runs/letters/config.yaml"))["data"]
    assert data["on"] == "clip"
    assert data["group_column"] == "speaker"
    assert main(["predict", "runs/letters", "letters.csv", "--out", "p.csv"]) == 0
    predicted = pv.read_csv("p.csv")
    assert set(predicted["present_image"].to_pylist()) == {True}
    assert set(predicted["present_audio"].to_pylist()) == {True}
    assert main(["evaluate", "runs/letters"]) == 0
