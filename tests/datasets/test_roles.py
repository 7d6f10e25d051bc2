"""Sixty columns of twenty kinds, as people name and write them, are read as a person would."""

from __future__ import annotations

import datetime
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fusionzoo.datasets.opening.complete import Completed, complete
from fusionzoo.datasets.tables.provenance import Loaded

N = 60
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


def completed(folder: Path) -> Completed:
    for n in range(2):
        np.save(folder / f"v{n}.npy", np.zeros(4, np.float32))
        np.save(folder / f"s{n}.npy", np.zeros((2, 4), np.float32))
    columns = {name: pa.array(cells) for name, (cells, _) in COLUMNS.items()}
    table = pa.table({**columns, "y": ["a", "b"] * (N // 2)})
    loaded = Loaded(table=table, source="table", root=folder)
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
