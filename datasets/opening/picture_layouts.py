"""Public data sets of pictures and texts, and of arrays, as they are distributed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from fusionzoo.errors import FusionZooError, explained
from fusionzoo.files import read_json_object

from ..tables.splits import USUAL_NAMES as SPLITS
from .layout_files import (
    LayoutTable,
    Row,
    cells_of,
    existing,
    first_of,
    json_object,
    lines_of,
    with_files,
)

AVMNIST_VAL = 12  # every twelfth sample of the training set is for validation: the last ones
PICTURES = "--data.root names the folder that the pictures' paths start from"
NEWS_TEXTS = ("headline", "caption", "abstract", "article")


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
            row = {"id": f"{line['id']}", "image": existing(top, line["img"]), "text": line["text"]}
            rows.append({**row, "split": split, "target": f"{line['label']}"})
    return replace(with_files(rows, top, PICTURES), notes=notes)


def mm_imdb(top: Path) -> LayoutTable:
    """MM-IMDb: `split.json` and `dataset/<id>.jpeg`, `dataset/<id>.json` with plot and genres."""
    splits = read_json_object(first_of(top, ("split.json",)))
    rows = []
    for name, keys in splits.items():
        for key in keys:
            path = first_of(top, (f"dataset/{key}.json",))
            film = read_json_object(path)
            plots = film.get("plot") or []
            plots = [plots] if isinstance(plots, str) else plots
            image = existing(top, f"dataset/{key}.jpeg")
            row = {"id": str(key), "image": image, "split": SPLITS.get(name, name)}
            text = max(plots, key=len, default=None)
            rows.append({**row, "text": text, "target": ";".join(film.get("genres") or [])})
    return with_files(rows, top, PICTURES)


def av_mnist(top: Path) -> LayoutTable:
    """AV-MNIST: `image/train_data.npy`, `audio/train_data.npy`, `train_labels.npy`, also `test`.

    The last twelfth of the training set is for validation. Images are vectors of 784 numbers,
    spectrograms are sequences of 112 steps.
    """
    rows: list[Row] = []
    for split in ("train", "test"):
        path = first_of(top, (f"{split}_labels.npy",))
        with explained(f"{path} cannot be read", ValueError, OSError, EOFError):
            labels = np.load(path, allow_pickle=False).reshape(-1).astype(int).tolist()
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
        row = {"id": key, "image": existing(top, f"{folder}/{image}"), "text": caption.strip()}
        row |= {"group": image, "split": splits[image]}
        rows.append({**row, "audio": existing(top, clip)})
    notes = [f"{unlisted:,} captions of images in no split"] if unlisted else []
    return replace(with_files(rows, top, PICTURES), notes=notes)


def food101(top: Path) -> LayoutTable:
    """UPMC Food-101: `texts/train_titles.csv` with file, title, class; `images/train/<class>/`."""
    rows = []
    for split in ("train", "test"):
        path = first_of(top, (f"texts/{split}_titles.csv",))
        for number, cells in cells_of(path):
            if len(cells) < 3:
                raise FusionZooError(f"{path}, row {number}: expected file,title,class")
            name, label = cells[0], cells[-1]
            image = existing(top, f"images/{split}/{label}/{name}")
            row = {"id": f"{split}/{name}", "image": image}
            text = ",".join(cells[1:-1]).strip()
            rows.append({**row, "text": text or None, "split": split, "target": label})
    return with_files(rows, top, PICTURES)


def n24news(top: Path) -> LayoutTable:
    """N24News: `news/nytimes_train.json`, also `dev` and `test`; `imgs/<image_id>.jpg`."""
    rows: list[Row] = []
    for split in ("train", "dev", "test"):
        name = f"nytimes_{split}.json"
        path = first_of(top, (f"news/{name}", name))
        with explained(f"{path} cannot be read", OSError, ValueError):
            articles = json.loads(path.read_text(encoding="utf-8"))
        for number, article in enumerate(articles, start=1):
            if not isinstance(article, dict) or not {"image_id", "section"} <= set(article):
                raise FusionZooError(f"{path}, article {number}: it has no image_id or no section")
            key = str(article["image_id"])
            row = {"id": f"{split} {number} {key}", "image": existing(top, f"imgs/{key}.jpg")}
            row |= {text: str(article.get(text) or "").strip() or None for text in NEWS_TEXTS}
            rows.append({**row, "split": SPLITS[split], "target": str(article["section"])})
    read = with_files(rows, top, "expected imgs/<image_id>.jpg", texts=NEWS_TEXTS)
    return replace(read, kinds=dict.fromkeys(NEWS_TEXTS, "text"))
