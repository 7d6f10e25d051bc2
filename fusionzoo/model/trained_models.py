"""Trained models of the zoo: an index, folders of the package, files of a release.

`make docs` writes models.json from the folders; a test holds it to them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fusionzoo.errors import FusionZooError
from fusionzoo.files import cache_root, sha256_of
from fusionzoo.ground.version import __version__

ZOO = Path(__file__).parents[1] / "zoo"
INDEX = ZOO / "models.json"
FOLDERS = ZOO / "trained-models"  # a wheel holds digits-gmu alone


def trained_models() -> dict[str, dict[str, Any]]:
    """Return what models.json says of each: data, size, digest, what it reached on its test split.

    `digest` is the SHA-256 of the folder's digests.json, which has those of its files.
    """
    index: dict[str, dict[str, Any]] = json.loads(INDEX.read_text(encoding="utf-8"))
    return index


def list_models() -> list[str]:
    """Return the names of the zoo's trained models, for `load`."""
    return sorted(trained_models())


def find_trained(name: str) -> Path:
    """Return the folder of one of `list_models()`, of the package or the cache.

    Raises an error that says which file of the release to put where, and one for a folder in the
    cache that holds another model than the index says.
    """
    if (FOLDERS / name).is_dir():
        return FOLDERS / name
    parent = cache_root() / "models"
    unzip = f"`python -m zipfile -e {name}.zip {parent}` makes it load by its name"
    if not (parent / name).is_dir():
        raise FusionZooError(f"{name!r} is a file of release {__version__}, {name}.zip: {unzip}")
    if digest_of(parent / name) != trained_models()[name]["digest"]:
        raise FusionZooError(
            f"{parent / name} is not the model of fusionzoo {__version__}: delete it; of the file"
            f" of that release, {unzip}"
        )
    return parent / name


def digest_of(folder: Path) -> str:
    """Return the SHA-256 of a model folder's digests.json; empty: it has none."""
    path = folder / "digests.json"
    return sha256_of(path) if path.is_file() else ""
