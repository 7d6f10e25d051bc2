"""The table of a data set: id, split, labels and undecoded values of each sample."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from fusionzoo.errors import FusionZooError, check_known, located
from fusionzoo.structures import KINDS
from fusionzoo.targets import OneOf, Target, kind_of, sorted_words

from ..media.ranges import Ranges
from .arrow import ArrowColumn, first_true, read_each
from .provenance import Provenance

if TYPE_CHECKING:
    from torch import Tensor

MANY = 20  # distinct integers, from which on they may be quantities
NO_LABELS = ("id", "split", "group")
MOVE = "put some there with a column of splits, or leave the label out"
NOT_FILES = ("text", "tabular")  # kinds whose cells are no paths
ROLES = ("id", "split", "target", "group")  # of columns that are no modality
EDGES = ("start", "end")  # of columns that say which seconds of a clip are used
RESERVED = re.compile(r"fused(_\d+)?|(aligned|present)_.*", re.S)  # columns of embeddings
LONGEST_NAME = 200  # bytes; it is in the names of files


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


def read_labels(
    table: pa.Table,
    kinds: Mapping[str, str],
    source: str,
    modalities: Sequence[str] = (),
    *,
    where: Callable[[int], str],
    missing: Mapping[str, str],
    positive: str | None = None,
) -> tuple[tuple[Target, ...], Tensor]:
    """Read the label columns in `kinds`: return their targets and the labels, float32 (N, W).

    An empty cell is a missing label, NaN. Labels in val and test must occur in train, and each
    split needs at least one label in each column. `where` names a row for messages, `missing` says
    which words of a column were read as missing.
    """
    import torch

    targets, values = [], [torch.zeros(len(table), 0)]
    for name, kind in kinds.items():
        others = [x for x in table.column_names if x not in (*NO_LABELS, *modalities)]
        check_known(name, others, f"{source} has no column {name!r} of labels")
        words = missing.get(name, "")
        target, column = _read_column(table, name, kind, source, where, words, positive)
        targets.append(target)
        values.append(column)
    return tuple(targets), torch.cat(values, dim=1)


def _read_column(
    table: pa.Table,
    name: str,
    kind: str,
    source: str,
    where: Callable[[int], str],
    missing: str,
    positive: str | None,
) -> tuple[Target, Tensor]:
    import torch

    cells = [cell or None for cell in table[name].to_pylist()]
    splits, ids = table["split"].to_pylist(), table["id"].to_pylist()
    train = [cell for cell, split in zip(cells, splits, strict=True) if split == "train"]
    labelled = {split for split, cell in zip(splits, cells, strict=True) if cell is not None}
    for split in dict.fromkeys(splits):
        if split not in labelled:
            problem = f"{source}: no sample of split {split!r} has a label {name!r}"
            raise FusionZooError(problem + _as_missing(missing))

    def place(row: int) -> str:
        return f"{where(row)}, sample {ids[row]!r}, column {name!r}"

    read_each(cells, kind_of(kind).check, place)
    with located(f"{source}, column {name!r}"):
        target = kind_of(kind).learn(name, [cell for cell in train or cells if cell is not None])
    if isinstance(target, OneOf):
        target = replace(target, classes=tuple(positive_last(target.classes, positive)))
    values = read_each(cells, target.encode, place, [float("nan")] * target.columns)
    return target, torch.tensor(values, dtype=torch.float32)


def positive_last(classes: Sequence[str], positive: str | None) -> list[str]:
    """Return classes in the order in which `positive` is the second of two; others as they are."""
    if positive is None or len(classes) != 2 or positive not in classes:
        return list(classes)
    return [*(x for x in classes if x != positive), positive]


def check_positive(positive: str, targets: Sequence[Sequence[str]], source: str) -> None:
    """Raise an error if there are classes of targets, but no two of which this is one.

    Rows of a single class are those that a model is asked about.
    """
    if all(len(classes) < 2 for classes in targets):
        return
    pairs = [label for classes in targets if len(classes) == 2 for label in classes]
    if not pairs:
        raise FusionZooError(f"{source}: --data.positive goes with a target of two classes")
    check_known(positive, pairs, f"{source} has no label {positive!r} (--data.positive)")


def read_weights(table: pa.Table, name: str, where: Callable[[int], str]) -> Tensor:
    """Read the column of weights, finite numbers of at least 0: float32 (N,)."""
    import torch

    others = [x for x in table.column_names if x not in NO_LABELS]
    check_known(name, others, f"no column {name!r} for --data.weight_column")
    cells = table[name].to_pylist()
    weights = torch.tensor([_number_or_nan(cell) for cell in cells], dtype=torch.float32)
    bad = (~(weights.isfinite() & (weights >= 0))).nonzero()[:, 0].tolist()
    if bad:
        cell = cells[bad[0]]
        shown = "empty" if cell in (None, "") else repr(cell)
        problem = f"{where(bad[0])}: the weight in column {name!r} is {shown}, as in {len(bad):,}"
        raise FusionZooError(f"{problem} rows; give finite numbers of at least 0")
    return weights


def _number_or_nan(cell: Any) -> float:
    try:
        return math.nan if cell is None or isinstance(cell, bool) else float(cell)
    except (TypeError, ValueError):
        return math.nan


def _as_missing(words: str) -> str:
    """Return which words were read as missing, with the setting, for a message."""
    return f" (read as missing: {words}; `--data.na ''` reads such words as they are)" * bool(words)


def find_classes(
    table: pa.Table, where: Callable[[int], str], missing: str, hint: Callable[[ArrowColumn], str]
) -> list[str]:
    """Return the sorted labels of the training split, numbers by value; none without targets.

    `hint` says which objective fits labels better than classes, for a message.
    """
    labels = table["target"]
    if labels.null_count == len(labels):
        return []
    train = pc.unique(labels.filter(pc.equal(table["split"], "train"))).drop_null()
    known = train if len(train) else pc.unique(labels).drop_null()
    row = first_true(pc.invert(pc.is_in(labels, value_set=known)))
    if row is not None:
        label, split = labels[row].as_py(), table["split"][row].as_py()
        problem = f"no target{_as_missing(missing)}: fill it in, or remove the row"
        if label is not None:
            problem = f"the label {label!r}, which no sample of split 'train' has"
        sample = table["id"][row].as_py()
        advice = "" if label is None else f"; {hint(labels) or MOVE}"
        place = f"{where(row)}, sample {sample!r} (split {split!r})"
        raise FusionZooError(f"{place} has {problem}{advice}")
    return sorted_words({str(label) for label in known.to_pylist()})


class Samples(Protocol):
    """What functions read of a `PairedDataset`; `rows` are the samples' rows in `table`."""

    table: pa.Table
    rows: Tensor
    modalities: dict[str, str]
    memory: dict[str, Sequence[Any] | Tensor]
    paths: frozenset[str]
    root: Path | None
    source: str
    allow_outside: bool
    frames: int | None
    image_range: Ranges
    provenance: Provenance
    scheme: tuple[Target, ...] | None
    classes: list[str]
    label_values: Tensor
    weight_column: str | None
    positive: str | None
    edits: tuple[Callable[..., Any], ...]

    def __len__(self) -> int: ...
    @property
    def ids(self) -> list[str]: ...
    @property
    def split_names(self) -> list[str]: ...
    @property
    def splits(self) -> dict[str, int]: ...
    @property
    def labels(self) -> list[str | None]: ...
    @property
    def targets(self) -> Tensor: ...
    @property
    def present(self) -> Tensor: ...
    def sample_place(self, row: int) -> str: ...
    def check_modality(self, name: str) -> None: ...
    def reference(self, name: str, row: int) -> Any: ...
    def references(self, modality: str) -> list[Any]: ...
    def decode(self, name: str, value: Any) -> Any: ...
    def column(self, name: str) -> list[Any]: ...
    def chosen(self, name: str) -> ArrowColumn: ...


