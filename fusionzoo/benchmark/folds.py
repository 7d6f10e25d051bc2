"""Folds of a benchmark: the data set's own splits, or cross-validation."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fusionzoo.datasets import PairedDataset
from fusionzoo.datasets.splits import SPLITS
from fusionzoo.errors import FusionZooError

FOLDS = 5
VALIDATION_PARTS = 8  # of the samples that a fold does not test, one part in 8 validates


@dataclass(frozen=True, eq=False)  # tensors have no truth value to compare by
class Fold:
    """Row numbers of the three splits."""

    train: Tensor
    val: Tensor
    test: Tensor


def make_folds(
    dataset: PairedDataset, count: int, seed: int, labels: Tensor | None = None
) -> tuple[Fold, ...]:
    """Return the data set's own splits, or `count` stratified folds that keep groups together.

    Fold f tests on part f; of the others it validates on an eighth and trains on the rest, with 5
    folds on 20, 10 and 70 % of the samples. `labels` (N,) are the classes to stratify by, by
    default the targets; -1 marks samples without a label, which are trained on (strategies may
    learn from them) but neither validate nor test.
    """
    labels = dataset.targets if labels is None else labels
    if count == 0:
        return (_labelled(_own_splits(dataset), labels),)
    if count < 3:
        raise FusionZooError(
            f"--folds {count}: one to test, one to validate and one to train make 3"
        )
    folds = []
    for others, test in _split(dataset, torch.arange(len(labels)), labels, count, seed):
        train, val = _split(dataset, others, labels, VALIDATION_PARTS, seed)[0]
        folds.append(_labelled(Fold(train, val, test), labels))
    return tuple(folds)


def _split(
    dataset: PairedDataset, rows: Tensor, labels: Tensor, count: int, seed: int
) -> list[tuple[Tensor, Tensor]]:
    """Cut rows into stratified parts that keep groups together: (the other rows, the part) each.

    Fewer parts are made where there are fewer groups, or no class has as many samples.
    """
    from sklearn.model_selection import StratifiedGroupKFold

    groups = [dataset.groups[row] for row in rows.tolist()]
    most = int(labels[rows].unique(return_counts=True)[1].max())
    splitter = StratifiedGroupKFold(
        max(2, min(count, len(set(groups)), most)), shuffle=True, random_state=seed
    )
    with warnings.catch_warnings():  # a class rarer than the parts is in some of them only
        warnings.filterwarnings("ignore", "The least populated class", UserWarning)
        splits = list(splitter.split(groups, labels[rows], groups))
    return [(rows[rest].sort().values, rows[part].sort().values) for rest, part in splits]


def _own_splits(dataset: PairedDataset) -> Fold:
    split_names = dataset.split_names
    for name in SPLITS:
        if name not in split_names:
            dataset.split(name)  # raises an error that lists the splits there are
    rows = {
        name: torch.tensor([row for row, split in enumerate(split_names) if split == name])
        for name in SPLITS
    }
    return Fold(**rows)


def _labelled(fold: Fold, labels: Tensor) -> Fold:
    """Leave out the validation and test samples without a label."""
    val, test = (rows[labels[rows] >= 0] for rows in (fold.val, fold.test))
    for name, rows in (("val", val), ("test", test)):
        if not len(rows):
            raise FusionZooError(f"no sample of the {name} split has a label")
    return Fold(fold.train, val, test)


def untrained_labels(dataset: PairedDataset, folds: Sequence[Fold]) -> list[str]:
    """Name the classes that a fold tests and that its training samples lack, for the report."""
    if dataset.scheme is not None or len(folds) == 1:
        return []
    lacking: dict[str, int] = {}
    for fold in folds:
        trained = set(dataset.targets[fold.train].tolist())
        for label in dataset.targets[fold.test].tolist():
            if label not in trained:
                name = dataset.classes[label]
                lacking[name] = lacking.get(name, 0) + 1
    if not lacking:
        return []
    counts = ", ".join(f"{name} ({count})" for name, count in lacking.items())
    return [
        f"Samples of these classes are tested in folds whose training samples have none of them,"
        f" and count as errors: {counts}. Fewer folds, or more samples of them, would help."
    ]
