"""Checks of single values: refused rows, unreadable, silent, blank, near-empty, damaged text."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fusionzoo.datasets.arrays import file_of
from fusionzoo.datasets.media import SUFFIXES
from fusionzoo.datasets.paths import paths_in

from .findings import Finding, by_share, counted, singles
from .scan import Scan, Values

SILENT = 1e-3  # of full scale, -60 dB: the peak below which a clip is silent
BLANK = 1.0  # grey levels of 255: standard deviation of the pixels of a blank picture
FEW_LETTERS = 2  # a text with fewer is nearly empty, where others have words
USUAL_WORDS = 3  # median length from which texts count as such others
MAX_FILES = 1_000_000  # below the folder, when looking for files that no row names
MAX_LISTED = 1000  # names of files in a finding

REFUSALS = {  # kind of refusal -> what it is, what to do
    "duplicate_id": ("row with the id of another", "give every row an id of its own"),
    "empty_id": ("row without an id", "fill the id, or remove the column: rows are then numbered"),
    "empty_sample": ("row without a value in any modality", "remove these rows"),
    "path": ("cell with a path that may not be read", "move the files into the folder"),
    "split": ("row without a split", "complete the column"),
    "column": ("column with the name of another", "the first of them is used here"),
    "file": ("file that does not fit into the folder's layout", "move or remove these files"),
}


def refused(scan: Scan) -> Iterator[Finding]:
    """Everything for which opening the data set raises an error; one finding per kind, column."""
    keys = dict.fromkeys((x.kind, x.column) for x in scan.refusals)
    for kind, column in keys:
        refusals = [x for x in scan.refusals if (x.kind, x.column) == (kind, column)]
        noun, advice = REFUSALS[kind]
        details = {x.row: x.message for x in refusals if x.row is not None}
        yield Finding(
            check=kind,
            severity="error",
            modality=column,
            message=f"{_first_plural(len(refusals), noun)}: {refusals[0].message}",
            advice=advice,
            groups=singles(details),
            details=details,
            files=tuple(x.message for x in refusals if x.row is None)[:MAX_LISTED],
        )


def _first_plural(count: int, noun: str) -> str:
    """Write a number with a noun whose first word has a plural."""
    first, _, rest = noun.partition(" ")
    return f"{counted(count, first)} {rest}"


def unreadable(scan: Scan) -> Iterator[Finding]:
    """Values that cannot be decoded."""
    for values in scan.values.values():
        if values.errors:
            yield Finding(
                check="unreadable",
                severity="error",
                modality=values.name,
                message=f"{len(values.errors):,} of {counted(values.total, 'value')} cannot be"
                f" decoded: {next(iter(values.errors.values()))}",
                advice="mend the files; --data.on_error missing or skip trains without them",
                groups=singles(values.errors),
                details=values.errors,
            )


def silent(scan: Scan) -> Iterator[Finding]:
    """Clips without sound; a constant offset is no sound."""
    for values in _of_kind(scan, "audio"):
        chosen = values.numbers["peak"] < SILENT
        yield from _few(values, chosen, "silent", "clips are silent (peak below -60 dB)")


def blank(scan: Scan) -> Iterator[Finding]:
    """Pictures of one colour; vectors and sequences of one number."""
    for values in scan.values.values():
        if values.kind in ("text", "audio") or "spread" not in values.numbers:
            continue
        is_image = values.kind == "image"
        chosen = values.numbers["spread"] <= (BLANK if is_image else 0.0)
        if not is_image:  # a single entry is always constant
            chosen &= values.numbers["length"] * values.numbers["dim"] > 1
        noun = "pictures are of one colour" if is_image else "values are constant"
        yield from _few(values, chosen, "blank", noun)


def _few(values: Values, chosen: np.ndarray, name: str, noun: str) -> Iterator[Finding]:
    rows = values.rows[chosen]
    if len(rows):
        yield Finding(
            check=name,
            severity=by_share(len(rows), values.total),
            modality=values.name,
            message=f"{len(rows):,} of {values.total:,} {noun}",
            advice="empty these cells: a fusion handles a missing value, not an empty one",
            groups=singles(rows),
        )


def near_empty_text(scan: Scan) -> Iterator[Finding]:
    """Texts without letters and digits, or with a single one where others have words."""
    for values in _of_kind(scan, "text"):
        letters, usual = values.numbers["letters"], np.median(values.numbers["words"])
        chosen = letters < (FEW_LETTERS if usual >= USUAL_WORDS else 1)
        # A letter of a script without an alphabet may be a word.
        chosen &= np.array([text.isascii() or n == 0 for text, n in _texts(values, letters)])
        rows = values.rows[chosen]
        if len(rows):
            texts = [
                text for text, is_chosen in zip(values.texts, chosen, strict=True) if is_chosen
            ]
            yield Finding(
                check="near_empty_text",
                severity="warning",
                modality=values.name,
                message=f"{len(rows):,} of {counted(values.total, 'text')} have almost no letters",
                advice="empty these cells, so that the text counts as missing",
                groups=singles(rows),
                details=dict(zip(rows.tolist(), map(repr, texts), strict=True)),
            )


def _texts(values: Values, numbers: np.ndarray) -> Iterator[tuple[str, float]]:
    return zip(values.texts, numbers, strict=True)


# Characters that the bytes 80 to FF of UTF-8 become when read as Latin-1 or cp1252.
HIGH = "\u0080-\u00ff" + "".join(
    bytes([byte]).decode("cp1252", "ignore") for byte in range(0x80, 0xA0)
)
RUN = re.compile(f"[{HIGH}]{{2,}}")
REPLACEMENT = "\ufffd"


def encoding_damage(scan: Scan) -> Iterator[Finding]:
    """Replacement characters, control characters, and UTF-8 read in another encoding (`Ã©`)."""
    for values in _of_kind(scan, "text"):
        damage = {
            int(row): problem
            for row, text in zip(values.rows, values.texts, strict=True)
            if (problem := damaged_text(text))
        }
        if damage:
            yield Finding(
                check="encoding_damage",
                severity=by_share(len(damage), values.total),
                modality=values.name,
                message=f"{len(damage):,} of {counted(values.total, 'text')} look damaged by a"
                f" wrong encoding: {next(iter(damage.values()))}",
                advice="export the file again as UTF-8, or name its encoding (--data.encoding)",
                groups=singles(damage),
                details=damage,
            )


def damaged_text(text: str) -> str:
    """Return what is wrong with the characters of a text, or an empty string.

    >>> damaged_text("cafÃ© noir"), damaged_text("café «noir»")
    ("'Ã©' stands for 'é'", '')
    """
    if text.isascii():
        control = re.search(r"[\x00-\x08\x0b\x0e-\x1f\x7f]", text)
        return f"the control character {control[0]!r}" if control else ""
    if REPLACEMENT in text:
        return f"the replacement character {REPLACEMENT!r}"
    for run in RUN.findall(text):
        for start in range(len(run) - 1):
            for end in range(min(len(run), start + 4), start + 1, -1):
                intended = _intended(run[start:end])
                if intended:
                    return f"{run[start:end]!r} stands for {intended!r}"
    control = re.search(r"[\x00-\x08\x0b\x0e-\x1f\x7f-\x84\x86-\x9f]", text)
    return f"the control character {control[0]!r}" if control else ""


def _intended(run: str) -> str:
    """Return the character that a run of two to four is when read as UTF-8, or nothing."""
    for encoding in ("cp1252", "latin-1"):
        try:
            character = run.encode(encoding).decode("utf-8")
        except UnicodeError:
            continue
        # Phonetic letters and accents of their own are what `É»` in `CAFÉ»` would become.
        is_usual = not "\u0250" <= character[:1] <= "\u036f"
        if len(character) == 1 and is_usual and unicodedata.category(character) != "Cn":
            return character
    return ""


def orphan_files(scan: Scan) -> Iterator[Finding]:
    """Media files below the folder that no row names."""
    dataset = scan.dataset
    names = [name for name in dataset.paths if name not in dataset.memory]
    if not scan.files_are_listed or dataset.root is None or not names:
        return
    suffixes = {x for name in names for x in SUFFIXES.get(dataset.modalities.get(name, ""), ())}
    top = os.path.realpath(dataset.root)
    named = {os.path.realpath(scan.manifest)} if scan.manifest else set()
    for name in names:
        if name in dataset.table.column_names:
            files_of_cells = {file_of(path) for _, path in paths_in(dataset.table[name])}
            named |= {os.path.normpath(os.path.join(top, path)) for path in files_of_cells}
    files: list[str] = []
    for number, path in enumerate(_files(top)):
        if number >= MAX_FILES:
            break
        if os.path.splitext(path)[1].lower() in suffixes and path not in named:
            files.append(os.path.relpath(path, top))
    if files:
        yield Finding(
            check="orphan_files",
            severity="warning",
            message=f"no row names {len(files):,} of the media files below {dataset.root}:"
            f" {', '.join(sorted(files)[:3])}{', ...' if len(files) > 3 else ''}",
            advice="add rows for them, or move them elsewhere",
            files=tuple(sorted(files)[:MAX_LISTED]),
        )


def _files(top: str) -> Iterator[str]:
    """Yield the files below a folder, hidden ones left out."""
    for folder, folders, files in os.walk(top):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if not name.startswith("."):
                yield str(Path(folder) / name)


def _of_kind(scan: Scan, kind: str) -> Iterator[Values]:
    return (values for values in scan.values.values() if values.kind == kind and len(values.rows))
