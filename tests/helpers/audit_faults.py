"""Data with planted faults, which `fusionzoo data check` must find.

Tables with one fault of the whole data set, and a manifest with each kind of fault of samples and
files among clean rows.
"""

from __future__ import annotations

import csv
import io
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import soundfile
from PIL import Image

from fusionzoo.datasets import PairedDataset
from fusionzoo.tools.audit.audit import audit
from fusionzoo.tools.audit.scan import AuditReport

RATE = 16_000  # Hz
SPLITS = ("train", "train", "val", "train", "test")
CLASSES = ("north", "east", "south")
Key = tuple[str, str]  # name of a finding, column
Planted = dict[Key, set[str]]  # ids of the samples that have the fault


def ids_by_finding(report: AuditReport) -> dict[Key, set[str]]:
    """Return the ids (of files, their names) that each finding reports, if it names any."""
    result: dict[Key, set[str]] = {}
    for finding in report.findings:
        ids = {report.scan.ids[row] for row in finding.rows} | set(finding.files)
        if ids:
            result.setdefault((finding.check, finding.modality), set()).update(ids)
    return result


# ---- values without faults


def clean_image(draw: np.random.Generator) -> Image.Image:
    """Draw blurred noise of random size, different each time."""
    width, height = draw.integers(40, 120, 2)
    grid = draw.integers(0, 256, (6, 6, 3)).astype(np.uint8)
    return Image.fromarray(grid).resize((int(width), int(height)), Image.Resampling.BICUBIC)


def clean_sound(draw: np.random.Generator) -> np.ndarray:
    """Draw a melody of eight tones in noise."""
    steps = [np.full(int(draw.integers(800, 2400)), draw.uniform(200, 3000)) for _ in range(8)]
    phase = 2 * np.pi * np.cumsum(np.concatenate(steps)) / RATE
    wave = 0.3 * np.sin(phase) + 0.02 * draw.standard_normal(len(phase))
    return np.round(wave * 32767) / 32768


def clean_text(draw: np.random.Generator) -> str:
    """Draw a sentence of 12 to 20 words from 1,000."""
    return " ".join(_word(number) for number in draw.integers(0, 1000, draw.integers(12, 21)))


def _word(number: int) -> str:
    syllables = ("ka", "lo", "mi", "ne", "ru", "sa", "té", "vo", "wi", "zu")
    return "".join(syllables[int(digit)] for digit in f"{number:03d}")


# ---- the planted manifest


@dataclass
class Manifest:
    """Rows of a manifest, their files, and the faults planted in them."""

    folder: Path
    draw: np.random.Generator
    rows: list[dict[str, str]] = field(default_factory=list)
    planted: Planted = field(default_factory=dict)

    def add(self, **cells: str) -> dict[str, str]:
        """Add a clean row, but for the given cells."""
        number = len(self.rows)
        row = {"id": f"s{number:04d}", "split": SPLITS[number % 5]}
        row |= {"target": CLASSES[number % 3], "text": clean_text(self.draw)}
        row |= {"image": f"{number}.png", "audio": f"{number}.wav", **cells}
        if "image" not in cells:
            clean_image(self.draw).save(self.folder / row["image"])
        if "audio" not in cells:
            soundfile.write(self.folder / row["audio"], clean_sound(self.draw), RATE, "PCM_16")
        self.rows.append(row)
        return row

    def plant(self, check: str, column: str, *ids: str) -> None:
        """Note a fault."""
        self.planted.setdefault((check, column), set()).update(ids)

    def replace(self, row: Mapping[str, str], column: str, content: bytes) -> None:
        """Overwrite a file of a row."""
        (self.folder / row[column]).write_bytes(content)


def plant_manifest(folder: Path, clean: int) -> tuple[Path, Planted]:
    """Write a manifest with every kind of fault of samples and files beside `clean` rows.

    Return its path and the faults.
    """
    manifest = Manifest(folder / "data", np.random.default_rng(7))
    manifest.folder.mkdir()
    for _ in range(clean):
        manifest.add()
    _plant_values(manifest)
    _plant_rows(manifest)
    _plant_copies(manifest, clean)
    path = manifest.folder / "manifest.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(manifest.rows[0]))
        writer.writeheader()
        writer.writerows(manifest.rows)
    return path, manifest.planted


