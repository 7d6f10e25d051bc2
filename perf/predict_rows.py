"""Rows of a DataFrame, answered: `python perf/predict_rows.py` writes results/predict_rows.csv.

A model of pictures (ResNet-18 at 224 pixels, or none), texts (characters) and numbers is trained
for a step on a table that the script makes. Then `model.predict(rows)` and `fz.predict(model,
rows)` are measured against the least that answers the same rows: values decoded by hand, collated,
run and decoded into predictions. CPU seconds on one thread, ratios of the same rounds.
"""

from __future__ import annotations

import csv
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from inference import table
from PIL import Image

import fusionzoo as fz
from fusionzoo.datasets.media.decode import decode
from fusionzoo.structures import Sample

OUT = Path(__file__).parents[1] / "results" / "predict_rows.csv"
ROUNDS = 21
WORDS = [
    "a",
    "cat",
    "sleeps",
    "on",
    "the",
    "warm",
    "old",
    "wall",
    "while",
    "rain",
    "falls",
    "over",
    "ships",
    "at",
    "sea",
]


def main() -> None:
    """Measure, print and write the table."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    lines: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        made = make_table(Path(folder))
        for case in ("pictures, texts, numbers", "texts, numbers"):
            rows = made if case.startswith("pictures") else made.drop(columns="photo")
            encoders = {"image": {"name": "timm/resnet18", "pretrained": False}}
            run = fz.train(
                rows,
                target="kind",
                base=folder,
                encoders=encoders if "photo" in rows else {},
                epochs=1,
                log="none",
                out=Path(folder) / case,
            )
            model = fz.load(run.folder)
            for number in (1, 32):
                lines += measure(f"{case}: {number} rows", model, rows.head(number), Path(folder))
    with OUT.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def make_table(folder: Path) -> pd.DataFrame:
    """Write pictures, and return a table that names them."""
    draw = np.random.default_rng(0)
    rows = []
    for number in range(120):
        picture = draw.integers(0, 255, (9, 12, 3), dtype=np.uint8)
        Image.fromarray(picture).resize((640, 427)).save(folder / f"{number}.jpg")
        text = WORDS[: draw.integers(9, len(WORDS))]
        numbers = {"weight": draw.normal(60, 9), "age": int(draw.integers(20, 80))}
        kind = "old" if numbers["age"] > 50 else "young"
        rows.append({"photo": f"{number}.jpg", "note": text, **numbers, "kind": kind})
    return pd.DataFrame(rows)


def measure(case: str, model: Any, rows: pd.DataFrame, base: Path) -> list[dict[str, object]]:
    """Time the ways in turns; return a line for each."""
    given = rows.drop(columns="kind")
    if "photo" in given:
        given = given.assign(photo=[str(base / x) for x in given["photo"]])
    collate, by_kind = model.collate(), model.modalities
    records = given.to_dict("records")
    values = [
        {
            name: {x: row[x] for x in ("weight", "age")}
            if kind == "tabular"
            else row["photo" if kind == "image" else "note"]
            for name, kind in by_kind.items()
        }
        for row in records
    ]

    def bare() -> list[Any]:
        samples = [
            Sample(str(n), "", None, {name: decode(by_kind[name], x) for name, x in row.items()})
            for n, row in enumerate(values)
        ]
        with torch.no_grad():
            return model.answer(model.encode(collate(samples)))  # type: ignore[no-any-return]

    works: dict[str, Callable[[], object]] = {
        "bare": bare,
        "model.predict by modality": lambda: model.predict(values),
        "model.predict rows": lambda: model.predict(given),
        "fz.predict rows": lambda: fz.predict(model, given),
    }
    return table(case, works, ROUNDS, len(rows), base="bare")


if __name__ == "__main__":
    main()
