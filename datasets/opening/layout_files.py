"""Files of public data sets: lists, the media that belong to their rows, what is missing."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fusionzoo.errors import FusionZooError, check_known, explained

from ..media.formats import CLIPS, IMAGES

Row = dict[str, Any]
AUDIO, FRAMES = ("audio",), ("frames", "image")  # folders of what was extracted from videos


def first_of(top: Path, names: Sequence[str]) -> Path:
    """Return the first of these files or folders that exists."""
    for name in names:
        if (top / name).exists():
            return top / name
    raise FusionZooError(f"{top} has no {' or '.join(names)}, which the layout needs")


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file that are not empty, with their numbers."""
    with explained(f"{path} cannot be read", OSError, UnicodeDecodeError):
        text = path.read_text(encoding="utf-8-sig")
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield number, line.strip()


def cells_of(path: Path, expected: str = "") -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of a CSV file without a header, with their numbers; `expected` names their
    cells, `id,start,label`."""
    with (
        explained(f"{path} cannot be read", OSError, UnicodeDecodeError, csv.Error),
        path.open(encoding="utf-8-sig", newline="") as file,
    ):
        for number, cells in enumerate(csv.reader(file), start=1):
            if any(cells):
                check_cells(path, number, cells, expected)
                yield number, cells


def check_cells(path: Path, row: int, cells: Sequence[str], expected: str, mark: str = ",") -> None:
    """Raise an error for a row with another number of cells than the words of `expected`."""
    if expected and len(cells) != expected.count(mark) + 1:
        raise FusionZooError(f"{path}, row {row}: expected {expected}, found {len(cells)} cells")


def json_object(text: str, where: str) -> dict[str, Any]:
    """Return what JSON text holds, which must be an object; `where` names it in messages."""
    with explained(f"{where} is no JSON", ValueError):
        value = json.loads(text)
    if not isinstance(value, dict):
        raise FusionZooError(f"{where} is no JSON object")
    return value


def records_of(path: Path, names: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the rows of a CSV file by its header, which has at least these names."""
    rows = cells_of(path)
    _, header = next(rows, (0, []))
    for name in names:
        check_known(name, header, f"{path} has no column {name!r}")
    for number, cells in rows:
        check_cells(path, number, cells, ",".join(header))
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
    """Return the audio and the frame extracted from a video, else the file `video`, else None."""
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
    """Return the rows with a clip, a picture or a text (`texts`); without any file, an error."""
    missing = [row["id"] for row in rows if not (row.get("audio") or row.get("image"))]
    if len(missing) == len(rows):
        raise FusionZooError(f"{top} has no files of its {len(rows):,} rows: {advice}")
    kept = [row for row in rows if any(row.get(key) for key in ("audio", "image", *texts))]
    return LayoutTable(rows=kept, missing=missing)


def existing(top: Path, name: str) -> str | None:
    """Return the name of a file if it exists."""
    return name if (top / name).is_file() else None
