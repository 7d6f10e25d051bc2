"""The table of a data set: id, split, labels and undecoded values of each sample."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import torch
from torch import Tensor

from fusionzoo.errors import FusionZooError, did_you_mean
from fusionzoo.structures import KINDS
from fusionzoo.targets import Target

from .arrays import check_rows, refer
from .arrow import count_values, positions_in, repeated_value, rows_equal_to
from .labels import find_classes, read_labels
from .paths import check_paths, holds_paths
from .provenance import Provenance
from .refusals import is_collecting, labels_of_join, repair_rows
from .single_cells import SingleCells
from .stretch import cut

NOT_FILES = ("text", "tabular")  # kinds whose cells are no paths
ROLES = ("id", "split", "target", "group")  # of columns that are no modality


class SampleTable:
    """Samples with an id, a split, labels and, per modality, an undecoded value or nothing.

    `rows` are the samples' rows in `table`, which views share. For the arguments see
    `PairedDataset`, which decodes the values.
    """

    sample_rate: int | None = None  # Hz, of audio in arrays
    frames: int | None = None  # pictures taken of a video; None: `stretch.FRAMES`

    def __init__(
        self,
        table: pa.Table,
        modalities: Mapping[str, str],
        *,
        memory: Mapping[str, Sequence[Any] | Tensor] | None,
        root: Path | None,
        source: str,
        targets: Mapping[str, str] | None,
        paths: Sequence[str],
        allow_outside: bool,
        files_must_exist: bool,
        provenance: Provenance | None,
    ) -> None:
        _check_modalities(modalities, paths, source)
        self.table, self.modalities = table.combine_chunks(), dict(modalities)
        self._cells = SingleCells(self.table)
        self.memory, self.root, self.source = dict(memory or {}), root, source
        self.paths = frozenset(name for name, kind in modalities.items() if kind not in NOT_FILES)
        self.paths |= frozenset(paths)
        self.allow_outside = allow_outside or root is None
        self.provenance = provenance or Provenance()
        self.rows = torch.arange(len(table))
        self.readers: dict[str, Callable[[int], Any]] = {}
        outside = [name for name in modalities if name in self.paths - self.memory.keys()]
        files = [name for name in outside if holds_paths(modalities[name], table[name].type)]
        if is_collecting():
            self.table = repair_rows(
                self.table,
                modalities,
                files,
                root or Path(),
                self.allow_outside,
                self.provenance.row_numbers,
            )
            targets = {}  # the audit reads the column `target` itself
        else:
            self._check_rows()
            arrays = {name: modalities[name] for name in files if modalities[name] != "text"}
            check_paths(
                self.table,
                files,
                root or Path(),
                arrays=list(arrays),
                allow_outside=self.allow_outside,
                must_exist=files_must_exist,
                where=self.where,
            )
            if files_must_exist:
                check_rows(self.table, arrays, root or Path(), self.sample_place)
        self.scheme: tuple[Target, ...] | None = None  # of label columns; None: column `target`
        self.label_values = torch.zeros(len(table), 0)  # of label columns, float32 (N, W)
        if targets is None:
            self.classes = find_classes(self.table, self.where)
            self.class_indices = {label: index for index, label in enumerate(self.classes)}
        else:
            self._read_labels(targets)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def ids(self) -> list[str]:
        """The samples' ids."""
        return self.column("id")

    @property
    def split_names(self) -> list[str]:
        """The samples' splits."""
        return self.column("split")

    @property
    def splits(self) -> dict[str, int]:
        """The number of samples in each split."""
        return count_values(self.chosen("split"))

    @property
    def labels(self) -> list[str | None]:
        """The samples' targets as text."""
        return self.column("target")

    @property
    def groups(self) -> list[str]:
        """The samples' groups, which folds keep together: column `group`, else the id."""
        return self.column("group" if "group" in self.table.column_names else "id")

    @property
    def targets(self) -> Tensor:
        """Indices into `classes`, int64 (N,); with a `scheme` the label values, float32 (N, W)."""
        if self.scheme is not None:
            return self.label_values[self.rows]
        if not self.classes:
            raise FusionZooError(f"{self.source} has no target column")
        return positions_in(self.chosen("target"), self.classes)

    @property
    def present(self) -> Tensor:
        """Which modalities each sample has, according to the table, bool (N, M)."""
        return presence(self.table, self.modalities)[self.rows]

    def where(self, row: int) -> str:
        """Return the place of a row of the table for messages: `file.csv, row 7`."""
        numbers = self.provenance.row_numbers
        return f"{self.source}, row {numbers.number(row)}" if numbers else self.source

    def sample_place(self, row: int) -> str:
        """Return `where` with the id of the row's sample."""
        return f"{self.where(row)}, sample {self._cell('id', row)!r}"

    def check_modality(self, name: str) -> None:
        """Raise an error that lists the modalities, if there is none of this name."""
        if name not in self.modalities:
            raise FusionZooError(
                f"{self.source} has no modality {name!r}.{did_you_mean(name, self.modalities)}"
                f" It has: {', '.join(self.modalities)}"
            )

    def references(self, modality: str) -> list[Any]:
        """Return each sample's undecoded value: a path, text, a value from memory, or None."""
        return [self.reference(modality, row) for row in self.rows.tolist()]

    def reference(self, name: str, row: int) -> Any:
        """Return the undecoded value in a row of the table, see `references`."""
        cell, kind = self._cell(name, row), self.modalities[name]
        if cell is None:
            return None
        if name in self.memory:
            value = self.memory[name][cell]
        elif name not in self.paths:
            return cell
        elif kind == "text":
            return (self.root or Path()) / cell if isinstance(cell, str) else cell
        else:
            value = refer(cell, kind, self.root, self.sample_rate)
        if kind not in ("image", "audio"):
            return value
        return cut(kind, value, *self._cells.segment(name, row), self.frames)

    def read_by(self, readers: Mapping[str, Callable[[int], Any]]) -> Self:
        """Return the same samples; values of some modalities are not decoded, but read by row of
        the table."""
        view = copy.copy(self)
        view.readers = dict(readers)
        return view

    def _cell(self, column: str, row: int) -> Any:
        self._cells = self._cells.of(self.table)
        return self._cells(column, row)

    def column(self, name: str) -> list[Any]:
        """Return the samples' cells of a column of the table."""
        return self.chosen(name).to_pylist()

    def chosen(self, name: str) -> Any:
        """Return the samples' cells of a column of the table, as an Arrow array."""
        return self.table[name].take(pa.array(self.rows.numpy()))

    def _read_labels(self, targets: Mapping[str, str]) -> None:
        labels = read_labels(
            self.table, targets, self.source, list(self.modalities), where=self.where
        )
        self.classes, (self.scheme, self.label_values) = [], labels

    def _target(self, row: int) -> int | tuple[float, ...] | None:
        if self.scheme is not None:
            return tuple(self.label_values[row].tolist())
        return self.class_indices[self._cell("target", row)] if self.classes else None

    def _check_rows(self) -> None:
        if not len(self.table):
            raise FusionZooError(f"{self.source} has no rows")
        ids = self.table["id"]
        if ids.null_count:
            row = ids.is_null().to_pylist().index(True)
            raise FusionZooError(f"{self.where(row)}: the id is empty")
        repeated = repeated_value(ids)
        if repeated is not None:
            key, count = repeated
            numbers, rows = self.provenance.row_numbers, rows_equal_to(ids, key).tolist()
            where = numbers.list_rows(rows) if numbers else ""
            raise FusionZooError(f"{self.source}: id {key!r} occurs {count} times{where}")
        empty = (~self.present.any(1)).nonzero()[:, 0].tolist()
        if empty and labels_of_join() is None:
            raise FusionZooError(f"{self.sample_place(empty[0])}: every modality is empty")


def presence(table: pa.Table, modalities: Mapping[str, str]) -> Tensor:
    """Return which cells of the modalities' columns are not null, bool (rows, M)."""
    present = torch.zeros(len(table), len(modalities), dtype=torch.bool)
    for column, name in enumerate(modalities):
        present[:, column] = torch.tensor(table[name].is_valid().to_numpy())
    return present


def word_list(words: str | Sequence[str]) -> list[str]:
    """Return the words of `a, b`, or of a list.

    >>> word_list("image, text")
    ['image', 'text']
    """
    return [word.strip() for word in (words.split(",") if isinstance(words, str) else words)]


def _check_modalities(modalities: Mapping[str, str], paths: Sequence[str], source: str) -> None:
    for name, kind in modalities.items():
        if kind not in KINDS:
            raise FusionZooError(f"{name} is of kind {kind!r}; kinds are {', '.join(KINDS)}")
    for name in paths:
        if name not in modalities:
            raise FusionZooError(
                f"{source} has no modality {name!r} for --data.paths."
                f"{did_you_mean(name, modalities)} It has: {', '.join(modalities)}"
            )
