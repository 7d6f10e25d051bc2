"""The data of a benchmark: open the data set and create the folds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusionzoo.config import BenchmarkConfig
from fusionzoo.config.deselected import drop_deselected
from fusionzoo.datasets import PairedDataset
from fusionzoo.datasets.splits import SPLITS
from fusionzoo.errors import FusionZooError
from fusionzoo.evaluation.robustness import CORRUPTIONS, SEVERITIES
from fusionzoo.training.build import open_dataset

Condition = tuple[str, str, int]  # modality, corruption, severity
Settings = dict[str, Any]  # of a fusion or an optimiser
Description = dict[str, Any]  # of an entry of the feature cache


@dataclass(frozen=True, eq=False)  # tensors have no truth value to compare by
class Fold:
    """Row numbers of the three splits."""

    train: Tensor
    val: Tensor
    test: Tensor


@dataclass(frozen=True, eq=False)
class Bench:
    """What all trials of a benchmark share; never changed. Features stay in the cache's files.

    `open_bench` fills the fields down to `dataset`, `features.prepare` the rest, in a new object.
    """

    cfg: BenchmarkConfig
    modalities: Mapping[str, str]  # name -> kind
    classes: tuple[str, ...]
    targets: Tensor  # (N,)
    present: Tensor  # (N, M)
    folds: tuple[Fold, ...]
    groups: tuple[str, ...] = ()  # (N,) names; folds keep the samples of a group together
    notes: tuple[str, ...] = ()  # shown in the report
    dataset: PairedDataset | None = None  # if it was passed as an object; None: cfg.data opens it
    dims: Mapping[str, int] = field(default_factory=dict)  # modality -> width of its features
    features: tuple[Mapping[str, Description], ...] = ()  # by fold: modality -> cache entry
    corrupted: tuple[Mapping[Condition, Description], ...] = ()  # by fold, of its test rows


class Unit(NamedTuple):
    """A unit of work: one trial, or the trials of several seeds that are trained together."""

    strategy: str
    fold: int
    seeds: tuple[int, ...]
    shuffled: bool  # a control: the labels of training and validation are shuffled
    settings: Settings  # all settings of the fusion
    optim: Settings  # settings of the optimiser that tuning changed


def open_bench(
    cfg: BenchmarkConfig, dataset: PairedDataset | None = None
) -> tuple[Bench, PairedDataset]:
    """Open the data set, unless it is passed as an object, and create the folds."""
    opened = open_dataset(cfg.data) if dataset is None else dataset
    cfg, dropped_flags = drop_deselected(cfg, opened.provenance.deselected)
    if not opened.classes:
        raise FusionZooError(f"{opened.source} has no target column, and a benchmark needs one")
    if len(opened.modalities) < 2:
        raise FusionZooError(f"{opened.source} has one modality: there is nothing to fuse")
    notes: tuple[str, ...] = ()
    if dropped_flags:
        notes = (f"Settings left out by --data.modalities: {', '.join(dropped_flags)}.",)
    bench = Bench(
        cfg,
        opened.modalities,
        tuple(opened.classes),
        opened.targets,
        opened.present,
        make_folds(opened, cfg.folds, cfg.seed),
        tuple(opened.groups),
        notes,
        dataset,
    )
    return bench, opened


def dataset_of(bench: Bench) -> PairedDataset:
    """Return the data set of a benchmark, opened again where it is known by its settings only."""
    return open_dataset(bench.cfg.data) if bench.dataset is None else bench.dataset


def make_folds(dataset: PairedDataset, count: int, seed: int) -> tuple[Fold, ...]:
    """Return the data set's own splits, or `count` stratified folds that keep groups together.

    Fold f tests on part f, validates on the next part and trains on the others.
    """
    if count == 0:
        return (_own_splits(dataset),)
    if count < 3:
        raise FusionZooError(
            f"--folds {count}: one to test, one to validate and one to train make 3"
        )
    from sklearn.model_selection import StratifiedGroupKFold

    splitter = StratifiedGroupKFold(count, shuffle=True, random_state=seed)
    splits = splitter.split(dataset.ids, dataset.targets, dataset.groups)
    parts = [torch.from_numpy(test_rows) for _, test_rows in splits]
    folds = []
    for number, test in enumerate(parts):
        next_number = (number + 1) % count
        train = [part for other, part in enumerate(parts) if other not in (number, next_number)]
        folds.append(Fold(torch.cat(train).sort().values, parts[next_number], test))
    _check_labels(dataset, folds)
    return tuple(folds)


def conditions(bench: Bench) -> list[Condition]:
    """Return every corruption, of every modality and severity, that strategies are tested on."""
    if not bench.cfg.corruptions:
        return []
    return [
        (modality, corruption, severity)
        for modality, kind in bench.modalities.items()
        for corruption in CORRUPTIONS[kind]
        for severity in SEVERITIES
    ]


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


def _check_labels(dataset: PairedDataset, folds: list[Fold]) -> None:
    """Raise an error where validation or test samples have a label that training lacks."""
    for number, fold in enumerate(folds):
        trained_labels = set(dataset.targets[fold.train].tolist())
        for row in torch.cat([fold.val, fold.test]).tolist():
            if int(dataset.targets[row]) not in trained_labels:
                raise FusionZooError(
                    f"fold {number}: no training sample has the label {dataset.labels[row]!r};"
                    " fewer folds, or more samples of it"
                )
