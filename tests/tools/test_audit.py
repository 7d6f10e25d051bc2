"""`fusionzoo data check` finds every planted fault, and nothing in clean data."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import soundfile
from PIL import Image

from fusionzoo import create_dataset
from fusionzoo.cli import main
from fusionzoo.datasets import PairedDataset
from fusionzoo.datasets.media.audio import AudioFile
from fusionzoo.errors import FusionZooError
from fusionzoo.structures import Audio
from fusionzoo.tools.audit.audit import audit
from fusionzoo.tools.audit.checks import REFUSALS, damaged_text
from fusionzoo.tools.audit.copies import bucket_pairs, jaccard, near_vectors
from fusionzoo.tools.audit.page import write_contact_sheet
from fusionzoo.tools.audit.scan import (
    MAX_SHINGLES,
    PERMUTATIONS,
    AuditReport,
    measure_array,
    measure_audio,
    minhash,
    shingles,
)

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


# ---- the audit


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The planted manifest, its faults and its audit."""
    path, faults = plant_manifest(tmp_path_factory.mktemp("planted"), clean=120)
    return path, faults, audit({"name": "manifest", "root": str(path)})


def test_each_planted_fault_is_found_and_no_clean_row_is_reported(planted: Any) -> None:
    _, faults, report = planted
    assert ids_by_finding(report) == faults
    assert not report.fit


def test_what_create_dataset_refuses_is_reported_with_all_rows(planted: Any) -> None:
    path, _, report = planted
    with pytest.raises(FusionZooError, match=r"every modality is empty"):
        create_dataset("manifest", root=str(path))
    findings = {finding.check: finding for finding in report.findings}
    assert {*REFUSALS} - {*findings} == {"column", "file"}  # tested below
    assert all(findings[name].severity == "error" for name in REFUSALS if name in findings)
    assert "occurs 3 times" in findings["duplicate_id"].message
    [place] = [report.place(row) for row in findings["split"].rows]
    with path.open(newline="", encoding="utf-8") as file:
        cells = list(csv.DictReader(file))[place["row"] - 2]
    assert cells["split"] == ""
    assert place["id"] == cells["id"]


def test_no_file_outside_of_the_folder_is_read(planted: Any) -> None:
    report = planted[2]
    [finding] = [x for x in report.findings if x.check == "path"]
    assert len(finding.rows) == 2
    for row in finding.rows:
        assert report.scan.dataset.reference("image", row) is None
        assert row not in report.scan.values["image"].rows


def test_columns_of_one_name_and_files_out_of_place_are_reported(tmp_path: Path) -> None:
    (tmp_path / "m.csv").write_text("id,text,Text \na,one two,x\nb,three four,y\n")
    report = audit({"name": "manifest", "root": str(tmp_path / "m.csv")})
    assert [x.check for x in report.findings if x.severity == "error"][:1] == ["column"]
    for name in ("cat/1.txt", "cat/1.png", "cat/1.jpg", "dog/2.txt", "odd.txt"):
        (tmp_path / "top" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "top" / name).write_text("words in a file")
    Image.new("RGB", (4, 4)).save(tmp_path / "top" / "cat" / "1.png")
    report = audit({"name": "folders", "root": str(tmp_path / "top")})
    [finding] = [x for x in report.findings if x.check == "file"]
    named = " ".join(finding.files).replace(str(tmp_path), "")
    assert sorted(re.findall(r"\w+\.\w+", named)) == ["1.jpg", "1.png", "odd.txt"]


# ---- faults of the data set as a whole


def test_a_file_of_arrays_whose_rows_cells_name_is_no_orphan(tmp_path: Path) -> None:
    for name in ("used.npy", "unused.npy"):
        np.save(tmp_path / name, np.ones((3, 2), np.float32))
    rows = [f"{split},{split},used.npy[{row}]" for row, split in enumerate(("train", "val"))]
    (tmp_path / "m.csv").write_text("\n".join(["id,split,vector", *rows]))
    findings = audit({"name": "manifest", "root": str(tmp_path / "m.csv")}).findings
    (orphans,) = [finding for finding in findings if finding.check == "orphan_files"]
    assert orphans.files == ("unused.npy",)


