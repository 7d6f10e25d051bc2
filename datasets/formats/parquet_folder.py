"""A folder of Parquet files, one or more per split, as Hugging Face's data sets are stored."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from fusionzoo.errors import FusionZooError, one_line

from .loaded import Loaded
from .parquet import read_parquet

SHARD = re.compile(r"(?P<split>.+?)-(?P<number>\d{5})-of-(?P<count>\d{5})(-[0-9a-f]+)?")
NUMBER = re.compile(r"\d+")


def is_parquet_folder(path: Path) -> bool:
    """Whether a path is a folder with Parquet files, in it or in its only folder with some."""
    return path.is_dir() and (bool(_parquet(path)) or bool(_folders_with_parquet(path)))


def read_parquet_folder(path: Path) -> Loaded:
    """Read `train-00000-of-00002.parquet`, `train.parquet` or `train/0000.parquet`.

    The names of the files, or of their folders, are the splits. Files may lie in the folder, or in
    a folder within it such as `data/`.
    """
    parts, names = [], []
    for split, files in files_by_split(path).items():
        for file in files:
            try:
                part = read_parquet(file)
            except (pa.ArrowException, OSError) as error:
                raise FusionZooError(f"{file} cannot be read: {one_line(error)}") from error
            part = part.drop_columns("split") if "split" in part.column_names else part
            parts.append(part)
            names += [split] * len(part)
    try:
        table = pa.concat_tables(parts, promote_options="default")
    except pa.ArrowException as error:
        raise FusionZooError(f"{path}: its files differ in their columns: {error}") from error
    table = table.append_column("split", pa.array(names, pa.string()))
    return Loaded(table=table, source=str(path), root=path, split_rule="the names of the files")


def _top(path: Path) -> Path:
    """Return the folder whose files, or whose folders' files, are the shards."""
    if _parquet(path):
        return path
    folders = _folders_with_parquet(path)
    numbered = [
        folder for folder in folders if all(NUMBER.fullmatch(f.stem) for f in _parquet(folder))
    ]
    if folders and len(numbered) == len(folders):  # train/0000.parquet
        return path
    if len(folders) != 1:
        names = ", ".join(folder.name for folder in folders)
        raise FusionZooError(
            f"{path} has Parquet files in several folders ({names}): --data.root names one of them"
        )
    return folders[0]


def files_by_split(path: Path) -> Mapping[str, Sequence[Path]]:
    """Return the Parquet files of each split, in order."""
    top = _top(path)
    by_split: dict[str, list[Path]] = {}
    for file in _parquet(top):
        shard = SHARD.fullmatch(file.stem)
        by_split.setdefault(shard["split"] if shard else file.stem, []).append(file)
    if not by_split:
        return {folder.name: _parquet(folder) for folder in _folders_with_parquet(top)}
    for split, files in by_split.items():
        shards = [shard for shard in (SHARD.fullmatch(file.stem) for file in files) if shard]
        expected = int(shards[0]["count"]) if shards else len(files)
        if len(files) != expected:
            raise FusionZooError(
                f"{top}: split {split!r} has {len(files)} of {expected} Parquet files"
                f" ({files[0].name} names their number): add the others"
            )
    return by_split


def _folders_with_parquet(path: Path) -> list[Path]:
    if not path.is_dir():
        return []
    folders = (entry for entry in path.iterdir() if not entry.name.startswith("."))
    return sorted(folder for folder in folders if folder.is_dir() and _parquet(folder))


def _parquet(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.parquet"))