def presence(table: pa.Table, modalities: Mapping[str, str]) -> Tensor:
    """Return which cells of the modalities' columns are not null, bool (rows, M)."""
    import torch

    present = torch.zeros(len(table), len(modalities), dtype=torch.bool)
    for column, name in enumerate(modalities):
        present[:, column] = torch.tensor(table[name].is_valid().to_numpy())
    return present


def check_unedited(dataset: Samples, action: str) -> None:
    """Raise an error if an action that takes stored values meets a view that edits them."""
    if dataset.edits:
        raise FusionZooError(f"{dataset.source}: an edited view cannot be {action}")


def word_list(words: str | Sequence[str]) -> list[str]:
    """Return the words of `a, b`, or of a list.

    >>> word_list("image, text")
    ['image', 'text']
    """
    return [word.strip() for word in (words.split(",") if isinstance(words, str) else words)]


def refuse_name(modality: str) -> str | None:
    """Say why a modality cannot have this name, as models and embeddings have it; None if it can.

    >>> [refuse_name(x) for x in ("front view", "x.ray", "fused")]
    [None, 'it may hold no dot, slash or control character', 'columns of embeddings have it']
    """
    from torch import nn

    if not re.fullmatch(r"[^./\\\x00-\x1f\x7f]+", modality):
        return "it may hold no dot, slash or control character"
    if RESERVED.fullmatch(modality):
        return "columns of embeddings have it"
    if hasattr(nn.ModuleDict(), modality):
        return "torch.nn.ModuleDict has a method or attribute of that name"
    if len(modality.encode()) > LONGEST_NAME:
        return f"it is longer than {LONGEST_NAME} bytes"
    return None


def name_modality(column: str) -> str:
    """Return the column's name as one that a modality can have.

    >>> [name_modality(x) for x in ("notes", "x.ray", "type")]
    ['notes', 'x_ray', 'my_type']
    """
    name = re.sub(r"[./\\\x00-\x1f\x7f]", "_", column)[: LONGEST_NAME // 4]
    return name if refuse_name(name) is None else f"my_{name}"


def check_modalities(modalities: Mapping[str, str], paths: Sequence[str], source: str) -> None:
    for name, kind in modalities.items():
        reason = refuse_name(name)
        if reason is not None:
            raise FusionZooError(
                f"{source}: {name!r} is no name of a modality: {reason}. Rename it, a column of"
                f" a table by --data.columns.my_{kind} {name!r} --data.kinds.my_{kind} {kind}"
            )
        if kind not in KINDS:
            raise FusionZooError(
                f"{source}: the kind of {name!r} is {kind!r}: --data.kinds.{name} image (or"
                f" {', '.join(KINDS[1:])})"
            )
    for name in paths:
        check_known(name, modalities, f"{source} has no modality {name!r} for --data.paths")


def table_columns(dataset: Samples) -> list[str]:
    """Return the columns besides the modalities; those without any value are left out."""
    names = [name for name in dataset.table.column_names if name not in dataset.modalities]
    return [
        name
        for name in names
        if pa.types.is_string(dataset.table[name].type)
        and (name in ("id", "split") or dataset.table[name].null_count < len(dataset.table))
    ]
