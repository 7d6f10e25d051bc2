"""Public data sets, each as a miniature in the files in which it is distributed."""

from __future__ import annotations

import json
import pickle
import shutil
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
MOODS = ("joy", "fear")


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


def kinetics_sounds(top: Path) -> None:
    write(top / "my_train.txt", *(f"w{n:010d}_000001_000011,10,{n % 2}" for n in range(40)))
    write(top / "my_test.txt", "-3Mwkq-7TV4_2,10,1", "-74csnCOiUs_0,10,0")
    for n in range(40):
        clip(top / f"audio/w{n:010d}_000001_000011.wav")
    clip(top / "test/-3Mwkq-7TV4_2/-3Mwkq-7TV4_2.wav")
    picture(top / "test/-3Mwkq-7TV4_2/frame_00001.jpg")


def label_csv(top: Path) -> None:
    """`video_0001` has clips in two splits, as a random split by clips has."""
    rows = ["video_id,clip_id,text,label,label_T,label_A,label_V,annotation,mode"]
    for n, mode in enumerate(["train", "train", "valid", "test"]):
        video, name = f"video_{n // 3 + 1:04d}", f"{n:04d}"
        rows.append(f'{video},{name},"我,{n}",{n / 2 - 1},0,0,0,Neutral,{mode}')
        clip(top / f"Processed/audio/{video}/{name}.wav")
        if n:
            picture(top / f"Processed/video/Frames/{video}/{name}/0001.png")
    write(top / "label.csv", *rows)


def meld(top: Path) -> None:
    header = "Sr No.,Utterance,Speaker,Emotion,Sentiment,Dialogue_ID,Utterance_ID,Season,Episode"
    for split in ("train", "dev", "test"):
        lines = [f'{n},"Oh, my {n}",Phoebe,{x},negative,0,{n},4,7' for n, x in enumerate(MOODS)]
        write(top / f"{split}_sent_emo.csv", header, *lines)
        clip(top / f"audio/{split}/dia0_utt0.wav")
        picture(top / f"frames/{split}/dia0_utt1/1.jpg")
    clip(top / "audio/train/dia0_utt1.wav")


def n24news(top: Path) -> None:
    for n, split in enumerate(["train", "dev", "test"]):
        article = {"image_id": f"i{n}", "headline": "h", "caption": "c", "abstract": "a"}
        more = [{**article, "section": name, "article": name} for name in ("Books", "Dance")]
        write(top / f"news/nytimes_{split}.json", json.dumps(more))
        picture(top / f"imgs/i{n}.jpg")


def ur_funny(top: Path) -> None:
    folds = {"train": [1, 2], "dev": [3], "test": [4]}
    said = {"punchline_sentence": "so there", "context_sentences": ["Once", "upon a time"]}
    words, labels = {n: said for n in range(1, 5)}, {n: n % 2 for n in range(1, 5)}
    parts = {"data_folds": folds, "language_sdk": words, "humor_label_sdk": labels}
    for name, part in parts.items():
        (top / f"{name}.pkl").write_bytes(pickle.dumps(part))
    for n in range(1, 4):
        clip(top / f"audio/{n}.wav")
        picture(top / f"frames/{n}.jpg")


