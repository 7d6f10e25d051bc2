"""Read the files of public data sets: lists, tables without a header, extracted media."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fusionzoo.errors import FusionZooError, one_line

from ..media import CLIPS, IMAGES


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
    """Return the middle frame of a clip, from a folder of its frames, or a single picture."""
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
    """Return the sound and the frame that were extracted from a video; None where they were not."""
    clips = (f"audio/{stem}{suffix}" for suffix in sorted(CLIPS))
    clip = next((name for name in clips if (top / name).is_file()), None)
    return {"audio": clip, "image": middle_frame(top, ("frames", "image"), stem)}