def _plant_values(manifest: Manifest) -> None:
    """Plant unreadable, silent, blank, nearly empty and damaged values, and orphan files."""
    for content in (b"no picture", b"", b"\x89PNG\r\n\x1a\n" + bytes(40)):
        row = manifest.add()
        manifest.replace(row, "image", content)
        manifest.plant("unreadable", "image", row["id"])
    manifest.plant("unreadable", "image", manifest.add(image="absent.png")["id"])
    for content in (b"no sound", b"RIFF" + bytes(40)):
        row = manifest.add()
        manifest.replace(row, "audio", content)
        manifest.plant("unreadable", "audio", row["id"])
    for level in (0.0, 0.25, 1e-4):  # digital silence, a constant offset, noise at -80 dB
        row = manifest.add()
        noise = manifest.draw.standard_normal(8000)
        wave = np.full(8000, level) if level != 1e-4 else 1e-4 * noise / np.abs(noise).max()
        soundfile.write(manifest.folder / row["audio"], wave, RATE, "PCM_24")
        manifest.plant("silent", "audio", row["id"])
    for colour in ("black", "white", "#336699"):
        row = manifest.add()
        Image.new("RGB", (60, 40), colour).save(manifest.folder / row["image"])
        manifest.plant("blank", "image", row["id"])
    for text in ("-", "...", "x", "?!"):
        manifest.plant("near_empty_text", "text", manifest.add(text=text)["id"])
    for damage in ("cafÃ©", "Ã¼ber", "itâ€™s", "na\ufffdve", "пр".encode().decode("latin-1")):
        text = f"{clean_text(manifest.draw)} {damage} {clean_text(manifest.draw)}"
        manifest.plant("encoding_damage", "text", manifest.add(text=text)["id"])
    for name in ("lost.png", "more/lost.wav"):
        (manifest.folder / "more").mkdir(exist_ok=True)
        shutil.copy(manifest.folder / f"1{name[-4:]}", manifest.folder / name)
        manifest.plant("orphan_files", "", name)
    (manifest.folder / "notes.txt").write_text("text is in cells: this is no orphan")


def _plant_rows(manifest: Manifest) -> None:
    """Plant rows that `create_dataset` refuses."""
    twin = manifest.add()
    for _ in range(2):
        manifest.add(id=twin["id"])
        manifest.plant(
            "duplicate_id", "id", twin["id"], f"{twin['id']} (row {len(manifest.rows) + 1})"
        )
    manifest.add(id="")
    manifest.plant("empty_id", "id", f"(row {len(manifest.rows) + 1})")
    manifest.plant("empty_sample", "", manifest.add(image="", text="", audio="")["id"])
    Image.new("RGB", (8, 8)).save(manifest.folder.parent / "secret.png")
    for cell in ("../secret.png", str(manifest.folder.parent / "secret.png")):
        manifest.plant("path", "image", manifest.add(image=cell)["id"])
    manifest.plant("split", "split", manifest.add(split="")["id"])
    manifest.plant("unlabelled", "", manifest.add(target="")["id"], manifest.add(target="")["id"])


def _plant_copies(manifest: Manifest, clean: int) -> None:
    """Plant the same and nearly the same values in two splits."""
    folder, draw = manifest.folder, manifest.draw
    train = [row for row in manifest.rows[:clean] if row["split"] == "train"]
    sources = iter(draw.permutation(len(train)).tolist())
    for number in range(12):
        check = ("same_content", "similar_content")[number % 2]
        exact, split = check == "same_content", ("val", "test")[number // 2 % 2]
        source = train[next(sources)]
        name = f"copy-{number}{'.bmp' if exact else '.jpg'}"
        with Image.open(folder / source["image"]) as image:
            content = _saved(image, "BMP") if exact else altered_image(image)
        (folder / name).write_bytes(content)
        manifest.plant(check, "image", manifest.add(split=split, image=name)["id"], source["id"])
        source = train[next(sources)]
        name = f"copy-{number}{'.flac' if exact else '.ogg'}"
        wave, rate = soundfile.read(folder / source["audio"])
        if exact:
            soundfile.write(folder / name, wave, rate, "PCM_16")
        else:
            (folder / name).write_bytes(altered_sound(wave, rate))
        manifest.plant(check, "audio", manifest.add(split=split, audio=name)["id"], source["id"])
        source = train[next(sources)]
        text = source["text"].upper() + "!" if exact else altered_text(source["text"])
        manifest.plant(check, "text", manifest.add(split=split, text=text)["id"], source["id"])


def _saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, kind, **options)
    return buffer.getvalue()


