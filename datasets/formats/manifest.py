"""A table with one row per sample: CSV, TSV, JSON lines, Parquet or a spreadsheet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..base import DATASETS, apply_shared_settings
from ..failures import MAX_ERRORS, OnError
from ..paired import PairedDataset
from ..splits import SHARES
from .cells import NA, CellRules, Words
from .files import TextFormat, read_table
from .tables import open_table


@DATASETS.register("manifest", family="format")
def manifest(
    *,
    root: str = "",
    columns: Mapping[str, str] | None = None,
    kinds: Mapping[str, str] | None = None,
    shares: Sequence[float] = SHARES,
    on_error: OnError = "raise",
    max_errors: float = MAX_ERRORS,
    modalities: str | Sequence[str] | None = None,
    missing: float = 0.0,
    targets: Mapping[str, str] | None = None,
    paths: str | Sequence[str] = (),
    allow_outside: bool = False,
    group_column: str | None = None,
    delimiter: str | None = None,
    encoding: str | None = None,
    sheet: str = "",
    decimal: str = ".",
    na: Words = NA,
    drop_empty: bool = False,
    label_separator: str = ";",
) -> PairedDataset:
    """Open your own CSV, TSV, JSONL, Parquet or .xlsx file with one row per sample.

    Columns `image`, `text`, `audio`, `vector`, `sequence` are modalities; an empty cell is missing.
    If absent, `id` is the row's number from 0, `split` a hash of the id that leaves no split
    without a class, and no `target` is known. Text is in its cell, vectors and sequences are lists
    or .npy files; paths are relative to the file. Text files may be compressed (`.csv.gz`).

    Settings:
        root: path of the file
        columns: columns with other names, by modality or role: `{"xray": "file_2", "id": "key"}`
        kinds: kinds of modalities with other names, `{"xray": "image"}`
        shares: of train, val and test in splits by hash
        on_error: `raise` on a value that cannot be read, treat it as `missing` or `skip` its sample
        max_errors: share of a modality's values that may fail before the run ends, 0 to 1
        modalities: names of those to keep, comma-separated or a list
        missing: share of each modality's values to remove at random, at least 0 and below 1
        targets: label columns and what they hold, `{"age": "regression"}`; train.py sets it
        paths: modalities of text whose cells are paths of files
        allow_outside: whether paths may leave the file's folder, links resolved
        group_column: groups that splits and folds keep together, instead of `group`; `id` for none
        delimiter: character between cells, or `tab`; found from the first rows
        encoding: of a text file; found from its bytes
        sheet: name of a spreadsheet's sheet; the first
        decimal: `,` where regression and ordinal targets are written as 25,06
        na: words in cells that mean a missing value, comma-separated or a list
        drop_empty: whether rows without any modality are left out; else they are an error
        label_separator: between the labels of a multilabel target
    """
    path = Path(root).expanduser()
    table, provenance = read_table(path, TextFormat(delimiter, encoding, sheet))
    dataset = open_table(
        table,
        source=str(path),
        root=path.parent,
        columns=columns,
        kinds=kinds,
        shares=shares,
        on_error=on_error,
        max_errors=max_errors,
        targets=targets,
        paths=paths,
        allow_outside=allow_outside,
        group_column=group_column,
        cells=CellRules(na, decimal, label_separator, drop_empty),
        provenance=provenance,
    )
    return apply_shared_settings(dataset, modalities, missing)
