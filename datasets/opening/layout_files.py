"""Files of public data sets: lists, the media that belong to their rows, what is missing."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fusionzoo.errors import FusionZooError, one_line

from ..media.formats import CLIPS, IMAGES

Row = dict[str, Any]
SPLITS = {"train": "train", "dev": "val", "valid": "val", "val": "val", "test": "test"}
AUDIO, FRAMES = ("audio",), ("frames", "image")  # folders of what was extracted from videos


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


def records_of(path: Path, names: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the rows of a CSV file by its header, which has at least these names."""
    rows = cells_of(path)
    _, header = next(rows, (0, []))
    absent = [name for name in names if name not in header]
    if absent:
        raise FusionZooError(
            f"{path} has no column {absent[0]!r}; its header: {', '.join(header) or 'none'}"
        )
    for number, cells in rows:
        if len(cells) != len(header):
            raise FusionZooError(
                f"{path}, row {number}: {len(cells)} cells, but {len(header)} columns"
            )
        yield number, dict(zip(header, cells, strict=True))


def middle_frame(top: Path, folders: Sequence[str], stem: str) -> str | None:
    """Return the middle frame of a clip, from a folder of its frames, or a single image."""
    for folder in folders:
        below = top / folder / stem
        files = below.iterdir() if below.is_dir() else ()
        frames = sorted(x for x in files if x.suffix.lower() in IMAGES)
        if frames:
            return frames[len(frames) // 2].relative_to(top).as_posix()
        for suffix in (".jpg", ".png"):
            if (top / folder / f"{stem}{suffix}").is_file():
                return f"{folder}/{stem}{suffix}"
    return None


def extracted(
    top: Path,
    stem: str,
    *,
    audio: Sequence[str] = AUDIO,
    frames: Sequence[str] = FRAMES,
    video: str = "",
) -> dict[str, str | None]:
    """Return the audio and the frame that were extracted from a video, from these folders.

    What nobody extracted is read from the file `video`, if it exists; else it is None.
    """
    clips = (f"{folder}/{stem}{suffix}" for folder in audio for suffix in sorted(CLIPS))
    clip = next((name for name in clips if (top / name).is_file()), None)
    whole = video if video and (top / video).is_file() else None
    return {"audio": clip or whole, "image": middle_frame(top, frames, stem) or whole}


@dataclass(frozen=True, kw_only=True)
class LayoutTable:
    """The samples of a layout."""

    rows: list[Row]
    kinds: Mapping[str, str] = field(default_factory=dict)  # of modalities with other names
    notes: Sequence[str] = ()  # what was left out, for the data summary
    missing: Sequence[str] = ()  # ids in the lists of which there is no picture or clip


def with_files(
    rows: list[Row], top: Path, advice: str, *, texts: Sequence[str] = ("text",)
) -> LayoutTable:
    """Return the rows of which there is a clip, a picture or a text; many videos are offline.

    `texts` names the texts that a row without its files is kept for. A data set without any of its
    files is an error that ends in `advice`.
    """
    missing = [row["id"] for row in rows if not (row.get("audio") or row.get("image"))]
    if len(missing) == len(rows):
        raise FusionZooError(
            f"{top} has none of the files of the {len(rows):,} rows listed: {advice}"
        )
    kept = [row for row in rows if any(row.get(key) for key in ("audio", "image", *texts))]
    return LayoutTable(rows=kept, missing=missing)


def existing(top: Path, name: str) -> str | None:
    """Return the name of a file if it exists."""
    return name if (top / name).is_file() else None
