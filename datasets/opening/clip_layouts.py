"""Public data sets of clips, audio and pictures of a video, as they are distributed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fusionzoo.errors import FusionZooError, check_known

from ..sources.pickle_files import plain, read_pickle
from ..tables.splits import USUAL_NAMES as SPLITS
from .layout_files import (
    AUDIO,
    FRAMES,
    LayoutTable,
    Row,
    cells_of,
    check_cells,
    extracted,
    first_of,
    lines_of,
    middle_frame,
    records_of,
    with_files,
)

EMOTIONS = {
    "ANG": "anger",
    "DIS": "disgust",
    "FEA": "fear",
    "HAP": "happy",
    "NEU": "neutral",
    "SAD": "sad",
}
EXTRACT = "extract them from the videos,"
YOUTUBE_ID = 11  # characters
MELD_VIDEOS = {  # of MELD.Raw.tar.gz
    "train": ("train/train_splits", "train_splits"),
    "dev": ("dev/dev_splits_complete", "dev_splits_complete"),
    "test": ("test/output_repeated_splits_test", "output_repeated_splits_test"),
}


def crema_d(top: Path) -> LayoutTable:
    """CREMA-D: `AudioWAV/1001_DFA_ANG_XX.wav`, and a frame of `Image-01-FPS/1001_DFA_ANG_XX/`."""
    rows = []
    for path in sorted((top / "AudioWAV").glob("*.wav")):
        parts = path.stem.split("_")
        if len(parts) != 4 or parts[2] not in EMOTIONS:
            raise FusionZooError(f"{path}: expected actor_sentence_emotion_level.wav")
        row: Row = {"id": path.stem, "audio": f"AudioWAV/{path.name}", "group": parts[0]}
        row |= {"target": EMOTIONS[parts[2]], "sentence": parts[1], "level": parts[3]}
        rows.append({**row, "image": middle_frame(top, ("Image-01-FPS", "frames"), path.stem)})
    if not rows:
        raise FusionZooError(f"{top}/AudioWAV has no .wav file: --data.root names its parent")
    listed = top / "SentenceFilenames.csv"
    lines = records_of(listed, ("Filename",)) if listed.is_file() else ()
    here = {row["id"] for row in rows}
    names = [line["Filename"] for _, line in lines]
    return LayoutTable(rows=rows, missing=[name for name in names if name not in here])


def ave(top: Path) -> LayoutTable:
    """AVE: `trainSet.txt`, `valSet.txt`, `testSet.txt`; `audio/<id>.wav` and `frames/<id>/`."""
    rows: list[Row] = []
    for split in ("train", "val", "test"):
        path = first_of(top, (f"{split}Set.txt",))
        for number, line in lines_of(path):
            parts = line.split("&")
            check_cells(path, number, parts, "category&video&quality&start&end", "&")
            row = {"id": f"{parts[1]} {parts[3]}", "group": parts[1], "split": split}
            row |= {"target": parts[0], "quality": parts[2]}
            row |= {"event_start": parts[3], "event_end": parts[4]}
            rows.append({**row, **extracted(top, parts[1])})
    return with_files(rows, top, f"{EXTRACT} ffmpeg -i AVE/<id>.mp4 -ar 16000 -ac 1 audio/<id>.wav")


def vggsound(top: Path) -> LayoutTable:
    """VGGSound: `vggsound.csv` of id, start, label, split; `audio/<id>_<start>.wav`, `frames/`."""
    path = first_of(top, ("vggsound.csv",))
    rows: list[Row] = []
    for number, cells in cells_of(path, "id,start,label,split"):
        if not cells[1].strip().isdigit():
            raise FusionZooError(f"{path}, row {number}: the start {cells[1]!r} is no number")
        stem = f"{cells[0]}_{int(cells[1]):06d}"
        row = {"id": stem, "group": cells[0], "youtube_start": cells[1].strip(), "target": cells[2]}
        rows.append({**row, "split": cells[3].strip(), **extracted(top, stem)})
    command = f"{EXTRACT} ffmpeg -i video/<id>_<start>.mp4 -ar 16000 -ac 1 audio/<id>_<start>.wav"
    return with_files(rows, top, command)


def kinetics_sounds(top: Path) -> LayoutTable:
    """Kinetics-Sounds: `my_train.txt`, `my_test.txt` of clip,seconds,class; `audio/`, `frames/`.

    The lists are those of OGM-GE, whose classes are numbers; so are the folders `train/<clip>/` and
    `test/<clip>/` of frames and a .wav.
    """
    rows: list[Row] = []
    for split in ("train", "test"):
        name = f"my_{split}.txt"
        path = first_of(top, (name, f"data/KineticSound/{name}"))
        for _, cells in cells_of(path, "clip,seconds,class"):
            stem = cells[0].strip()
            row = {"id": stem, "group": stem[:YOUTUBE_ID], "target": cells[2].strip()}
            files = extracted(top, stem, audio=(*AUDIO, f"{split}/{stem}"), frames=(*FRAMES, split))
            rows.append({**row, "split": split, **files})
    return with_files(rows, top, f"{EXTRACT} ffmpeg -i <clip>.mp4 -ar 16000 -ac 1 audio/<clip>.wav")


def label_csv(top: Path) -> LayoutTable:
    """CH-SIMS and CMU-MOSEI as in MMSA: `label.csv`, `Raw/<video>/<clip>.mp4`, `Processed/`."""
    path = first_of(top, ("label.csv",))
    named = ("video_id", "clip_id", "text", "label", "annotation", "mode")
    rows: list[Row] = []
    for number, line in records_of(path, named):
        check_known(line["mode"], SPLITS, f"{path}, row {number}: {line['mode']!r} is no split")
        stem = f"{line['video_id']}/{line['clip_id']}"
        row: Row = {"id": stem, "group": line["video_id"], "split": SPLITS[line["mode"]]}
        row |= {"text": line["text"].strip() or None, "target": line["label"]}
        labels = ("annotation", "label_T", "label_A", "label_V")
        row |= {name: line[name] for name in labels if line.get(name)}
        files = extracted(
            top,
            stem,
            audio=(*AUDIO, "Processed/audio"),
            frames=(*FRAMES, "Processed/video/Frames"),
            video=f"Raw/{stem}.mp4",
        )
        rows.append({**row, **files})
    return with_files(rows, top, "expected Raw/<video_id>/<clip_id>.mp4")


def meld(top: Path) -> LayoutTable:
    """MELD: `train_sent_emo.csv`, also `dev` and `test`; the clips `dia0_utt0.mp4` of a split."""
    rows: list[Row] = []
    for split, folders in MELD_VIDEOS.items():
        name = f"{split}_sent_emo.csv"
        path = first_of(top, (name, f"{split}/{name}", f"data/MELD/{name}"))
        named = ("Utterance", "Speaker", "Emotion", "Sentiment", "Dialogue_ID", "Utterance_ID")
        folder = next((x for x in folders if (top / x).is_dir()), folders[0])
        for _, line in records_of(path, named):
            stem = f"dia{line['Dialogue_ID']}_utt{line['Utterance_ID']}"
            row = {"id": f"{split} {stem}", "group": f"{split} dia{line['Dialogue_ID']}"}
            row |= {
                "split": SPLITS[split],
                "text": line["Utterance"],
                "target": line["Emotion"],
            }
            row |= {"sentiment": line["Sentiment"], "speaker": line["Speaker"]}
            rows.append({**row, **extracted(top, f"{split}/{stem}", video=f"{folder}/{stem}.mp4")})
    return with_files(rows, top, "expected the folders train_splits, ... of MELD.Raw.tar.gz")


def ur_funny(top: Path) -> LayoutTable:
    """UR-FUNNY V2: `data_folds.pkl`, `language_sdk.pkl`, `humor_label_sdk.pkl`; the videos.

    A clip is `urfunny2_videos/<id>.mp4`. Nothing in a pickle is run.
    """
    names = ("data_folds", "language_sdk", "humor_label_sdk")
    paths = {name: first_of(top, (f"{name}.pkl",)) for name in names}
    parts = {name: read_pickle(path) for name, path in paths.items()}
    for name, part in parts.items():
        keys = {"train", "dev", "test"} if name == "data_folds" else set()
        if not isinstance(part, dict) or not keys <= set(part):
            raise FusionZooError(f"{paths[name]} holds no dict, or not the splits as its keys")
    folds, language, labels = parts.values()
    rows: list[Row] = []
    for split in ("train", "dev", "test"):
        for key in plain(folds[split]):
            said, label = language.get(key), labels.get(key)
            if not isinstance(said, dict) or label not in (0, 1):
                wrong = paths["humor_label_sdk" if isinstance(said, dict) else "language_sdk"]
                raise FusionZooError(f"{wrong} has nothing for {key!r}, which data_folds.pkl lists")
            row: Row = {"id": str(key), "split": SPLITS[split], "target": f"{int(label)}"}
            row |= {"text": _sentences(said.get("punchline_sentence"))}
            row |= {"context": _sentences(said.get("context_sentences"))}
            rows.append({**row, **extracted(top, f"{key}", video=f"urfunny2_videos/{key}.mp4")})
    read = with_files(rows, top, "expected urfunny2_videos/<id>.mp4", texts=("text", "context"))
    return replace(read, kinds={"context": "text"})


def _sentences(value: Any) -> str | None:
    """Return a sentence, or lists of sentences or words, as one text; None if it is empty."""
    if isinstance(value, str):
        return value.strip() or None
    value = plain(value)
    parts = value if isinstance(value, Iterable) else ()
    return " ".join(text for part in parts if (text := _sentences(part))) or None
