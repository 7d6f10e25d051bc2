"""The name of the data, as the title and the heading of the report show it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

FORMATS = ("manifest", "folders")  # data sets that are named by their path
# File names that say nothing; the folder's name does.
GENERIC = re.compile(r"(data|dataset|manifest|index|metadata|samples|table|all|train)$", re.I)
STORED = re.compile(r"data-[0-9a-f]{12}\.parquet$")  # a table in memory, written to the cache
IN_MEMORY = "a table in memory"


def data_title(settings: Mapping[str, Any]) -> str:
    """Name a data set by its settings: a manifest or folder by its path, others by their name.

    >>> data_title({"name": "manifest", "root": "/data/products/manifest.csv"})
    'products'
    >>> data_title({"name": "interactions", "task": "xor", "samples": 600})
    'interactions (xor)'
    """
    name, root = str(settings["name"]), settings.get("root")
    if name in FORMATS and isinstance(root, str) and root:
        return _path_title(root)
    if "/" in name:  # the source of a data set that was passed as an object
        return _path_title(name)
    return f"{name} ({settings['task']})" if "task" in settings else name


def _path_title(path: str) -> str:
    if STORED.search(path):
        return IN_MEMORY
    place = PurePath(path)
    if GENERIC.match(place.stem) and place.parent.name:
        return place.parent.name
    return place.stem if place.suffix else place.name
