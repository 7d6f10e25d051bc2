"""Every registered data set keeps the contract; the checks are the public ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import soundfile
from PIL import Image

from fusionzoo.datasets import DATASETS
from fusionzoo.datasets.builtin import hanzi, mfeat, openclipart
from fusionzoo.testing import data
from fusionzoo.testing.data import Source, source

DRAW = np.random.default_rng(0)


def picture(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = DRAW.integers(0, 256, (8, 9, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(path)


def clip(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, 0.1 * DRAW.standard_normal(400), 8000)


def write_folders(root: Path) -> None:
    """Two classes of thirty; every third lacks its clip, every fourth its text."""
    for label in ("cat", "dog"):
        for number in range(30):
            stem = root / label / str(number)
            picture(stem.with_suffix(".png"))
            if number % 3:
                clip(stem.with_suffix(".wav"))
            if number % 4:
                stem.with_suffix(".txt").write_text(f"{label} {number}")


def write_manifest(root: Path) -> None:
    """Forty rows in groups of two, of every kind of value; some cells are empty."""
    root.mkdir(parents=True)
    rows = []
    for number in range(40):
        row: dict[str, Any] = {"id": f"s{number}", "group": f"g{number // 2}", "text": "words"}
        row |= {"target": "ab"[number % 2], "vector": DRAW.standard_normal(3).tolist()}
        row["tabular"] = {"age": 30 + number, "colour": "red" if number % 3 else None}
        row["sequence"] = DRAW.standard_normal((1 + number % 3, 4)).tolist()
        if number % 3:
            picture(root / f"{number}.png")
            row["image"] = f"{number}.png"
        if number % 4:
            clip(root / f"{number}.wav")
            row["audio"] = f"{number}.wav"
        rows.append(row)
    (root / "my.jsonl").write_text("\n".join(map(json.dumps, rows)))


def write_layout(root: Path) -> None:
    """Sixty clips of CREMA-D, by six actors; a third has no frame."""
    for number in range(60):
        stem = f"100{number // 10}_DFA_{('ANG', 'HAP', 'SAD')[number % 3]}_{number:02d}"
        clip(root / "AudioWAV" / f"{stem}.wav")
        if number % 3:
            picture(root / "Image-01-FPS" / stem / "1.png")


def write_mfeat(root: Path) -> None:
    """Whole numbers in place of the features."""
    root.mkdir()
    for name, width in mfeat.VIEWS.items():
        rows = [",".join(map(str, row)) for row in DRAW.integers(0, 10, (2000, width))]
        lines = [f"{row},{number // 200}" for number, row in enumerate(rows)]
        (root / f"mfeat-{name}.csv").write_text("\n".join(["header", *lines]))


def write_hanzi(root: Path) -> None:
    """Two radicals of sixty characters each, of random strokes."""
    drawings, unihan = {}, {}
    for number in range(120):
        medians = [row.reshape(2, 2) for row in DRAW.integers(0, 900, (3, 4)).astype(float)]
        outlines = ["M {} {} L {} {} Z".format(*median.ravel()) for median in medians]
        drawings[chr(0x4E00 + number)] = hanzi.Strokes(outlines, medians, frozenset([0]))
        radical = {"kRSUnicode": f"{85 if number % 2 else 9}.2"}
        unihan[chr(0x4E00 + number)] = {"kDefinition": f"gloss {number}", **radical}
    root.mkdir()
    pq.write_table(hanzi.build(drawings, unihan), root / hanzi.TABLE)


def write_openclipart(root: Path) -> None:
    """Two folders of forty drawings; a third have no text."""
    for number in range(80):
        path = (
            root / "svg" / ("animals", "food")[number % 2] / f"{chr(97 + number // 4)}{number}.svg"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        title = f"<dc:title>Thing {number}</dc:title>" if number % 3 else ""
        path.write_text(
            '<svg xmlns="http://www.w3.org/2000/svg" xmlns:dc="http://purl.org/dc/elements/1.1/"'
            f' width="9mm" height="6mm">{title}<rect width="{number % 20 + 4}" height="9"/></svg>'
        )
    pq.write_table(openclipart.build(root / "svg"), root / openclipart.TABLE)


def write_stamps(root: Path) -> None:
    """Two classes of twenty images; some are described, some spoken."""
    for label in ("animals", "food"):
        for number in range(20):
            stem = root / label / f"{chr(ord('a') + number)}thing"
            picture(stem.with_suffix(".png"))
            if number % 3:
                stem.with_suffix(".txt").write_text("A thing.\n")
            if number % 4:
                clip(stem.with_name(f"{stem.name}_desc_fr.ogg"))


WRITERS: dict[str, tuple[Callable[[Path], None], str]] = {  # what `root` names below the folder
    "folders": (write_folders, ""),
    "hanzi": (write_hanzi, ""),
    "openclipart": (write_openclipart, ""),
    "layout": (write_layout, ""),
    "manifest": (write_manifest, "my.jsonl"),
    "mfeat": (write_mfeat, ""),
    "stamps": (write_stamps, ""),
}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {"layout": "crema-d"} if name == "layout" else {}) for name in DATASETS),
    ("digits", {"samples": 100, "missing": 0.3}),
    ("hanzi", {"picture": True, "readings": "mandarin"}),
    ("interactions", {"task": "copy", "num_modalities": 3, "seed": 3}),
    ("manifest", {"targets": {"target": "multilabel"}}),
]


@pytest.fixture(scope="module")
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Source:
    name, settings = request.param
    if name in WRITERS:
        write, file = WRITERS[name]
        folder = tmp_path_factory.mktemp("data") / name
        write(folder)
        settings = {"root": str(folder / file), **settings}
    return source(name, settings)


@pytest.mark.parametrize("check", data.CHECKS)
@pytest.mark.parametrize(
    "opened", VARIANTS, ids=lambda x: "-".join([x[0], *x[1]]), indirect=True, scope="module"
)
def test_contract(opened: Source, check: str) -> None:
    data.CHECKS[check](opened)
