"""Open one's own data: a table with one row per sample, joined sources, class folders."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from fusionzoo.errors import FusionZooError

from .base import DATASETS, DEFAULTS, SharedSettings
from .join import How, join_arguments
from .media import SUFFIXES
from .paired import PairedDataset
from .paths import part_of_join, refuse
from .provenance import Loaded, Provenance
from .shards.read import open_shards
from .sources.columns import NA, CellRules, Words
from .sources.in_memory import STREAM_LIMIT, read_objects
from .sources.open_table import open_table
from .sources.table_files import TextFormat, read_table, table_suffix
from .splits import SHARES, SPLITS, make_splits
from .table import word_list

MAIN = "root"  # the name of the manifest itself among the sources


def join_sources(
    open_root: Callable[[], PairedDataset],
    join: Mapping[str, Any],
    open_source: Callable[..., PairedDataset],
    *,
    on: str | Mapping[str, str],
    how: How,
    targets: Mapping[str, str] | None,
    drop_empty: bool,
) -> PairedDataset:
    """Join the root with the sources in `join`: paths, settings of a manifest, tables or data sets.

    The modalities of the root keep their names; a source's only modality gets the source's name.
    """
    with part_of_join(targets):
        main = open_root()
        sources = {MAIN: main}
        for name, source in join.items():
            if name == MAIN or name in main.modalities:
                raise FusionZooError(
                    f"--data.join.{name}: the manifest itself has {name!r}: give the source another"
                    " name, or leave that column out with --data.modalities of its own"
                )
            sources[name] = _open(name, source, open_source)
    names: dict[str, Mapping[str, str]] = {MAIN: {x: x for x in main.modalities}}
    for name in join:
        names[name] = _names(name, sources[name], {x for by in names.values() for x in by})
    labels = [name for name in targets or () if name != "target"]
    joined = join_arguments(sources, how, on, names, labels, drop_empty)
    return PairedDataset(**{**joined, "targets": targets})


def _names(name: str, source: PairedDataset, taken: set[str]) -> Mapping[str, str]:
    if name in source.modalities:
        return {name: name}
    if len(source.modalities) == 1:
        return {name: next(iter(source.modalities))}
    return {f"{name}_{x}" if x in taken else x: x for x in source.modalities}


def _open(name: str, source: Any, open_source: Callable[..., PairedDataset]) -> PairedDataset:
    if isinstance(source, PairedDataset):
        return source
    if not isinstance(source, Mapping):
        source = {"root": source}
    if not isinstance(source.get("root", ""), str) or source.get("root"):
        return open_source(**source)
    raise FusionZooError(f"--data.join.{name} names no file: --data.join.{name}.root names it")


@DATASETS.register("manifest", family="format")
def manifest(
    *,
    root: Any = "",
    columns: Mapping[str, str | Sequence[str]] | None = None,
    kinds: Mapping[str, str] | None = None,
    shares: Sequence[float] = SHARES,
    shared: SharedSettings = DEFAULTS,
    targets: Mapping[str, str] | None = None,
    paths: str | Sequence[str] = (),
    allow_outside: bool = False,
    group_column: str | None = None,
    delimiter: str | None = None,
    encoding: str | None = None,
    sheet: str = "",
    decimal: str = ".",
    na: Words | None = None,
    drop_empty: bool = False,
    label_separator: str = ";",
    fields: str | Sequence[str] = (),
    stream_limit: int = STREAM_LIMIT,
    join: Mapping[str, Any] | None = None,
    on: str | Mapping[str, str] = "id",
    how: How = "inner",
    categorical: str | Sequence[str] = (),
    arrays: Mapping[str, str | Sequence[str]] | None = None,
    sample_rate: int | None = None,
    frames: int | None = None,
) -> PairedDataset:
    """Open your own table, a row per sample: CSV, TSV, JSONL, Parquet, .xlsx, or in memory.

    Columns `image`, `text`, `audio`, `vector`, `sequence` are modalities; an empty cell is missing.
    If absent, `id` is the row's number from 0, `split` a hash of the id that leaves no split
    without a class, and no `target` is known. Text is in its cell, vectors and sequences are lists,
    or parts of arrays such as `feats.npy[17]`, `feats.npz::key` or `feats.h5::group/key[2:40]`;
    paths are relative to the file. In Parquet, media may be bytes or `{bytes, path}`. Text files
    may be compressed (`.csv.gz`). A cell of images or clips may be a list, or a pattern such as
    `frames/7/*.jpg`; `image` and `audio` may name the same video. Columns `start` and `end`, or
    `audio_start`, `image_end` and so on, are the seconds that are used of it.

    Settings:
        root: path of the file, or path or URL (`s3://...`) of a folder of shards, Parquet or tar
            files; in Python also a table in memory
        columns: columns with other names, by modality or role: `{"xray": "file_2", "id": "key"}`;
            those of a tabular modality, `{"tabular": "age,weight,colour"}`
        kinds: kinds of modalities with other names, `{"xray": "image"}`
        shares: of train, val and test in splits by hash
        targets: label columns and what they hold, `{"age": "regression"}`; train.py sets it
        paths: modalities of text whose cells are paths of files
        allow_outside: whether paths may leave the file's folder, links resolved
        group_column: groups that splits and folds keep together, instead of `group`; `id` for none
        delimiter: character between cells, or `tab`; found from the first rows
        encoding: of a text file; found from its bytes
        sheet: name of a spreadsheet's sheet; the first, which is refused if it is hidden
        decimal: `,` where regression and ordinal targets are written as 25,06
        na: words in cells that mean a missing value, comma-separated or a list;
            null: `NA`, `nan`, `null` and the like in text files and spreadsheets, none elsewhere
        drop_empty: whether rows without any modality are left out, with `join` samples without any
            of all sources; else they are an error
        label_separator: between the labels of a multilabel target
        fields: names of the entries of rows that are tuples, in memory; `_` for one to leave out
        stream_limit: samples of a stream in memory that may be read
        join: further sources, by modality: the path of a manifest, or its settings
        on: column by which joined samples belong together, or a mapping with that of each source
        how: samples that a join keeps: `inner` those of which all sources have a row, `left` those
            of `root`, `outer` all
        categorical: columns of a tabular modality that hold categories though they are numbers
        arrays: files of modalities that are no columns, `{"audio": "feats.npy"}`: a row per sample,
            or by id, `"feats.npy,ids.npy"`, `.npz` or HDF5 with `features` and `ids`, or named ids
        sample_rate: in Hz, of audio in arrays
        frames: images taken of a video, uniformly spaced; null takes 8; a number holds for the
            images that a pattern matches, too, of which null takes all
    """
    names = word_list(fields) if fields else []
    loaded = _load(root, TextFormat(delimiter, encoding, sheet), names, stream_limit)
    words = (() if loaded.has_nulls else NA) if na is None else na
    open_root = partial(
        open_table,
        loaded.table,
        source=loaded.source,
        root=loaded.root,
        loaded=loaded,
        columns=columns,
        kinds=kinds,
        shares=shares,
        on_error=shared.on_error,
        max_errors=shared.max_errors,
        targets={} if join else targets,
        paths=paths,
        allow_outside=allow_outside,
        group_column=group_column,
        categorical=categorical,
        arrays=arrays,
        sample_rate=sample_rate,
        frames=frames,
        cells=CellRules(words, decimal, label_separator, drop_empty and not join),
    )
    if join:
        open_source = partial(
            DATASETS.create,
            "manifest",
            shares=shares,
            on_error=shared.on_error,
            max_errors=shared.max_errors,
            targets={},
            allow_outside=allow_outside,
        )
        dataset = join_sources(
            open_root, join, open_source, on=on, how=how, targets=targets, drop_empty=drop_empty
        )
    else:
        dataset = open_root()
    del loaded
    pa.default_memory_pool().release_unused()  # reading takes several times the table's memory
    return dataset


def _load(root: Any, text_format: TextFormat, fields: Sequence[str], stream_limit: int) -> Loaded:
    """Read what `root` is: a table in memory, shards in a folder or at a URL, or a file."""
    if isinstance(root, Loaded):
        return root
    if not isinstance(root, str | os.PathLike):
        return read_objects(root, fields, stream_limit)
    loaded = open_shards(root)
    if loaded is not None:
        return loaded
    path = Path(root).expanduser()
    table, provenance = read_table(path, text_format)
    return Loaded(
        table=table,
        source=str(path),
        root=path.parent,
        provenance=provenance,
        has_nulls=table_suffix(path) == ".parquet",
    )


KINDS = ("image", "text", "audio")


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
        made = make_splits(table["id"], [table["target"]], shares)
        table = table.set_column(1, "split", made.splits)
        rule = f"by a hash of folder and stem{made.exceptions}"
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
        row = rows.setdefault(key, {"id": key, "target": parts[-2]})
        if has_splits:
            row["split"] = parts[0]
        if kind in row:
            refuse(f"{path}: sample {key!r} has another {kind}, {row[kind]}", "file")
            continue
        row[kind] = str(path.relative_to(top))
    if not rows:
        raise FusionZooError(f"{top} has no image, text or audio file in class folders")
    return list(rows.values())
