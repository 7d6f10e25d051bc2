"""What names a data set: a name, settings, a path, a table in memory, a data set."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from fusionzoo.errors import FusionZooError, check_known, did_you_mean

from ..shards.storage import is_url
from ..sources.array_files import is_view_folder
from ..sources.cell_kinds import NONE
from ..sources.table_files import can_read

if TYPE_CHECKING:
    from ..paired import PairedDataset

TABLE = "manifest"
IN_MEMORY = "in_memory"  # what config.yaml records of a PairedDataset, which cannot be opened again
OPEN_SETTINGS = ("modalities", "missing", "targets")  # of a data set that is open
FORMATS = ("manifest", "folders")  # data sets that are named by their path
# File names that say nothing; the folder's name does.
GENERIC = re.compile(r"(data|dataset|manifest|index|metadata|samples|table|all|train)$", re.I)
STORED = re.compile(r"data-[0-9a-f]{12}\.parquet$")  # a table in memory, written to the cache
UNNAMED = "a table in memory"


def settings_of(data: Any) -> dict[str, Any]:
    """Return the name and settings with which `create_dataset` opens what `data` is.

    - `"digits"`: a data set's name; `{"name": "digits", "missing": 0.3}`: with settings;
    - the path of a CSV, TSV, JSON lines, Parquet, .xlsx, .ods, .mat or .npz file, of a folder of
      shards (Parquet or tar files) or of class folders; the URL of such shards, `s3://bucket/x`;
    - a table or data set in memory: settings whose `root` is that object.
    """
    if isinstance(data, str) and is_name(data):
        return {"name": data}
    if not isinstance(data, str | os.PathLike):
        from ..sources.in_memory import is_table

        if is_table(data):
            return {"name": "manifest", "root": data}
    if isinstance(data, Mapping):
        return dict(data)
    if not isinstance(data, str | os.PathLike):
        kind = type(data).__name__
        raise FusionZooError(f"data is of type {kind}, and no name, path, settings or table")
    if is_url(data):
        return {"name": "manifest", "root": data}
    path = Path(data).expanduser()
    if path.is_dir():
        from ..shards.read import is_sharded

        as_table = is_sharded(path) or is_view_folder(path)
        return {"name": "manifest" if as_table else "folders", "root": str(path)}
    if path.exists() or can_read(path) or isinstance(data, os.PathLike):
        return {"name": "manifest", "root": str(path)}
    from ..base import DATASETS

    raise FusionZooError(
        f"data={data!r} is neither a file, nor a folder, nor the name of a data set."
        f"{did_you_mean(data, DATASETS)} Data sets: {', '.join(sorted(DATASETS))}"
    )


def resolve_name(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings whose name is that of a data set, where it may be a path: `my.csv`."""
    chosen = dict(settings)
    if "group" in chosen:
        chosen["group_column"] = chosen.pop("group")
    if chosen.get("group_column") == NONE:
        chosen["group_column"] = "id"
    if chosen.get("weight_column") == NONE:
        chosen["weight_column"] = None
    name = chosen.pop("name", None)
    root = chosen.get("root")
    if name is None and root is None:
        raise FusionZooError("settings of a data set need its name: {'name': 'digits'}")
    is_open = not isinstance(root, str | None)
    if isinstance(name, str) and (name == TABLE or is_open or is_name(name)):
        return {"name": name, **chosen}
    return {**settings_of(root if name is None else name), **chosen}


def is_name(text: str) -> bool:
    """Whether text is the name of a data set: no URL or file of a table, which need no look."""
    if is_url(text) or can_read(Path(text)):
        return False
    from ..base import DATASETS

    return text in DATASETS


def view_of(dataset: PairedDataset, settings: Mapping[str, Any]) -> PairedDataset:
    """Apply the settings that an open data set takes: modalities, missing, targets."""
    for name in settings:
        problem = f"{dataset.source} is open already, and takes no setting {name!r}"
        check_known(name, OPEN_SETTINGS, problem)
    from ..base import SharedSettings

    targets = settings.get("targets")
    view = dataset if targets is None else dataset.with_targets(targets)
    shared = {name: settings[name] for name in settings if name != "targets"}
    return SharedSettings(**shared).view(view)


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


def folder_name(settings: Mapping[str, Any]) -> str:
    """Return the name of a run's folder: a file's own name, else the data set's.

    >>> folder_name({"name": "manifest", "root": "/data/my table.csv"})
    'my-table'
    """
    if settings["name"] not in FORMATS:
        return str(settings["name"])
    title = data_title(settings)
    return "table" if title == UNNAMED else title.replace(" ", "-")


def _path_title(path: str) -> str:
    if STORED.search(path):
        return UNNAMED
    place = PurePath(path)
    if GENERIC.match(place.stem) and place.parent.name:
        return place.parent.name
    return place.stem if place.suffix else place.name
