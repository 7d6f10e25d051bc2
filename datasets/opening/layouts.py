"""Public data sets as they are distributed: Hateful Memes, MM-IMDb, CREMA-D and others."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fusionzoo.errors import FusionZooError, did_you_mean, one_line

from ..base import DATASETS, DEFAULTS, SharedSettings
from ..media.formats import CLIPS, IMAGES
from ..paired import PairedDataset
from ..sources.table_settings import TableSettings
from ..tables.provenance import Loaded, Provenance
from ..tables.splits import SHARES, split_by_hash
from .manifest import manifest

Row = dict[str, Any]
EMOTIONS = {
    "ANG": "anger",
    "DIS": "disgust",
    "FEA": "fear",
    "HAP": "happy",
    "NEU": "neutral",
    "SAD": "sad",
}
AVMNIST_VAL = 12  # every twelfth sample of the training set is for validation: the last ones
HOLD_OUT = (0.9, 0.1, 0.0)  # shares of a training set that has no validation set


def first_of(top: Path, names: Sequence[str]) -> Path:
    """Return the first of these files or folders that exists."""
    for name in names:
        if (top / name).exists():
            return top / name
    raise FusionZooError(f"{top} has no {' or '.join(names)}, which the layout needs")


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file that are not empty, with their numbers."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise FusionZooError(f"{path} cannot be read: {one_line(error)}") from error
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield number, line.strip()


def cells_of(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of a CSV file without a header, with their numbers."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for number, cells in enumerate(csv.reader(file), start=1):
                if any(cells):
                    yield number, cells
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise FusionZooError(f"{path} cannot be read: {one_line(error)}") from error


def json_object(text: str, where: str) -> dict[str, Any]:
    """Return what JSON text holds, which must be an object; `where` names it in messages."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise FusionZooError(f"{where} is no JSON: {one_line(error)}") from error
    if not isinstance(value, dict):
        raise FusionZooError(f"{where} is no JSON object")
    return value