def test_a_clean_data_set_has_no_finding() -> None:
    report = audited(table())
    assert report.findings == []
    assert report.fit


@pytest.mark.parametrize("name", faulty_tables())
def test_one_fault_of_the_whole_data_set_gives_one_finding(name: str) -> None:
    report = audited(faulty_tables()[name])
    assert [finding.check for finding in report.findings] == [name]
    assert report.fit == (name != "split_of_one")


def test_a_class_that_is_not_trained_and_a_missing_train_split_are_errors() -> None:
    clean = table()
    pairs = list(zip(clean["target"], clean["split"], strict=True))
    untrained = audited(table(target=["x" if p == ("z", "train") else p[0] for p in pairs]))
    assert [(x.check, x.severity) for x in untrained.findings] == [("absent_class", "error")]
    assert {clean["target"][row] for row in untrained.findings[0].rows} == {"z"}
    no_train = audited(table(split=["val" if s == "train" else s for s in clean["split"]]))
    assert ("missing_split", "error") in [(x.check, x.severity) for x in no_train.findings]


def test_labels_that_are_numbers_to_predict_are_no_classes() -> None:
    draw = np.random.default_rng(0)
    report = audited(table(target=[f"{x:.3f}" for x in draw.normal(size=300)]))
    assert report.scan.classes == []
    assert report.findings == []


def test_copies_in_one_split_are_no_leak_and_whole_samples_in_two_are_an_error() -> None:
    clean = table()
    for name in ("text", "vector"):
        clean[name][2] = clean[name][0]  # both train
    assert audited(clean).findings == []
    for name in ("text", "vector"):
        clean[name][1] = clean[name][0]  # train and val
    report = audited(clean)
    assert [(x.check, x.severity, x.groups) for x in report.findings] == [
        ("same_content", "error", ((0, 1, 2),)),
        ("same_content", "error", ((0, 1, 2),)),
    ]


def test_the_same_sentence_about_two_things_is_a_warning_and_a_short_text_is_nothing() -> None:
    clean = table()
    clean["text"][1] = clean["text"][0]
    clean["text"][5] = clean["text"][6] = "a horse"
    [finding] = audited(clean).findings
    assert (finding.check, finding.severity) == ("same_content", "warning")
    assert finding.groups == ((0, 1),)


@pytest.mark.parametrize("words", ["two words", "w"])
def test_whole_samples_that_recur_in_another_split_are_found_however_short(words: str) -> None:
    clean = table()
    clean["text"] = [f"{words} {row}" for row in range(len(clean["text"]))]
    del clean["vector"]
    train = [row for row, split in enumerate(clean["split"]) if split == "train"]
    test = [row for row, split in enumerate(clean["split"]) if split == "test"]
    assert not any(x.check == "same_sample" for x in audited(clean).findings)
    clean["text"][test[0]] = clean["text"][train[0]]
    [finding] = [x for x in audited(clean).findings if x.check == "same_sample"]
    assert (finding.severity, finding.groups) == ("warning", (tuple(sorted((train[0], test[0]))),))
    for copied, row in zip(test, train, strict=False):
        clean["text"][copied] = clean["text"][row]
    report = audited(clean)
    [finding] = [x for x in report.findings if x.check == "same_sample"]
    assert finding.severity == "error" and not report.fit
    assert f"{2 * len(test)} samples in {len(test)} groups are the same" in finding.message


def test_a_table_describes_classes_and_missing_values() -> None:
    clean = table()
    clean["vector"][0] = None
    classes = audited(clean).classes
    assert classes.header == ("class", "train", "val", "test", "text missing", "vector missing")
    assert classes.rows[0] == ("x", "60", "20", "20", "0.0%", "1.0%")
    assert classes.rows[-1] == ("all", "180", "60", "60", "0.0%", "0.3%")


