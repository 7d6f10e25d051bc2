"""Digests of a model folder's files: written when it is saved, checked when it is loaded.

They find files that were changed, mixed up or copied in part; they prove no author.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from .errors import FusionZooError, one_line
from .files import write_json

NAME = "digests.json"
ALGORITHM = "sha256"
REQUIRED = ("config.json", "model.safetensors")  # files of every model folder
OPTIONAL = ("trained_on.safetensors",)
_log = logging.getLogger("fusionzoo")


def write_digests(folder: Path, files: list[Path]) -> None:
    """Write the digests of a folder's `files`."""
    digests = {path.relative_to(folder).as_posix(): _digest(path) for path in sorted(files)}
    write_json(folder / NAME, {"algorithm": ALGORITHM, "files": digests})


def check_digests(folder: Path, modalities: list[str]) -> None:
    """Raise an error that names a file which was changed, removed or added since it was saved.

    Files may be added at the top, such as a README, but not in the folders of `modalities`, whose
    files encoders read. A folder of an earlier version has no digests, which is logged.
    """
    path = folder / NAME
    if not path.is_file():
        _log.warning(
            "%s has no %s (saved by an earlier version): whether its files were changed is not"
            " checked",
            *(folder, NAME),
        )
        return
    digests = _read(path)
    for name in REQUIRED:
        if name not in digests:
            raise FusionZooError(
                f"{path} has no digest of {name}: copy the folder again, or remove {path} if you"
                " changed it yourself"
            )
    for name, digest in digests.items():
        file = folder / name
        if not file.is_file():
            raise FusionZooError(f"{file} is missing: {path} lists it; copy the whole folder again")
        if _digest(file) != digest:
            raise FusionZooError(
                f"{file} was changed since the model was saved: copy the folder again, or remove"
                f" {path} if you changed it yourself"
            )
    for file in _files_below(folder, modalities):
        if file.relative_to(folder).as_posix() not in digests:
            raise FusionZooError(
                f"{file} was added since the model was saved: remove it, or remove {path} if you"
                " added it yourself"
            )


def _files_below(folder: Path, modalities: list[str]) -> list[Path]:
    return [
        path
        for name in modalities
        for path in sorted((folder / name).rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    ]


def files_of_model(folder: Path, modalities: list[str]) -> list[Path]:
    """Return the files of a model folder of which digests are written."""
    optional = [path for path in (folder / name for name in OPTIONAL) if path.is_file()]
    return [*(folder / name for name in REQUIRED), *optional, *_files_below(folder, modalities)]


def _read(path: Path) -> dict[str, str]:
    """Read the digests; each name must lead to a file below the folder."""
    try:
        contents: Any = json.loads(path.read_text(encoding="utf-8"))
        files = contents["files"]
        if contents["algorithm"] != ALGORITHM:
            raise ValueError(f"algorithm {contents['algorithm']!r}; {ALGORITHM} is known")
        if not all(isinstance(digest, str) and _is_below(name) for name, digest in files.items()):
            raise ValueError("it must map the names of files in the folder to digests")
        return dict(files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FusionZooError(f"{path} cannot be read: {one_line(error)}") from None


def _is_below(name: str) -> bool:
    """Return whether a name leads down from a folder.

    >>> _is_below("text/tokenizer.json"), _is_below("../secret"), _is_below("/etc/passwd")
    (True, False, False)
    """
    return "\0" not in name and not Path(name).is_absolute() and ".." not in Path(name).parts


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, ALGORITHM).hexdigest()
