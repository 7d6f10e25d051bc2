"""The table of a data set: id, split, labels and undecoded values of each sample."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from fusionzoo.errors import FusionZooError, did_you_mean
from fusionzoo.structures import KINDS
from fusionzoo.targets import Target

from .arrow import cell_lengths, count_values, positions_in, repeated_value
from .labels import find_classes, read_labels
from .paths import check_paths
from .provenance import Provenance


class SampleTable:
    """Samples with an id, a split, labels and, per modality, an undecoded value or nothing.

    `rows` are the samples' rows in `table`, which views share. For the arguments see
    `PairedDataset`, which decodes the values.
    """

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
        self.memory, self.root, self.source = dict(memory or {}), root, source
        self.paths = frozenset(name for name, kind in modalities.items() if kind != "text")
        self.paths |= frozenset(paths)
        self.allow_outside = allow_outside or root is None
        self.provenance = provenance or Provenance()
        self.rows = torch.arange(len(table))
        self.readers: dict[str, Callable[[int], Any]] = {}
        self._check_rows()
        check_paths(
            self.table,
            [name for name in modalities if name in self.paths and name not in self.memory],
            root or Path(),
            allow_outside=self.allow_outside,
            must_exist=files_must_exist,
            source=source,
        )
        self.scheme: tuple[Target, ...] | None = None  # of label columns; None: column `target`
        self.label_values = torch.zeros(len(table), 0)  # of label columns, float32 (N, W)
        if targets is None:
            self.classes = find_classes(self.table, source)
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

    def references(self, modality: str) -> list[Any]:
        """Return each sample's undecoded value: a path, text, a value from memory, or None."""
        return [self.reference(modality, row) for row in self.rows.tolist()]

    def reference(self, name: str, row: int) -> Any:
        """Return the undecoded value in a row of the table, see `references`."""
        cell = self._cell(name, row)
        if cell is None:
            return None
        if name in self.memory:
            return self.memory[name][cell]
        is_path = name in self.paths and isinstance(cell, str)
        return (self.root or Path()) / cell if is_path else cell

    def read_by(self, readers: Mapping[str, Callable[[int], Any]]) -> Self:
        """Return the same samples; values of some modalities are not decoded, but read by row of
        the table."""
        view = copy.copy(self)
        view.readers = dict(readers)
        return view

    def lengths(self) -> Tensor:
        """Return a rough cost per sample, from the sizes of its text, audio and sequences."""
        total = torch.zeros(len(self.table), dtype=torch.float64)
        for name, kind in self.modalities.items():
            if kind in ("text", "audio", "sequence"):
                sizes = self._lengths(name, kind)
                total += sizes / sizes.mean().clamp(min=1e-9)
        return total[self.rows]

    def by_length(self) -> list[int]:
        """Return the samples' positions, the longest first."""
        return self.lengths().argsort(descending=True, stable=True).tolist()

    def _lengths(self, name: str, kind: str) -> Tensor:
        """Return the size of each value of a modality, float64 (rows of the table,)."""
        is_plain = name not in self.memory and not (name in self.paths and kind == "text")
        is_list = kind == "sequence" and not pa.types.is_string(self.table[name].type)
        sizes = cell_lengths(self.table[name]) if is_plain and (kind == "text" or is_list) else None
        if sizes is not None:
            return sizes
        rows = range(len(self.table))
        return torch.tensor([self._length(name, kind, row) for row in rows], dtype=torch.float64)

    def _length(self, name: str, kind: str, row: int) -> float:
        value = self.reference(name, row)
        if value is None:
            return 0.0
        if isinstance(value, Path):
            return float(value.stat().st_size) if value.is_file() else 0.0
        return float(len(value[0] if kind == "audio" else value))

    def _cell(self, column: str, row: int) -> Any:
        return self.table[column][row].as_py()

    def column(self, name: str) -> list[Any]:
        """Return the samples' cells of a column of the table."""
        return self.chosen(name).to_pylist()

    def chosen(self, name: str) -> Any:
        """Return the samples' cells of a column of the table, as an Arrow array."""
        return self.table[name].take(pa.array(self.rows.numpy()))

    def _read_labels(self, targets: Mapping[str, str]) -> None:
        labels = read_labels(self.table, targets, self.source, list(self.modalities))
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
            raise FusionZooError(f"{self.source}, row {row + 1}: the id is empty")
        repeated = repeated_value(ids)
        if repeated is not None:
            key, count = repeated
            raise FusionZooError(f"{self.source}: id {key!r} occurs {count} times")
        empty = (~self.present.any(1)).nonzero()[:, 0].tolist()
        if empty:
            where = f"row {empty[0] + 1}, sample {self._cell('id', empty[0])!r}"
            raise FusionZooError(f"{self.source}, {where}: every modality is empty")


def presence(table: pa.Table, modalities: Mapping[str, str]) -> Tensor:
    """Return which cells of the modalities' columns are not null, bool (rows, M)."""
    columns = [torch.tensor(table[name].is_valid().to_numpy()) for name in modalities]
    return torch.stack(columns, dim=1)


def drop_values(table: pa.Table, modalities: Mapping[str, str], rate: float, seed: int) -> pa.Table:
    """Remove each value of the modalities with probability `rate`.

    A row that would lose everything keeps one of its values, chosen at random.
    """
    generator = torch.Generator().manual_seed(seed)
    present = presence(table, modalities)
    order = torch.rand(present.shape, generator=generator)
    keep = present & (torch.rand(present.shape, generator=generator) >= rate)
    fallback = order.masked_fill(~present, 2.0).argmin(1)
    keep[torch.arange(len(keep)), fallback] |= ~keep.any(1)
    for column, name in enumerate(modalities):
        mask = pa.array(keep[:, column].numpy())
        values = pc.if_else(mask, table[name], pa.scalar(None, table[name].type))
        table = table.set_column(table.column_names.index(name), name, values)
    return table


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