# ---- measurements


@pytest.mark.parametrize(
    "text", ["cafÃ©", "itâ€™s", "Ã\u00a0 la", "price: â\u201a¬5", "ÐŸÑ€", "\ufffd", "a\x00b"]
)
def test_damaged_text_is_seen(text: str) -> None:
    assert damaged_text(text)


@pytest.mark.parametrize(
    "text",
    [
        *("café «noir»", "CAFÉ»", "naïve “Zoë”", "Größe: 5 µm², 20 °C", "привет", "日本語"),
        *("a\tb\nc", "Ã", "Não à Ásia", "été ½", "😀 ok", "Ñandú"),
    ],
)
def test_healthy_text_is_not_called_damaged(text: str) -> None:
    assert damaged_text(text) == ""


def test_near_vectors_finds_almost_all_pairs_and_only_near_ones() -> None:
    draw = np.random.default_rng(0)
    clean = draw.standard_normal((3000, 256)) * np.linspace(3, 0.3, 256)
    noise = draw.standard_normal((300, 256))
    noise *= np.tan(np.arccos(0.97)) * np.linalg.norm(clean[:300], axis=1, keepdims=True)
    copies = clean[:300] + noise / np.linalg.norm(draw.standard_normal((300, 256)), axis=1)[:, None]
    vectors = np.concatenate([clean, copies])
    pairs = near_vectors(vectors, 0.95)
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    expected = {(x, y) for x, y in np.argwhere(np.triu(units @ units.T >= 0.95, 1)).tolist()}
    assert len(expected) >= 290
    assert {*map(tuple, pairs.tolist())} <= expected
    assert len(pairs) >= 0.99 * len(expected)


def test_vectors_of_zeros_and_few_vectors_have_no_neighbours_by_chance() -> None:
    assert len(near_vectors(np.zeros((5, 8)), 0.9)) == 0
    assert near_vectors(np.array([[1.0, 2.0, 3.0]] * 2), 0.9).tolist() == [[0, 1]]


def test_pairs_of_buckets_are_named_once_with_the_smaller_index_first() -> None:
    keys = np.array([[1, 7], [2, 7], [1, 7], [3, 8]])
    assert bucket_pairs(keys).tolist() == [[0, 1], [0, 2], [1, 2]]


def test_the_minhash_estimates_the_share_of_common_pieces() -> None:
    draw = np.random.default_rng(1)
    for _ in range(5):
        words = [clean_text(draw) for _ in range(8)]
        first, second = (shingles(" ".join(words[start : start + 6])) for start in (0, 1))
        estimate = (minhash(first) == minhash(second)).mean()
        assert estimate == pytest.approx(jaccard(first, second), abs=4 * 0.5 / PERMUTATIONS**0.5)
    assert len(shingles("a" * (MAX_SHINGLES + 100))) == 1


def test_a_long_sound_is_measured_in_blocks_like_a_short_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wave = 0.3 * np.random.default_rng(0).standard_normal(4 * 8000)
    soundfile.write(tmp_path / "a.wav", wave, 8000, "FLOAT")
    whole = measure_audio(AudioFile(tmp_path / "a.wav", 8000, len(wave)))
    monkeypatch.setattr("fusionzoo.tools.audit.scan.BLOCK", 1)
    parts = measure_audio(AudioFile(tmp_path / "a.wav", 8000, len(wave)))
    assert parts.digest == whole.digest
    assert parts.numbers["peak"] == whole.numbers["peak"]


def test_steady_tones_of_different_noise_are_not_the_same_sound() -> None:
    """Telephone tones of one digit differ in their noise alone."""
    import torch

    draw = np.random.default_rng(0)
    time = np.arange(2400) / 8000
    tone = 0.2 * np.sin(2 * np.pi * 697 * time) + 0.2 * np.sin(2 * np.pi * 1209 * time)
    prints = []
    for _ in range(20):
        wave = torch.from_numpy(tone + 0.2 * draw.standard_normal(2400)).float()
        prints.append(measure_audio(Audio(wave, 8000)).print)
    assert len(near_vectors(np.stack([x for x in prints if x is not None]), 0.7)) == 0


