"""Read the labels of a table; what a column holds is learnt from its training split."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from fusionzoo.errors import FusionZooError, did_you_mean
from fusionzoo.targets import Target, kind_of, sorted_words

from .arrow import first_true
from .target_hints import objective_hint

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
