"""The table of a data set: id, split, labels and undecoded values of each sample."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from fusionzoo.errors import FusionZooError, did_you_mean
from fusionzoo.structures import KINDS
from fusionzoo.targets import Target, kind_of, sorted_words

from .arrays import check_rows, refer
from .arrow import count_values, first_true, positions_in, repeated_value, rows_equal_to
from .paths import NUMBER, check_paths, holds_paths, is_collecting, labels_of_join, repair_rows
from .provenance import Provenance
from .sound import cut

FRACTION = r"[.,]"
MANY = 20  # distinct integers, from which on they may be quantities
FEW_EACH = 10  # samples per integer on average, below which they may be quantities
SEPARATORS = (";", ",", "|", "/")


def objective_hint(labels: Any) -> str:
    """Return which objective would fit a column of targets better than classes, or nothing.

    `labels` is an Arrow array of text, where null is no label.

    >>> objective_hint(pa.array(["sun, sea", "sun", "sea"]))[:36]
    "targets such as 'sun, sea' look like"
    """
    counts = pc.value_counts(labels.drop_null())
    distinct, num_labels = counts.field("values"), len(labels) - labels.null_count
    if not num_labels:
        return ""
    per_class = num_labels / len(distinct)
    if pc.all(pc.match_substring_regex(distinct, f"^{NUMBER}$")).as_py():
        return _number_hint(distinct, per_class)
    for separator in SEPARATORS:
        several = distinct.filter(pc.match_substring(distinct, separator))
        if len(several) and _words_recur(distinct, separator):
            option = "" if separator == ";" else f" --data.label_separator {_shell(separator)}"
            return (
                f"targets such as {several[0].as_py()!r} look like several labels:"
                f" --objective.name multilabel{option}"
            )
    if len(distinct) == num_labels > 2:
        return (
            f"each of the {num_labels:,} targets occurs once, so there are no classes to learn:"
            " --data.columns.target names another column, --objective.name regression learns"
            " numbers, multilabel several labels in a cell"
        )
    return ""


def case_hint(classes: Sequence[str]) -> str:
    """Return a hint at classes that differ by case or spaces alone, or nothing.

    >>> case_hint(["Cat", "cat", "dog"])
    "the classes 'Cat', 'cat' differ by case alone: write them in the same way, if they are one"
    """
    spellings: dict[str, list[str]] = {}
    for name in classes:
        spellings.setdefault(" ".join(name.split()).casefold(), []).append(name)
    groups = [", ".join(map(repr, names)) for names in spellings.values() if len(names) > 1]
    if not groups:
        return ""
    more = f" (and {len(groups) - 3} more)" if len(groups) > 3 else ""
    return (
        f"the classes {'; '.join(groups[:3])}{more} differ by case alone: write them in the same"
        " way, if they are one"
    )


def separator_hint(name: str, classes: Sequence[str]) -> str:
    """Return a hint at labels of a multilabel target that look like several, or nothing."""
    labels = pa.array(classes, pa.string())
    for separator in SEPARATORS[1:]:
        several = [label for label in classes if separator in label]
        if several and _words_recur(labels, separator):
            return (
                f"labels of {name} such as {several[0]!r} look like several:"
                f" --data.label_separator {_shell(separator)}"
            )
    return ""


def _number_hint(distinct: Any, per_class: float) -> str:
    fractions = pc.any(pc.match_substring_regex(distinct, FRACTION)).as_py()
    if len(distinct) <= 2 or not (fractions or (len(distinct) > MANY and per_class < FEW_EACH)):
        return ""
    comma = pc.any(pc.match_substring(distinct, ",")).as_py()
    decimal = " --data.decimal ," if comma else ""
    return (
        f"the {len(distinct):,} different targets are numbers: --objective.name regression"
        f"{decimal} learns them as such"
    )


def _words_recur(cells: Any, separator: str) -> bool:
    """Return whether cells divide into words of which one is a cell, too, or that are few."""
    parts = pc.list_flatten(pc.split_pattern(cells, separator))
    words = pc.utf8_trim_whitespace(parts)
    distinct = words.unique()
    several = cells.filter(pc.match_substring(cells, separator))
    in_several = pc.utf8_trim_whitespace(pc.list_flatten(pc.split_pattern(several, separator)))
    alone = pc.any(pc.is_in(in_several, value_set=cells)).as_py()
    return bool(alone) or len(distinct) < len(cells) or len(distinct) < len(words) / 2


def _shell(separator: str) -> str:
    return f"'{separator}'" if separator in ";|" else separator


NO_LABELS = ("id", "split", "group")


def read_labels(
    table: pa.Table,
    kinds: Mapping[str, str],
    source: str,
    modalities: Sequence[str] = (),
    *,
    where: Callable[[int], str],
) -> tuple[tuple[Target, ...], Tensor]:
    """Read the label columns in `kinds`: return their targets and the labels, float32 (N, W).

    An empty cell is a missing label, NaN. Labels in val and test must occur in train, and each
    split needs at least one label in each column. `where` names a row for messages.
    """
    targets, values = [], [torch.zeros(len(table), 0)]
    for name, kind in kinds.items():
        others = [x for x in table.column_names if x not in (*NO_LABELS, *modalities)]
        if name not in others:
            raise FusionZooError(
                f"{source} has no column {name!r} of labels.{did_you_mean(name, others)}"
                f" It has: {', '.join(others)}"
            )
        target, column = _read_column(table, name, kind, source, where)
        targets.append(target)
        values.append(column)
    return tuple(targets), torch.cat(values, dim=1)


def _read_column(
    table: pa.Table, name: str, kind: str, source: str, where: Callable[[int], str]
) -> tuple[Target, Tensor]:
    cells = [cell or None for cell in table[name].to_pylist()]
    splits, ids = table["split"].to_pylist(), table["id"].to_pylist()
    train = [cell for cell, split in zip(cells, splits, strict=True) if split == "train"]
    labelled = {split for split, cell in zip(splits, cells, strict=True) if cell is not None}
    for split in dict.fromkeys(splits):
        if split not in labelled:
            raise FusionZooError(f"{source}: no sample of split {split!r} has a label {name!r}")

    def apply(read: Callable[[str], Any], default: Any) -> list[Any]:
        values = []
        for row, cell in enumerate(cells):
            try:
                values.append(default if cell is None else read(cell))
            except FusionZooError as error:
                place = f"{where(row)}, sample {ids[row]!r}, column {name!r}"
                raise FusionZooError(f"{place}: {error}") from None
        return values

    apply(kind_of(kind).check, None)
    try:
        target = kind_of(kind).learn(name, [cell for cell in train or cells if cell is not None])
    except FusionZooError as error:
        raise FusionZooError(f"{source}, column {name!r}: {error}") from None
    values = apply(target.encode, [float("nan")] * target.columns)
    return target, torch.tensor(values, dtype=torch.float32)


MOVE = "put some there with a column of splits, or leave the label out"


def find_classes(table: pa.Table, where: Callable[[int], str]) -> list[str]:
    """Return the sorted labels of the training split, numbers by value; none without targets.

    `where` names a row for messages.
    """
    labels = table["target"]
    if labels.null_count == len(labels):
        return []
    train = pc.unique(labels.filter(pc.equal(table["split"], "train"))).drop_null()
    known = train if len(train) else pc.unique(labels).drop_null()
    row = first_true(pc.invert(pc.is_in(labels, value_set=known)))
    if row is not None:
        label, split = labels[row].as_py(), table["split"][row].as_py()
        problem = "no target: fill it in, or remove the row"
        if label is not None:
            problem = f"the label {label!r}, which no sample of split 'train' has"
        sample = table["id"][row].as_py()
        hint = "" if label is None else objective_hint(labels) or MOVE
        raise FusionZooError(
            f"{where(row)}, sample {sample!r} (split {split!r}) has {problem}"
            f"{'; ' if hint else ''}{hint}"
        )
    return sorted_words({str(label) for label in known.to_pylist()})


class SingleCells:
    """The cells of a table, by column and row."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self._columns: dict[str, Any] = {}  # Arrow arrays
        self._edges: dict[str, Any] = {}  # of columns with an edge of a segment; None: no column

    def __reduce__(self) -> tuple[Any, ...]:
        return SingleCells, (self.table,)  # a copy looks its columns up itself

    def of(self, table: pa.Table) -> SingleCells:
        """Return the cells of a table: these, if it is the same."""
        return self if table is self.table else SingleCells(table)

    def __call__(self, column: str, row: int) -> Any:
        """Return a cell as a Python value; None where it is null."""
        cells = self._columns.get(column)
        if cells is None:
            cells = self._columns[column] = _array_of(self.table[column])
        return cells[row].as_py()

    def segment(self, name: str, row: int) -> tuple[float | None, float | None]:
        """Return start and end of a modality's value in seconds, by its columns; None: not limited.

        `formats.segments` makes the columns.
        """
        return self._edge(f"{name}_start", row), self._edge(f"{name}_end", row)

    def _edge(self, column: str, row: int) -> float | None:
        if column not in self._edges:
            position = self.table.schema.get_field_index(column)
            is_edge = position >= 0 and pa.types.is_float64(self.table.schema.field(position).type)
            self._edges[column] = _array_of(self.table.column(position)) if is_edge else None
        cells = self._edges[column]
        seconds = None if cells is None else cells[row].as_py()
        return None if seconds is None or math.isnan(seconds) else seconds


def _array_of(column: pa.ChunkedArray) -> Any:
    """Return the only chunk of a column, which is read three times as fast, or the column."""
    return column.chunk(0) if column.num_chunks == 1 else column


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