def test_values_that_are_no_numbers_are_compared_and_shown() -> None:
    rows = [{"age": 7, "colour": "red"}, {"age": 7, "colour": "red"}, ["a", "b"]]
    first, second, third = map(measure_array, rows)
    assert first == second != third
    assert (first.numbers["length"], first.print) == (2.0, None)


# ---- the commands


def test_the_command_tells_fitness_by_its_exit_code(
    planted: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clean = tmp_path / "clean.jsonl"
    columns = table()
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    clean.write_text("\n".join(map(json.dumps, rows)))
    assert main(["data", "check", str(clean)]) == 0
    assert "fit (checked in" in capsys.readouterr().out
    assert main(["data", "check", str(planted[0]), "--json", str(tmp_path / "a.json")]) == 1
    assert "not fit" in capsys.readouterr().out
    report = json.loads((tmp_path / "a.json").read_text())
    assert not report["fit"]
    [twins] = [x for x in report["findings"] if x["check"] == "duplicate_id"]
    assert len(twins["groups"]) == twins["samples"] == 3
    for words in (["nothing.csv"], [], [str(clean), "--data.sheet", "1"], [str(clean), "--n", "3"]):
        assert main(["data", "check", *words]) == 2
        assert capsys.readouterr().err.strip().splitlines()[-1].startswith("error: ")


def test_settings_of_the_data_set_are_flags(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    path.write_text("key,words\na,one two three\na,four five six\n")
    flags = ["--data.columns.id", "key", "--data.columns.text", "words"]
    assert main(["data", "check", str(path), *flags, "--json", str(tmp_path / "a.json")]) == 1
    checks = {x["check"] for x in json.loads((tmp_path / "a.json").read_text())["findings"]}
    assert "duplicate_id" in checks


def test_the_page_is_one_escaped_file_that_shows_suspicious_samples(
    planted: Any, tmp_path: Path
) -> None:
    path = tmp_path / "page.html"
    source = tmp_path / "m.jsonl"
    rows = [
        {"id": f"<script>{n}", "text": f"<img src=x onerror=alert({n})> \ufffd"} for n in (1, 2)
    ]
    source.write_text("\n".join(map(json.dumps, rows)))
    main(["data", "check", str(source), "--html", str(path)])
    page = path.read_text(encoding="utf-8")
    assert "<script" not in page
    assert "&lt;img src=x onerror=alert(1)&gt;" in page
    main(["data", "check", str(planted[0]), "--html", str(path)])
    page = path.read_text(encoding="utf-8")
    assert page.count("data:image/jpeg;base64,") > 20
    assert page.count('class="wave"') > 20
    for finding in planted[2].findings:
        assert f"</span>{finding.title}" in page
    assert "None" not in re.sub(r"base64,[^\"]*", "", page)


def test_a_contact_sheet_shows_samples_of_each_class(tmp_path: Path) -> None:
    out = tmp_path / "sheet.html"
    assert main(["data", "show", "digits", "--n", "10", "--out", str(out)]) == 0
    page = out.read_text(encoding="utf-8")
    assert page.count('<article class="sample">') == 10
    assert sorted(re.findall(r"<i>(\d)</i>", page)) == list("0123456789")
    assert page.count("data:image/") == page.count('class="wave"') == 10


def test_a_sheet_shows_what_can_be_read_of_a_faulty_file(planted: Any, tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "a.html")]
    assert main(["data", "show", str(planted[0]), "--n", "400", *out]) == 0
    assert "cannot be decoded" in (tmp_path / "a.html").read_text(encoding="utf-8")
    with pytest.raises(FusionZooError, match=r"a contact sheet is a .html file"):
        write_contact_sheet(planted[2].scan, [0], tmp_path / "sheet.png")
