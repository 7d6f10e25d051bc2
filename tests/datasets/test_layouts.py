"""Public data sets, each as a miniature in the files in which it is distributed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image

import fusionzoo as fz
from fusionzoo.datasets.opening.layouts import LAYOUTS
from fusionzoo.datasets.summary import data_summary
from fusionzoo.errors import FusionZooError

DRAW = np.random.default_rng(0)


def picture(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(DRAW.integers(0, 255, (5, 6, 3), dtype=np.uint8)).save(path)


def clip(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, DRAW.uniform(-0.5, 0.5, 300), 8000)


def write(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def hateful_memes(top: Path) -> None:
    for n, (split, label) in enumerate(
        [("train", 0), ("train", 1), ("dev_seen", 1), ("test_seen", 0), ("test_seen", None)]
    ):
        line = {"id": 40 + n, "img": f"img/{40 + n}.png", "text": f"meme {n}"}
        line |= {} if label is None else {"label": label}
        picture(top / f"img/{40 + n}.png")
        with (top / f"{split}.jsonl").open("a") as file:
            file.write(f"{json.dumps(line)}\n")


def mm_imdb(top: Path) -> None:
    splits = {"train": ["0001", "0002"], "dev": ["0003"], "test": ["0004"]}
    write(top / "split.json", json.dumps(splits))
    for key in (key for keys in splits.values() for key in keys):
        picture(top / f"dataset/{key}.jpeg")
        film = {"plot": ["short", f"a longer plot of {key}"], "genres": ["Drama", "War"]}
        write(top / f"dataset/{key}.json", json.dumps(film))


def crema_d(top: Path) -> None:
    for actor in range(1001, 1011):
        for emotion in ("ANG", "SAD"):
            clip(top / f"AudioWAV/{actor}_DFA_{emotion}_XX.wav")
            for frame in range(3):
                picture(top / f"Image-01-FPS/{actor}_DFA_{emotion}_XX/{frame}.jpg")


def ave(top: Path) -> None:
    for split, name in {"train": "a-b", "val": "c&d"[:1], "test": "e_f"}.items():
        write(top / f"{split}Set.txt", f"Church bell&{name}&good&2&7", f"Bark&lost{name}&good&0&9")
        clip(top / f"audio/{name}.wav")
        picture(top / f"frames/{name}/001.jpg")


def vggsound(top: Path) -> None:
    rows = ['--x,7,"playing piano, upright",train', "y_z,30,bark,test", "gone,5,bark,train"]
    write(top / "vggsound.csv", *rows, *(f"w{n},5,bark,train" for n in range(40)))
    clip(top / "audio/--x_000007.flac")
    for n in range(40):
        picture(top / f"frames/w{n}_000005/1.jpg")
    picture(top / "frames/y_z_000030.jpg")


def av_mnist(top: Path) -> None:
    for split, count in (("train", 12), ("test", 2)):
        (top / "image").mkdir(exist_ok=True)
        (top / "audio").mkdir(exist_ok=True)
        np.save(top / f"image/{split}_data.npy", DRAW.uniform(0, 1, (count, 784)))
        np.save(top / f"audio/{split}_data.npy", DRAW.uniform(0, 1, (count, 112, 112)))
        np.save(top / f"{split}_labels.npy", np.arange(count) % 10)


def flickr8k(top: Path) -> None:
    lines = []
    for n, split in enumerate(["train", "train", "dev", "test"]):
        write(top / f"Flickr_8k.{split}Images.txt", *(["0.jpg"] * (n == 1)), f"{n}.jpg")
        picture(top / f"Flicker8k_Dataset/{n}.jpg")
        for index in range(2):
            lines.append(f"{n}.jpg#{index}\tA dog , {index} .")
            if index or n:
                clip(top / f"flickr_audio/wavs/{n}_{index}.wav")
    write(top / "Flickr8k.token.txt", *lines, "other.jpg.1#0\tNot in a split .")


def food101(top: Path) -> None:
    for split in ("train", "test"):
        rows = []
        for n, label in enumerate(["apple_pie", "ramen", "ramen"]):
            picture(top / f"images/{split}/{label}/{label}_{n}.jpg")
            rows.append(f'{label}_{n}.jpg,"Best {label}, ever",{label}')
        write(top / f"texts/{split}_titles.csv", *rows)


# layout -> writer, samples per split, kinds of modalities, classes or genres, groups
CASES: dict[str, tuple[Callable[[Path], None], dict[str, int], dict[str, str], list[str], int]] = {
    "hateful-memes": (
        hateful_memes,
        {"train": 2, "val": 1, "test": 1},
        {"image": "image", "text": "text"},
        ["0", "1"],
        4,
    ),
    "mm-imdb": (
        mm_imdb,
        {"train": 2, "val": 1, "test": 1},
        {"image": "image", "text": "text"},
        ["Drama;War"],
        4,
    ),
    "crema-d": (
        crema_d,
        {"train": 0, "val": 0, "test": 0},  # by a hash of the actor
        {"image": "image", "audio": "audio"},
        ["anger", "sad"],
        10,
    ),
    "ave": (
        ave,
        {"train": 1, "val": 1, "test": 1},
        {"image": "image", "audio": "audio"},
        ["Church bell"],
        3,
    ),
    "vggsound": (
        vggsound,
        {"train": 38, "test": 1, "val": 3},
        {"image": "image", "audio": "audio"},
        ["bark", "playing piano, upright"],
        42,
    ),
    "av-mnist": (
        av_mnist,
        {"train": 11, "val": 1, "test": 2},
        {"image": "vector", "audio": "sequence"},
        [str(digit) for digit in range(10)],
        14,
    ),
    "flickr8k": (
        flickr8k,
        {"train": 4, "val": 2, "test": 2},
        {"image": "image", "text": "text", "audio": "audio"},
        [],
        4,
    ),
    "food-101": (
        food101,
        {"train": 3, "test": 3},
        {"image": "image", "text": "text"},
        ["apple_pie", "ramen"],
        6,
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_a_table_of_its_samples(name: str, tmp_path: Path) -> None:
    make, splits, kinds, classes, groups = CASES[name]
    make(tmp_path)
    dataset = fz.create_dataset("layout", layout=name, root=str(tmp_path))
    assert dict(dataset.modalities) == kinds
    if any(splits.values()):
        assert dataset.splits == splits
    assert (dataset.classes, len(set(dataset.groups))) == (classes, groups)
    for row in range(len(dataset)):
        sample = dataset[row]
        assert sample is not None
        has = [value is not None for value in sample.values.values()]
        assert has == dataset.present[row].tolist()


def open_case(name: str, top: Path) -> fz.PairedDataset:
    CASES[name][0](top)
    return fz.create_dataset("layout", layout=name, root=str(top))


def test_the_longest_plot_and_all_genres_of_a_film_are_read(tmp_path: Path) -> None:
    dataset = open_case("mm-imdb", tmp_path)
    assert dataset.references("text")[0] == "a longer plot of 0001"
    labels = dataset.with_targets({"target": "multilabel"})
    assert labels.targets.tolist() == [[1, 1]] * 4


def test_the_middle_frame_of_a_clip_is_read(tmp_path: Path) -> None:
    dataset = open_case("crema-d", tmp_path)
    assert str(dataset.references("image")[0]).endswith("Image-01-FPS/1001_DFA_ANG_XX/1.jpg")
    for split in ("train", "val", "test"):
        actors = {key[:4] for key in dataset.split(split).ids}
        assert actors and actors.isdisjoint(
            key[:4]
            for key, other in zip(dataset.ids, dataset.split_names, strict=True)
            if other != split
        )


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("hateful-memes", "1 rows of test_seen.jsonl without a label"),
        ("ave", "3 of 6 clips without a file"),
        ("vggsound", "1 of 43 clips without a file"),
        ("flickr8k", "1 captions of images in no split"),
    ],
)
def test_the_summary_says_what_was_left_out(name: str, note: str, tmp_path: Path) -> None:
    lines = data_summary(open_case(name, tmp_path))
    assert any(f"left out: {note}" in line for line in lines), lines


def test_a_tenth_of_train_is_for_validation_where_there_is_none(tmp_path: Path) -> None:
    dataset = open_case("vggsound", tmp_path)
    assert any("val: 3 of train, by a hash" in line for line in data_summary(dataset))
    assert dataset.ids[0] in dataset.split("train").ids  # the only sample of its class


def test_captions_and_titles_keep_their_commas(tmp_path: Path) -> None:
    assert open_case("food-101", tmp_path).references("text")[0] == "Best apple_pie, ever"
    spoken = open_case("flickr8k", tmp_path)
    assert spoken.references("text")[1] == "A dog , 1 ."
    assert spoken.references("audio")[0] is None
    assert str(spoken.references("audio")[1]).endswith("flickr_audio/wavs/0_1.wav")


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(FusionZooError, match=r"Did you mean 'mm-imdb'"):
        fz.create_dataset("layout", layout="mm-imbd", root=str(tmp_path))
    with pytest.raises(FusionZooError, match="no folder"):
        fz.create_dataset("layout", layout="ave", root=str(tmp_path / "none"))
    with pytest.raises(FusionZooError, match=r"has no train\.jsonl, which the layout needs"):
        fz.create_dataset("layout", layout="hateful-memes", root=str(tmp_path))
    write(tmp_path / "train.jsonl", "{broken")
    with pytest.raises(FusionZooError, match=r"train\.jsonl, row 1 is no JSON"):
        fz.create_dataset("layout", layout="hateful-memes", root=str(tmp_path))
    write(tmp_path / "vggsound.csv", "x,7,bark,train", "x;8")
    with pytest.raises(FusionZooError, match=r"vggsound\.csv, row 2: expected"):
        fz.create_dataset("layout", layout="vggsound", root=str(tmp_path))
    write(tmp_path / "vggsound.csv", "x,7,bark,train")
    with pytest.raises(FusionZooError, match="extract them from the videos, ffmpeg"):
        fz.create_dataset("layout", layout="vggsound", root=str(tmp_path))
    clip(tmp_path / "AudioWAV/odd.wav")
    with pytest.raises(FusionZooError, match="expected actor_sentence_emotion_level"):
        fz.create_dataset("layout", layout="crema-d", root=str(tmp_path))


def test_a_missing_key_of_a_line_is_named(tmp_path: Path) -> None:
    hateful_memes(tmp_path)
    write(tmp_path / "train.jsonl", json.dumps({"id": 1, "label": 1, "text": "no picture"}))
    with pytest.raises(FusionZooError, match=r"train\.jsonl, row 1: it has no 'img'"):
        fz.create_dataset("layout", layout="hateful-memes", root=str(tmp_path))