def middle_frame(top: Path, folders: Sequence[str], stem: str) -> str | None:
    """Return the middle frame of a clip, from a folder of its frames, or a single image."""
    for folder in folders:
        below = top / folder / stem
        frames = sorted(x for x in below.glob("*") if x.suffix.lower() in IMAGES)
        if frames:
            return frames[len(frames) // 2].relative_to(top).as_posix()
        for suffix in (".jpg", ".png"):
            if (top / folder / f"{stem}{suffix}").is_file():
                return f"{folder}/{stem}{suffix}"
    return None


def extracted(top: Path, stem: str) -> dict[str, str | None]:
    """Return the audio and the frame that were extracted from a video; None where they were not."""
    clips = (f"audio/{stem}{suffix}" for suffix in sorted(CLIPS))
    clip = next((name for name in clips if (top / name).is_file()), None)
    return {"audio": clip, "image": middle_frame(top, ("frames", "image"), stem)}


@dataclass(frozen=True, kw_only=True)
class LayoutTable:
    """The samples of a layout."""

    rows: list[Row]
    kinds: Mapping[str, str] = field(default_factory=dict)  # of modalities with other names
    notes: Sequence[str] = ()  # what was left out, for the data summary


def hateful_memes(top: Path) -> LayoutTable:
    """Hateful Memes: `train.jsonl`, `dev*.jsonl`, `test*.jsonl` with id, img, text, label."""
    rows, notes = [], []
    for split, names in {
        "train": ("train.jsonl",),
        "val": ("dev_seen.jsonl", "dev.jsonl"),
        "test": ("test_seen.jsonl", "test.jsonl"),
    }.items():
        path = first_of(top, names)
        lines = [json_object(line, f"{path}, row {n}") for n, line in lines_of(path)]
        for (number, _), line in zip(lines_of(path), lines, strict=True):
            absent = [key for key in ("id", "img", "text") if line.get(key) is None]
            if absent:
                raise FusionZooError(f"{path}, row {number}: it has no {absent[0]!r}")
        labelled = [line for line in lines if line.get("label") is not None]
        if len(labelled) < len(lines):
            notes.append(f"{len(lines) - len(labelled):,} rows of {path.name} without a label")
        for line in labelled:
            row = {"id": f"{line['id']}", "image": line["img"], "text": line["text"]}
            rows.append({**row, "split": split, "target": f"{line['label']}"})
    return LayoutTable(rows=rows, notes=notes)


def mm_imdb(top: Path) -> LayoutTable:
    """MM-IMDb: `split.json` and `dataset/<id>.jpeg`, `dataset/<id>.json` with plot and genres."""
    listed = first_of(top, ("split.json",))
    splits = json_object(listed.read_text(encoding="utf-8"), str(listed))
    rows = []
    for name, keys in splits.items():
        for key in keys:
            path = first_of(top, (f"dataset/{key}.json",))
            film = json_object(path.read_text(encoding="utf-8"), str(path))
            plots = film.get("plot") or []
            plots = [plots] if isinstance(plots, str) else plots
            row = {"id": str(key), "image": f"dataset/{key}.jpeg", "split": name}
            text = max(plots, key=len, default=None)
            rows.append({**row, "text": text, "target": ";".join(film.get("genres") or [])})
    return LayoutTable(rows=rows)


def crema_d(top: Path) -> LayoutTable:
    """CREMA-D: `AudioWAV/1001_DFA_ANG_XX.wav`, and a frame of `Image-01-FPS/1001_DFA_ANG_XX/`."""
    rows = []
    for path in sorted((top / "AudioWAV").glob("*.wav")):
        parts = path.stem.split("_")
        if len(parts) != 4 or parts[2] not in EMOTIONS:
            raise FusionZooError(
                f"{path}: expected actor_sentence_emotion_level.wav, with an emotion of"
                f" {', '.join(EMOTIONS)}"
            )
        row: Row = {"id": path.stem, "audio": f"AudioWAV/{path.name}", "group": parts[0]}
        row |= {"target": EMOTIONS[parts[2]], "sentence": parts[1], "level": parts[3]}
        rows.append({**row, "image": middle_frame(top, ("Image-01-FPS", "frames"), path.stem)})
    if not rows:
        raise FusionZooError(f"{top}/AudioWAV has no .wav file: --data.root names its parent")
    return LayoutTable(rows=rows)


def ave(top: Path) -> LayoutTable:
    """AVE: `trainSet.txt`, `valSet.txt`, `testSet.txt`; `audio/<id>.wav` and `frames/<id>/`."""
    rows: list[Row] = []
    for split in ("train", "val", "test"):
        path = first_of(top, (f"{split}Set.txt",))
        for number, line in lines_of(path):
            parts = line.split("&")
            if len(parts) != 5:
                raise FusionZooError(
                    f"{path}, row {number}: expected category&video&quality&start&end"
                )
            row = {"id": f"{parts[1]} {parts[3]}", "group": parts[1], "split": split}
            row |= {"target": parts[0], "quality": parts[2]}
            row |= {"event_start": parts[3], "event_end": parts[4]}
            rows.append({**row, **extracted(top, parts[1])})
    return _with_media(rows, top, "ffmpeg -i AVE/<id>.mp4 -ar 16000 -ac 1 audio/<id>.wav")


def vggsound(top: Path) -> LayoutTable:
    """VGGSound: `vggsound.csv` of id, start, label, split; `audio/<id>_<start>.wav`, `frames/`."""
    path = first_of(top, ("vggsound.csv",))
    rows: list[Row] = []
    for number, cells in cells_of(path):
        if len(cells) != 4 or not cells[1].strip().isdigit():
            raise FusionZooError(f"{path}, row {number}: expected id,start,label,train or test")
        stem = f"{cells[0]}_{int(cells[1]):06d}"
        row = {"id": stem, "group": cells[0], "youtube_start": cells[1].strip(), "target": cells[2]}
        rows.append({**row, "split": cells[3].strip(), **extracted(top, stem)})
    command = "ffmpeg -i video/<id>_<start>.mp4 -ar 16000 -ac 1 audio/<id>_<start>.wav"
    return _with_media(rows, top, command)


def av_mnist(top: Path) -> LayoutTable:
    """AV-MNIST: `image/train_data.npy`, `audio/train_data.npy`, `train_labels.npy`, also `test`.

    The last twelfth of the training set is for validation. Images are vectors of 784 numbers,
    spectrograms are sequences of 112 steps.
    """
    rows: list[Row] = []
    for split in ("train", "test"):
        path = first_of(top, (f"{split}_labels.npy",))
        try:
            labels = np.load(path, allow_pickle=False).reshape(-1).astype(int).tolist()
        except (ValueError, OSError, EOFError) as error:
            raise FusionZooError(f"{path} cannot be read: {one_line(error)}") from error
        num_train = len(labels) - len(labels) // AVMNIST_VAL
        for n, label in enumerate(labels):
            cells = {name: f"{name}/{split}_data.npy[{n}]" for name in ("image", "audio")}
            part = "val" if split == "train" and n >= num_train else split
            rows.append({"id": f"{split}{n}", **cells, "split": part, "target": f"{label}"})
    return LayoutTable(rows=rows, kinds={"image": "vector", "audio": "sequence"})


def flickr8k(top: Path) -> LayoutTable:
    """Flickr8k with spoken captions: a row per caption; the clips are in `flickr_audio/wavs/`."""
    path = first_of(top, ("Flickr8k.token.txt",))
    folder = first_of(top, ("Flicker8k_Dataset", "Flickr8k_Dataset", "Images")).name
    splits: dict[str, str] = {}
    for split, name in {"train": "train", "val": "dev", "test": "test"}.items():
        listed = first_of(top, (f"Flickr_8k.{name}Images.txt",))
        splits |= {line: split for _, line in lines_of(listed)}
    rows, unlisted = [], 0
    for number, line in lines_of(path):
        key, tab, caption = line.partition("\t")
        image, hash_sign, index = key.partition("#")
        if not tab or not hash_sign:
            raise FusionZooError(f"{path}, row {number}: expected picture.jpg#0, a tab, a caption")
        if image not in splits:
            unlisted += 1
            continue
        clip = f"flickr_audio/wavs/{Path(image).stem}_{index}.wav"
        row = {"id": key, "image": f"{folder}/{image}", "text": caption.strip()}
        row |= {"group": image, "split": splits[image]}
        rows.append({**row, "audio": clip if (top / clip).is_file() else None})
    notes = [f"{unlisted:,} captions of images in no split"] if unlisted else []
    return LayoutTable(rows=rows, notes=notes)


def food101(top: Path) -> LayoutTable:
    """UPMC Food-101: `texts/train_titles.csv` with file, title, class; `images/train/<class>/`."""
    rows = []
    for split in ("train", "test"):
        path = first_of(top, (f"texts/{split}_titles.csv",))
        for number, cells in cells_of(path):
            if len(cells) < 3:
                raise FusionZooError(f"{path}, row {number}: expected file,title,class")
            name, label = cells[0], cells[-1]
            row = {"id": f"{split}/{name}", "image": f"images/{split}/{label}/{name}"}
            text = ",".join(cells[1:-1]).strip()
            rows.append({**row, "text": text or None, "split": split, "target": label})
    return LayoutTable(rows=rows)


def _with_media(rows: list[Row], top: Path, command: str) -> LayoutTable:
    """Return the rows of which a file exists: many videos are no longer online."""
    present = [row for row in rows if row["audio"] or row["image"]]
    if not present:
        raise FusionZooError(
            f"{top} has neither audio/ nor frames/ of the {len(rows):,} clips listed: extract them"
            f" from the videos, {command}"
        )
    absent = len(rows) - len(present)
    notes = [f"{absent:,} of {len(rows):,} clips without a file"] if absent else []
    return LayoutTable(rows=present, notes=notes)


LAYOUTS: dict[str, Callable[[Path], LayoutTable]] = {
    "av-mnist": av_mnist,
    "ave": ave,
    "crema-d": crema_d,
    "flickr8k": flickr8k,
    "food-101": food101,
    "hateful-memes": hateful_memes,
    "mm-imdb": mm_imdb,
    "vggsound": vggsound,
}


@DATASETS.register("layout", family="format")
def open_layout(
    *,
    layout: str = "",
    root: str = "",
    shares: Sequence[float] = SHARES,
    shared: SharedSettings = DEFAULTS,
    targets: Mapping[str, str] | None = None,
    allow_outside: bool = False,
) -> PairedDataset:
    """Open a public data set in the files it is distributed in: `layout="hateful-memes"`.

    Layouts: av-mnist, ave, crema-d, flickr8k (with spoken captions), food-101 (with text),
    hateful-memes, mm-imdb, vggsound. For CMU-MOSI and CMU-MOSEI, `fusionzoo data convert` reads the
    pickles of features. docs/data.md lists the files and columns.

    Settings:
        layout: its name
        root: the folder
        shares: of train, val and test, where the data set has no splits
        targets: label columns and what they hold, `{"level": "classification"}`; train.py sets it
        allow_outside: whether paths may leave the folder, links resolved
    """
    if layout not in LAYOUTS:
        raise FusionZooError(
            f"--data.layout {layout!r} is unknown.{did_you_mean(layout, LAYOUTS)} Layouts:"
            f" {', '.join(LAYOUTS)}"
        )
    top = Path(root).expanduser()
    if not root or not top.is_dir():
        raise FusionZooError(f"no folder {root!r}: --data.root names it")
    read = LAYOUTS[layout](top)
    held_out = _hold_out(read.rows)
    names = dict.fromkeys(name for row in read.rows for name in row)
    columns = {name: [row.get(name) for row in read.rows] for name in names}
    # A modality of which there is no file, such as frames that nobody extracted, is no column.
    columns = {name: cells for name, cells in columns.items() if any(x is not None for x in cells)}
    table = pa.table({name: pa.array(cells, pa.string()) for name, cells in columns.items()})
    reading = (f"layout {layout}", *(f"left out: {note}" for note in read.notes))
    if held_out:
        reading += (f"val: {held_out:,} of train, by a hash of group or id",)
    loaded = Loaded(
        table=table,
        source=str(top),
        root=top,
        provenance=Provenance(reading=reading),
    )
    settings = TableSettings(
        root=loaded,
        kinds={name: kind for name, kind in read.kinds.items() if name in columns},
        shares=shares,
        targets=targets,
        allow_outside=allow_outside,
    )
    return manifest(settings, shared=shared)


def _hold_out(rows: list[Row]) -> int:
    """Move a tenth of `train` to `val`, where a data set has no `val`; return how many samples.

    The first sample of each class stays, so that no class is lost, and with it its group.
    """
    splits = {row.get("split") for row in rows}
    if "train" not in splits or "val" in splits:
        return 0
    train = [row for row in rows if row["split"] == "train"]
    first = {row.get("target"): row for row in reversed(train)}
    stays = {str(row.get("group", row["id"])) for row in first.values()}
    moved = 0
    for row in train:
        key = str(row.get("group", row["id"]))
        if key not in stays and split_by_hash(key, HOLD_OUT) == "val":
            row["split"], moved = "val", moved + 1
    return moved