NEWS = "image headline:text caption:text abstract:text article:text"
# layout -> writer, samples of train, val and test, modalities with other kinds, classes, groups
CASES: dict[str, tuple[Callable[[Path], None], tuple[int, ...], str, list[str], int]] = {
    "hateful-memes": (hateful_memes, (2, 1, 1), "image text", ["0", "1"], 4),
    "mm-imdb": (mm_imdb, (2, 1, 1), "image text", ["Drama;War"], 4),
    "crema-d": (crema_d, (), "image audio", ["anger", "sad"], 10),  # splits by a hash of the actor
    "ave": (ave, (1, 1, 1), "image audio", ["Church bell"], 3),
    "vggsound": (vggsound, (38, 3, 1), "image audio", ["bark", "playing piano, upright"], 42),
    "av-mnist": (av_mnist, (11, 1, 2), "image:vector audio:sequence", [*"0123456789"], 14),
    "flickr8k": (flickr8k, (4, 2, 2), "image text audio", [], 4),
    "food-101": (food101, (3, 0, 3), "image text", ["apple_pie", "ramen"], 6),
    "kinetics-sounds": (kinetics_sounds, (37, 3, 1), "image audio", ["0", "1"], 41),
    "ch-sims": (label_csv, (2, 1, 1), "text audio image", [], 2),
    "cmu-mosei": (label_csv, (2, 1, 1), "text audio image", [], 2),
    "meld": (meld, (2, 2, 2), "text audio image", ["fear", "joy"], 3),
    "n24news": (n24news, (2, 2, 2), NEWS, ["Books", "Dance"], 6),
    "ur-funny": (ur_funny, (2, 1, 1), "text context:text audio image", ["0", "1"], 4),
}
HAVE = {  # what the miniatures lack of the whole data sets
    "av-mnist": "14 of 70,000 samples; missing 69,986",
    "ave": "3 of 4,143 clips; missing losta-b 0, lostc 0, loste_f 0, and 4,137",
    "ch-sims": "4 of 2,281 clips; missing 2,277",
    "cmu-mosei": "4 of 22,856 clips; missing 22,852",
    "crema-d": "20 of 7,442 clips; missing 7,422",
    "flickr8k": "8 of 40,000 captions; missing 39,992",
    "food-101": "6 of 6 recipes",
    "hateful-memes": "4 of 10,000 memes; missing 9,996",
    "kinetics-sounds": "41 of 17,396 clips; missing -74csnCOiUs_0, and 17,354",
    "meld": "6 of 13,708 utterances; missing 13,702",
    "mm-imdb": "4 of 25,959 films; missing 25,955",
    "n24news": "6 of 6 articles",
    "ur-funny": "3 of 4 clips; missing 4",
    "vggsound": "42 of 43 clips; missing gone_000005",
}


def open_case(name: str, top: Path) -> fz.PairedDataset:
    CASES[name][0](top)
    targets = {"target": "regression"} if CASES[name][0] is label_csv else None
    return fz.create_dataset("layout", layout=name, root=str(top), targets=targets)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_a_table_of_its_samples_and_says_which_are_missing(
    name: str, tmp_path: Path
) -> None:
    _, counts, words, classes, groups = CASES[name]
    dataset = open_case(name, tmp_path)
    pairs = [word.partition(":") for word in words.split()]
    assert dict(dataset.modalities) == {name: kind or name for name, _, kind in pairs}
    if counts:
        splits = zip(("train", "val", "test"), counts, strict=True)
        assert dataset.splits == {split: count for split, count in splits if count}
    assert (dataset.classes, len(set(dataset.groups))) == (classes, groups)
    for row in range(len(dataset)):
        sample = dataset[row]
        has = [value is not None for value in sample.values.values()]
        assert has == dataset.present[row].tolist()
    reading = next(line for line in data_summary(dataset) if line.startswith("read as"))
    assert f"you have {HAVE[name]}" in reading, reading
    assert ("left out or in no list" in reading) == (LAYOUTS[name].count > 0)


def test_the_longest_plot_and_all_genres_of_a_film_are_read(tmp_path: Path) -> None:
    dataset = open_case("mm-imdb", tmp_path)
    assert dataset.references("text")[0] == "a longer plot of 0001"
    labels = dataset.with_targets({"target": "multilabel"})
    assert labels.targets.tolist() == [[1, 1]] * 4


def test_the_middle_frame_of_a_clip_is_read(tmp_path: Path) -> None:
    dataset = open_case("crema-d", tmp_path)
    assert str(dataset.references("image")[0]).endswith("Image-01-FPS/1001_DFA_ANG_XX/1.jpg")
    pairs = {(key[:4], split) for key, split in zip(dataset.ids, dataset.split_names, strict=True)}
    assert len(pairs) == 10  # each actor is in one split
    assert {split for _, split in pairs} == {"train", "val", "test"}


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("hateful-memes", "left out: 1 rows of test_seen.jsonl without a label"),
        ("flickr8k", "left out: 1 captions of images in no split"),
    ],
)
def test_the_summary_says_what_was_left_out(name: str, note: str, tmp_path: Path) -> None:
    lines = data_summary(open_case(name, tmp_path))
    assert any(note in line for line in lines), lines


def test_a_recording_that_its_list_names_is_missing_by_name(tmp_path: Path) -> None:
    crema_d(tmp_path)
    write(tmp_path / "SentenceFilenames.csv", '"Stimulus_Number","Filename"', '1,"1001_IEO_NEU_XX"')
    dataset = fz.create_dataset("layout", layout="crema-d", root=str(tmp_path))
    assert any("missing 1001_IEO_NEU_XX, and 7,421" in line for line in data_summary(dataset))


