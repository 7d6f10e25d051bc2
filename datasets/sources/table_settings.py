"""The settings of a table that becomes a data set, as one value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from fusionzoo.errors import FusionZooError
from fusionzoo.ground.cells import fold

from ..join import How
from ..tables.splits import SHARES
from ..tables.table import word_list
from .cell_kinds import split_kinds

NA: tuple[str, ...] = ("NA", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "NULL", "null", "None")
NA += ("#DIV/0!", "#NAME?", "#NULL!", "#NUM!", "#REF!", "#VALUE!")  # of a spreadsheet's formulas
NO_HEADER = "none"
Words = str | int | float | Sequence[str | int | float]
Roles = Mapping[str, str | Sequence[str]]  # role or modality -> the user's name of its column


@dataclass(frozen=True, kw_only=True)
class TableSettings:
    """How a table, with what belongs to it, becomes a data set.

    Settings:
        root: path of the file, or path or URL (`s3://...`) of a folder of shards, Parquet or tar
            files; in Python also a table in memory
        columns: columns with other names, by modality or role: `{"xray": "file_2", "id": "key"}`;
            those of a tabular modality, `{"tabular": "age,weight,colour"}`
        kinds: kinds of modalities with other names, `{"xray": "image"}`; what the cells of a column
            of a tabular modality are, `{"weight": "number kg", "admission": "date dmy"}`: number,
            date (`iso`, `dmy`, `mdy`, `excel`), category, text, image, audio, vector, sequence, or
            none to leave it out
        shares: of train, val and test in splits by hash or time
        targets: label columns and what they hold, `{"age": "regression"}`; train.py sets it
        positive: of two classes, the label that sensitivity, specificity, AUROC and thresholds are
            about; the second in sorted order
        paths: modalities of text whose cells are paths of files
        allow_outside: whether paths may leave the file's folder, links resolved
        group_column: groups that splits and folds keep together, instead of `group`; `id` for none
        weight_column: how much each row counts in losses and metrics: numbers of at least 0, as
            scikit-learn's `sample_weight`; the column is no input
        time_column: dates, times or numbers by which splits are made: what is latest is test, what
            is earlier val, and the rest train; a group is where its last row is
        delimiter: character between cells, or `tab`; found from the first rows
        header: `none` where the first row of a CSV is no header, so columns are c1, c2, ...;
            `first` where it is one though it looks like numbers
        encoding: of a text file; found from its bytes
        sheet: name of a spreadsheet's sheet; the first, which is refused if it is hidden
        decimal: `,` where regression and ordinal targets are written as 25,06
        na: words in cells that mean a missing value, comma-separated or a list;
            null: `NA`, `nan`, `null` and the like in text files and spreadsheets, none elsewhere
        drop_empty: whether rows without any modality are left out, with `join` samples without any
            of all sources; else they are an error
        label_separator: between the labels of a multilabel target; lists, `['sun', 'sea']` and
            vectors `[1 0 1]` of the labels 0, 1, 2 need none
        fields: names of the entries of rows that are tuples, in memory; `_` for one to leave out
        join: further sources, by modality: the path of a manifest, or its settings
        on: column by which joined samples belong together, or a mapping with that of each source
        how: samples that a join keeps: `inner` those of which all sources have a row, `left` those
            of `root`, `outer` all
        arrays: files of modalities that are no columns, `{"audio": "feats.npy"}`: a row per sample,
            or by id, `"feats.npy,ids.npy"`, `.npz` or HDF5 with `features` and `ids`, or named ids
        sample_rate: in Hz, of audio in arrays
        frames: images taken of a video, uniformly spaced; null takes 8; a number holds for the
            images that a pattern matches, too, of which null takes all
    """

    root: Any = ""
    columns: Roles | None = None
    kinds: Mapping[str, str] | None = None
    shares: Sequence[float] = SHARES
    targets: Mapping[str, str] | None = None
    positive: str | bool | int | None = None
    paths: str | Sequence[str] = ()
    allow_outside: bool = False
    group_column: str | None = None
    weight_column: str | None = None
    time_column: str | None = None
    delimiter: str | None = None
    header: str = ""
    encoding: str | None = None
    sheet: str = ""
    decimal: str = "."
    na: Words | None = None
    drop_empty: bool = False
    label_separator: str = ";"
    fields: str | Sequence[str] = ()
    join: Mapping[str, Any] | None = None
    on: str | Mapping[str, str] = "id"
    how: How = "inner"
    arrays: Mapping[str, str | Sequence[str]] | None = None
    sample_rate: int | None = None
    frames: int | None = None

    def __post_init__(self) -> None:
        if self.decimal not in (".", ","):
            raise FusionZooError(f"--data.decimal {self.decimal!r} is neither '.' nor ','")
        if self.header not in ("", "first", NO_HEADER):
            raise FusionZooError(f"--data.header {self.header!r} is neither 'none' nor 'first'")
        if not self.label_separator:
            raise FusionZooError("--data.label_separator is empty; usual are ; , |")

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> TableSettings:
        """Take from the settings of a data set those of its table."""
        return cls(**{x.name: settings[x.name] for x in fields(cls) if x.name in settings})

    @property
    def modality_kinds(self) -> dict[str, str]:
        """Kinds of modalities, by name."""
        return split_kinds(self.kinds or {})[0]

    @property
    def cell_kinds(self) -> dict[str, str]:
        """What the cells of columns are, by the column's name as `fold` returns it."""
        return {fold(name): kind for name, kind in split_kinds(self.kinds or {})[1].items()}

    @property
    def label_kinds(self) -> Mapping[str, str]:
        """Label columns and what they hold; by default classes in the column `target`."""
        return {"target": "classification"} if self.targets is None else self.targets

    @property
    def field_names(self) -> list[str]:
        """Names of the entries of rows that are tuples."""
        return word_list(self.fields) if self.fields else []

    def missing_words(self, has_nulls: bool) -> list[str]:
        """Return the words that stand for a missing value.

        Without `na`, a table that marks missing values (`has_nulls`) has no such words.
        """
        usual = () if has_nulls else NA
        na = usual if self.na is None else self.na
        words = [na] if isinstance(na, int | float) else na or ()
        return word_list(words if isinstance(words, str) else [str(word) for word in words])

    @property
    def notes(self) -> list[str]:
        """What the data summary says of how cells are read."""
        separator = f"labels separated by {self.label_separator!r}"
        return [
            *(["decimal comma"] if self.decimal == "," else []),
            *([separator] if self.label_separator != ";" else []),
        ]
