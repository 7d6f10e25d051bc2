"""Open one's own data: a table with one row per sample, joined sources, class folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from fusionzoo.errors import FusionZooError
from fusionzoo.targets import label_word

from ..base import DATASETS, DEFAULTS, SharedSettings
from ..join import join_arguments
from ..media.formats import SUFFIXES
from ..paired import PairedDataset
from ..sources.open_table import open_table
from ..sources.table_settings import TableSettings
from ..tables.paths import part_of_join, refuse
from ..tables.provenance import LoadedTable, Provenance
from ..tables.splits import SHARES, SPLITS, make_splits
from .load import load_table

MAIN = "root"  # the name of the manifest itself among the sources
KINDS = ("image", "text", "audio")


def _open_joined(
    loaded: LoadedTable, settings: TableSettings, shared: SharedSettings
) -> PairedDataset:
    """Join the table with the sources in `settings.join`; a source's only modality has its name."""
    # Labels are read, and samples without any modality left out, after the join.
    of_main = replace(settings, targets={}, drop_empty=False)
    with part_of_join(settings.targets):
        main = open_table(loaded, of_main, shared)
        sources = {MAIN: main}
        for name, source in (settings.join or {}).items():
            if name == MAIN or name in main.modalities:
                raise FusionZooError(f"--data.join.{name}: the manifest itself has {name!r}")
            sources[name] = _open_source(name, source, settings, shared)
    names: dict[str, Mapping[str, str]] = {MAIN: {x: x for x in main.modalities}}
    for name in settings.join or {}:
        names[name] = _names(name, sources[name], {x for by in names.values() for x in by})
    labels = [name for name in settings.targets or () if name != "target"]
    joined = join_arguments(sources, settings.how, settings.on, names, labels, settings.drop_empty)
    return PairedDataset(**{**joined, "targets": settings.targets})


def _names(name: str, source: PairedDataset, taken: set[str]) -> Mapping[str, str]:
    if name in source.modalities:
        return {name: name}
    if len(source.modalities) == 1:
        return {name: next(iter(source.modalities))}
    return {f"{name}_{x}" if x in taken else x: x for x in source.modalities}


def _open_source(
    name: str, source: Any, settings: TableSettings, shared: SharedSettings
) -> PairedDataset:
    if isinstance(source, PairedDataset):
        return source
    if not isinstance(source, Mapping):
        source = {"root": source}
    if isinstance(source.get("root", ""), str) and not source.get("root"):
        raise FusionZooError(f"--data.join.{name} names no file: --data.join.{name}.root names it")
    defaults: dict[str, Any] = {
        "shares": settings.shares,
        "on_error": shared.on_error,
        "max_errors": shared.max_errors,
        "targets": {},
        "allow_outside": settings.allow_outside,
    }
    return DATASETS.create("manifest", **{**defaults, **source})


@DATASETS.register("manifest", family="format")
def manifest(settings: TableSettings, *, shared: SharedSettings = DEFAULTS) -> PairedDataset:
    """Open your own table, a row per sample: CSV, JSONL, Parquet, .xlsx, .mat, or in memory.

    Columns `image`, `text`, `audio`, `vector`, `sequence` are modalities; an empty cell is missing.
    If absent, `id` is the row's number from 0, `split` a hash of the id that leaves no split
    without a class, and no `target` is known. Text is in its cell, vectors and sequences are lists,
    or parts of arrays such as `feats.npy[17]`, `feats.npz::key` or `feats.h5::group/key[2:40]`;
    paths are relative to the file. In Parquet, media may be bytes or `{bytes, path}`. Text files
    may be compressed (`.csv.gz`). A cell of images or clips may be a list, or a pattern such as
    `frames/7/*.jpg`; `image` and `audio` may name the same video. Columns `start` and `end`, or
    `audio_start`, `image_end` and so on, are the seconds that are used of it.
    """
    loaded = load_table(settings)
    open_loaded = _open_joined if settings.join else open_table
    dataset = open_loaded(loaded, settings, shared)
    del loaded
    pa.default_memory_pool().release_unused()  # reading takes several times the table's memory
    return dataset


@DATASETS.register("folders", family="format")
def folders(
    *,
    root: str = "",
    shares: Sequence[float] = SHARES,
    shared: SharedSettings = DEFAULTS,
    allow_outside: bool = False,
) -> PairedDataset:
    """Open files in class folders: `root/[split/]class/id.png|jpg|txt|wav|flac|ogg|mp3`.

    Files that share folder and stem are one sample: `cat/7.jpg`, `cat/7.txt` and `cat/7.wav`.
    Hidden files and folders are ignored.

    Settings:
        root: the top folder
        shares: of train, val and test, if there are no folders of these names; a hash of the id
            assigns the split, and leaves none without a class where it can
        allow_outside: whether links may lead to files outside of `root`
    """
    top = Path(root).expanduser()
    if not root or not top.is_dir():
        raise FusionZooError(f"no folder {root!r}: --data.root names it")
    has_splits = any((top / split).is_dir() for split in SPLITS)
    rows = _find_samples(top, has_splits)
    kinds = [kind for kind in KINDS if any(kind in row for row in rows)]
    columns = {name: [row.get(name) for row in rows] for name in ("id", "split", "target", *kinds)}
    table = pa.table({name: pa.array(values, pa.string()) for name, values in columns.items()})
    rule = "the folders"
    if not has_splits:
        by_hash = make_splits(table["id"], [table["target"]], shares)
        table = table.set_column(1, "split", by_hash.splits)
        rule = f"by a hash of folder and stem{by_hash.rule}"
    return PairedDataset(
        table,
        {kind: kind for kind in kinds},
        root=top,
        source=str(top),
        on_error=shared.on_error,
        paths=kinds,
        allow_outside=allow_outside,
        provenance=Provenance(split_rule=rule, split_shares=None if has_splits else tuple(shares)),
        max_errors=shared.max_errors,
    )


def _find_samples(top: Path, has_splits: bool) -> list[dict[str, str]]:
    """Return id, target, files by kind of modality and, if folders are splits, split of samples."""
    kind_of = {suffix: kind for kind in KINDS for suffix in SUFFIXES[kind]}
    rows: dict[str, dict[str, str]] = {}
    for path in sorted(top.rglob("*")):
        kind, parts = kind_of.get(path.suffix.lower()), path.relative_to(top).parts
        hidden = any(part.startswith(".") for part in parts)
        if kind is None or hidden or not path.is_file():
            continue
        if len(parts) != 2 + has_splits:
            expected = f"expected {'split/' if has_splits else ''}class/file below {top}"
            refuse(f"{path}: {expected}", "file")
            continue
        key = "/".join((*parts[:-1], path.stem))
        row = rows.setdefault(key, {"id": key, "target": label_word(parts[-2])})
        if has_splits:
            row["split"] = parts[0]
        if kind in row:
            refuse(f"{path}: sample {key!r} has another {kind}, {row[kind]}", "file")
            continue
        row[kind] = str(path.relative_to(top))
    if not rows:
        raise FusionZooError(f"{top} has no image, text or audio file in class folders")
    return list(rows.values())
