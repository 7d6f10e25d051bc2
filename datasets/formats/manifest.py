"""A table with one row per sample: CSV, TSV, JSON lines, Parquet, a spreadsheet, or in memory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from ..amputation import Mechanism
from ..base import DATASETS, apply_shared_settings
from ..failures import MAX_ERRORS, OnError
from ..join_rows import How
from ..paired import PairedDataset
from ..shards.open import open_shards
from ..splits import SHARES
from ..table import word_list
from .cells import NA, CellRules, Words
from .files import TextFormat, read_table, table_suffix
from .joined import join_sources
from .loaded import Loaded
from .objects import STREAM_LIMIT, read_objects
from .tables import open_table


@DATASETS.register("manifest", family="format")
def manifest(
    *,
    root: Any = "",
    columns: Mapping[str, str | Sequence[str]] | None = None,
    kinds: Mapping[str, str] | None = None,
    shares: Sequence[float] = SHARES,
    on_error: OnError = "raise",
    max_errors: float = MAX_ERRORS,
    modalities: str | Sequence[str] | None = None,
    missing: float = 0.0,
    missing_mechanism: Mechanism = "mcar",
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
    may be compressed (`.csv.gz`). A cell of pictures or clips may be a list, or a pattern such as
    `frames/7/*.jpg`; `image` and `audio` may name the same video. Columns `start` and `end`, or
    `audio_start`, `image_end` and so on, are the seconds that are used of it.

    Settings:
        root: path of the file, or path or URL (`s3://...`) of a folder of shards, Parquet or tar
            files; in Python also a table in memory
        columns: columns with other names, by modality or role: `{"xray": "file_2", "id": "key"}`;
            those of a tabular modality, `{"tabular": "age,weight,colour"}`
        kinds: kinds of modalities with other names, `{"xray": "image"}`
        shares: of train, val and test in splits by hash
        on_error: `raise` on a value that cannot be read, treat it as `missing` or `skip` its sample
        max_errors: share of a modality's values that may fail before the run ends, 0 to 1
        modalities: names of those to keep, comma-separated or a list
        missing: share of each modality's values to remove, at least 0 and below 1
        missing_mechanism: `mcar` removes values at random, `mar` depending on the label, `mnar` on
            the value itself (length, brightness, loudness)
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
        frames: pictures taken of a video, uniformly spaced; null takes 8; a number holds for the
            pictures that a pattern matches, too, of which null takes all
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
        on_error=on_error,
        max_errors=max_errors,
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
            manifest,
            shares=shares,
            on_error=on_error,
            max_errors=max_errors,
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
    return apply_shared_settings(dataset, modalities, missing, missing_mechanism)


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