def test_a_missing_picture_leaves_its_text_and_none_at_all_is_an_error(tmp_path: Path) -> None:
    hateful_memes(tmp_path)
    (tmp_path / "img/40.png").unlink()
    dataset = fz.create_dataset("layout", layout="hateful-memes", root=str(tmp_path))
    assert dataset.present[0].tolist() == [False, True]
    assert any("missing 40, and" in line for line in data_summary(dataset))
    shutil.rmtree(tmp_path / "img")
    with pytest.raises(FusionZooError, match="has no files of its 4 rows: root="):
        fz.create_dataset("layout", layout="hateful-memes", root=str(tmp_path))


def test_videos_stand_in_for_what_nobody_extracted(tmp_path: Path) -> None:
    meld(tmp_path)
    video = tmp_path / "dev_splits_complete/dia0_utt1.mp4"
    write(video, "a video")
    dataset = fz.create_dataset("layout", layout="meld", root=str(tmp_path))
    row = dataset.ids.index("dev dia0_utt1")
    assert str(dataset.references("audio")[row]) == str(video)
    assert str(dataset.references("image")[row]).endswith("frames/dev/dia0_utt1/1.jpg")


def test_a_tenth_of_train_is_for_validation_where_there_is_none(tmp_path: Path) -> None:
    dataset = open_case("vggsound", tmp_path)
    assert any("val: 3 of train, by a hash" in line for line in data_summary(dataset))
    assert dataset.ids[0] in dataset.split("train").ids  # the only sample of its class


def test_a_dev_split_is_val_and_train_stays_whole(tmp_path: Path) -> None:
    mm_imdb(tmp_path)
    keys = [f"{n:04d}" for n in range(10, 50)]
    write(tmp_path / "split.json", json.dumps({"train": keys, "dev": ["0003"], "test": ["0004"]}))
    for key in keys:
        picture(tmp_path / f"dataset/{key}.jpeg")
        film = {"plot": "a", "genres": ["Drama", "War"]}
        write(tmp_path / f"dataset/{key}.json", json.dumps(film))
    kinds = {"target": "multilabel"}
    dataset = fz.create_dataset("layout", layout="mm-imdb", root=str(tmp_path), targets=kinds)
    assert dataset.splits == {"train": 40, "val": 1, "test": 1}


def test_captions_and_titles_keep_their_commas(tmp_path: Path) -> None:
    assert open_case("food-101", tmp_path).references("text")[0] == "Best apple_pie, ever"
    spoken = open_case("flickr8k", tmp_path)
    assert spoken.references("text")[1] == "A dog , 1 ."
    assert spoken.references("audio")[0] is None
    assert str(spoken.references("audio")[1]).endswith("flickr_audio/wavs/0_1.wav")


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    write(tmp_path / "vggsound.csv", "x,7,bark,train", "x;8")
    clip(tmp_path / "AudioWAV/odd.wav")
    for layout, root, says in (
        ("mm-imbd", tmp_path, r"Did you mean 'mm-imdb'"),
        ("ave", tmp_path / "none", "no folder"),
        ("hateful-memes", tmp_path, r"has no train\.jsonl, which the layout needs"),
        ("vggsound", tmp_path, r"vggsound\.csv, row 2: expected"),
        ("crema-d", tmp_path, "expected actor_sentence_emotion_level"),
    ):
        with pytest.raises(FusionZooError, match=says):
            fz.create_dataset("layout", layout=layout, root=str(root))


@pytest.mark.parametrize(
    ("name", "file", "text", "message"),
    [
        ("hateful-memes", "train.jsonl", "{broken", r"train\.jsonl, row 1 is no JSON"),
        ("ch-sims", "label.csv", "video_id,clip_id,text", r"label\.csv has no column 'label'"),
        ("n24news", "news/nytimes_dev.json", "[{}]", r"nytimes_dev\.json, article 1: it has no"),
        ("ur-funny", "data_folds.pkl", "}.", r"data_folds\.pkl holds no dict"),
        ("ur-funny", "humor_label_sdk.pkl", "}.", r"humor_label_sdk\.pkl has nothing for 1, which"),
    ],
)
def test_a_mistake_in_a_file_is_named(
    name: str, file: str, text: str, message: str, tmp_path: Path
) -> None:
    CASES[name][0](tmp_path)
    (tmp_path / file).write_text(text)
    with pytest.raises(FusionZooError, match=message):
        fz.create_dataset("layout", layout=name, root=str(tmp_path))
