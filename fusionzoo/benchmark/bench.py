"""The data of a benchmark: open the data set and create the folds."""

from __future__ import annotations

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
Description = dict[str, Any]  # of a cache entry


@dataclass(frozen=True, eq=False)  # tensors have no truth value to compare by
class Fold:
    """Rows of the data set."""

    train: Tensor
    val: Tensor
    test: Tensor


@dataclass(frozen=True)
class Bench:
    """The data of a benchmark, ready to train on; small, for features stay in their files."""

    cfg: BenchmarkConfig
    modalities: dict[str, str]
    classes: list[str]
    targets: Tensor  # (N,)
    present: Tensor  # (N, M)
    folds: list[Fold]
    dims: dict[str, int] = field(default_factory=dict)
    features: list[dict[str, Description]] = field(default_factory=list)  # by fold, of all rows
    corrupted: list[dict[Condition, Description]] = field(default_factory=list)  # of test rows
    notes: list[str] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)  # (N,) names; samples of one stay together


def open_bench(cfg: BenchmarkConfig) -> tuple[Bench, PairedDataset]:
    """Open the data and deal it out; nothing is computed yet."""
    dataset = open_dataset(cfg.data)
    cfg, dropped = drop_deselected(cfg, dataset.provenance.deselected)
    if not dataset.classes:
        raise FusionZooError(f"{dataset.source} has no target column, and a benchmark needs one")
    if len(dataset.modalities) < 2:
        raise FusionZooError(f"{dataset.source} has one modality: there is nothing to fuse")
    folds = make_folds(dataset, cfg.folds, cfg.seed)
    bench = Bench(
        cfg,
        dataset.modalities,
        dataset.classes,
        dataset.targets,
        dataset.present,
        folds,
        groups=dataset.groups,
    )
    if dropped:
        bench.notes.append(f"Settings left out by --data.modalities: {', '.join(dropped)}.")
    return bench, dataset


def make_folds(dataset: PairedDataset, count: int, seed: int) -> list[Fold]:
    """Return the data's own split, or `count` stratified folds that keep its groups together.

    Of fold f, f is the test split, the next one is for validation, the rest is trained on.
    """
    if count == 0:
        names = dataset.split_names
        for name in SPLITS:
            if name not in names:
                dataset.split(name)  # says what there is
        rows = {
            name: torch.tensor([row for row, own in enumerate(names) if own == name])
            for name in SPLITS
        }
        return [Fold(**rows)]
    if count < 3:
        raise FusionZooError(
            f"--folds {count}: one to test, one to validate and one to train make 3"
        )
    from sklearn.model_selection import StratifiedGroupKFold

    dealer = StratifiedGroupKFold(count, shuffle=True, random_state=seed)
    dealt = dealer.split(dataset.ids, dataset.targets, dataset.groups)
    parts = [torch.from_numpy(part) for _, part in dealt]
    folds = []
    for number, test in enumerate(parts):
        val = parts[(number + 1) % count]
        rest = [p for other, p in enumerate(parts) if other not in (number, (number + 1) % count)]
        folds.append(Fold(torch.cat(rest).sort().values, val, test))
    for number, fold in enumerate(folds):
        known = set(dataset.targets[fold.train].tolist())
        for row in torch.cat([fold.val, fold.test]).tolist():
            if int(dataset.targets[row]) not in known:
                label = dataset.labels[row]
                raise FusionZooError(
                    f"fold {number}: no training sample has the label {label!r};"
                    " fewer folds, or more samples of it"
                )
    return folds


def conditions(bench: Bench) -> list[Condition]:
    """Return every damage that is tested."""
    if not bench.cfg.corruptions:
        return []
    return [
        (modality, name, severity)
        for modality, kind in bench.modalities.items()
        for name in CORRUPTIONS[kind]
        for severity in SEVERITIES
    ]


class Unit(NamedTuple):
    """What one process works off at a time."""

    strategy: str
    fold: int
    seeds: tuple[int, ...]
    shuffled: bool  # labels of training and validation, as a control
    settings: Settings  # of the fusion, complete
    optim: Settings  # what tuning changed
