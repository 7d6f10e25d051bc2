"""A table with one row per sample: CSV, TSV, JSON lines or Parquet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..base import DATASETS, apply_shared_settings
from ..failures import MAX_ERRORS, OnError
from ..paired import PairedDataset
from ..splits import SHARES
from .columns import read_table
from .tables import open_table


@DATASETS.register("manifest", family="format")
def manifest(
    *,
    root: str = "",
    columns: Mapping[str, str | Sequence[str]] | None = None,
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
    categorical: str | Sequence[str] = (),
    arrays: Mapping[str, str | Sequence[str]] | None = None,
    sample_rate: int | None = None,
) -> PairedDataset:
    """Open your own CSV, TSV, JSONL or Parquet file with one row per sample.

    Columns `image`, `text`, `audio`, `vector`, `sequence` are modalities; an empty cell is missing.
    If absent, `id` is the row's number, `split` a hash of the id, and no `target` is known. Text is
    in its cell, vectors and sequences are lists, or parts of arrays such as `feats.npy[17]`,
    `feats.npz::key` or `feats.h5::group/key[2:40]`; paths are relative to the file.

    Settings:
        root: path of the file
        columns: columns with other names, by modality or role: `{"xray": "file_2", "id": "key"}`;
            those of a tabular modality, `{"tabular": "age,weight,colour"}`
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
        categorical: columns of a tabular modality that hold categories though they are numbers
        arrays: files of modalities that are no columns, `{"audio": "feats.npy"}`: a row per sample,
            or by id, `"feats.npy,ids.npy"`, `.npz` or HDF5 with `features` and `ids`, or named ids
        sample_rate: in Hz, of audio in arrays
    """
    path = Path(root)
    dataset = open_table(
        read_table(path),
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
        categorical=categorical,
        arrays=arrays,
        sample_rate=sample_rate,
    )
    return apply_shared_settings(dataset, modalities, missing)