def altered_image(image: Image.Image) -> bytes:
    """Return an image at 70 % of its size as JPEG of quality 50."""
    size = (max(1, round(image.width * 0.7)), max(1, round(image.height * 0.7)))
    return _saved(image.resize(size), "JPEG", quality=50)


def altered_sound(wave: np.ndarray, rate: int) -> bytes:
    """Return a clip at 60 % of its loudness, 20 ms of silence before it, as Ogg Vorbis."""
    buffer = io.BytesIO()
    padded = np.concatenate([np.zeros(rate // 50), 0.6 * wave])
    soundfile.write(buffer, padded, rate, format="OGG", subtype="VORBIS")
    return buffer.getvalue()


def altered_text(text: str) -> str:
    """Replace the middle word."""
    words = text.split()
    words[len(words) // 2] = "somebody"
    return " ".join(words)


# ---- tables with one fault of the data set as a whole


def table(rows: int = 300, **columns: Sequence[Any]) -> dict[str, list[Any]]:
    """Columns of a clean data set: three classes, two modalities, 60/20/20."""
    draw = np.random.default_rng(3)
    clean: dict[str, Sequence[Any]] = {
        "id": [f"s{row}" for row in range(rows)],
        "split": [("train", "val", "train", "test", "train")[row % 5] for row in range(rows)],
        "target": ["xyz"[row % 3] for row in range(rows)],
        "text": [clean_text(draw) for _ in range(rows)],
        "vector": draw.standard_normal((rows, 3)).tolist(),
    }
    return {name: list(values) for name, values in {**clean, **columns}.items()}


def audited(columns: Mapping[str, Sequence[Any]]) -> AuditReport:
    """Check a table in memory."""
    kinds = {name: name for name in ("text", "vector") if name in columns}
    return audit(PairedDataset(pa.table(dict(columns)), kinds, targets={}))


def faulty_tables() -> dict[str, dict[str, list[Any]]]:
    """The clean table with one fault each, by the name of its finding."""
    clean = table()
    split, target = clean["split"], clean["target"]
    texts = list(zip(target, clean["text"], strict=True))
    merged = ["val" if name == "test" else name for name in split]
    pairs = zip(target, split, strict=True)

    def without(lacks: Sequence[bool]) -> dict[str, list[Any]]:
        vectors = zip(lacks, clean["vector"], strict=True)
        return table(vector=[None if is_absent else vector for is_absent, vector in vectors])

    return {
        "split_of_one": table(split=[*merged[:-1], "test"]),
        "missing_split": table(split=merged),
        "absent_class": table(target=["x" if pair == ("z", "test") else pair[0] for pair in pairs]),
        "imbalance": table(
            target=["x" if x == "y" and row % 11 else x for row, x in enumerate(target)]
        ),
        "mostly_missing": without([row % 7 > 2 for row in range(len(split))]),
        "missing_by_class": without([x == "y" and row % 2 == 1 for row, x in enumerate(target)]),
        "missing_by_split": without([x != "train" and row % 2 == 1 for row, x in enumerate(split)]),
        "class_name_in_text": table(
            text=[f"{x}: {text}" if row % 4 else text for row, (x, text) in enumerate(texts)]
        ),
        "one_word_rule": table(text=[f"{text} tag" if x == "y" else text for x, text in texts]),
    }


# ---- faults added to real data
