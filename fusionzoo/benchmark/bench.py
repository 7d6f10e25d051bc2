"""The data of a benchmark: open the data set and create the folds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusionzoo.config import BenchmarkConfig
from fusionzoo.config.deselected import drop_deselected
from fusionzoo.datasets import PairedDataset
from fusionzoo.errors import FusionZooError
from fusionzoo.evaluation.robustness import CORRUPTIONS, SEVERITIES
from fusionzoo.features.identity import data_identity
from fusionzoo.rng import seed_of
from fusionzoo.targets import Target
from fusionzoo.training.build import open_dataset
from fusionzoo.training.tasks.multitask import Tasks, build_tasks, create_tasks, targets_of

from .folds import FOLDS, Fold, make_folds, untrained_labels
from .metric import METRICS, Metric, fold_labels, metric_of

SMALL = 5000  # samples: smaller data sets are cross-validated unless the settings say otherwise
Condition = tuple[str, str, int]  # modality, corruption, severity
Settings = dict[str, Any]  # of a fusion or of training
Description = dict[str, Any]  # of an entry of the feature cache


class Damaged(NamedTuple):
    """A cache entry of damaged samples."""

    description: Description
    rows: Tensor  # (n,) of the data set, in the order of the entry


@dataclass(frozen=True, eq=False)
class Bench:
    """What all trials of a benchmark share; never changed. Features stay in the cache's files.

    `open_bench` fills the fields down to `dataset`, `features.prepare` the rest, in a new object.
    """

    cfg: BenchmarkConfig
    modalities: Mapping[str, str]  # name -> kind
    classes: tuple[str, ...]
    targets: Tensor  # (N,) classes; of other targets (N, C), NaN where a label is missing
    present: Tensor  # (N, M)
    folds: tuple[Fold, ...]
    groups: tuple[str, ...] = ()  # (N,) names; folds keep the samples of a group together
    notes: tuple[str, ...] = ()  # shown in the report
    scheme: tuple[Target, ...] | None = None  # the targets; None: one class of `classes`
    metric: Metric = METRICS["classification"]  # the figure by which strategies are compared
    identity: Mapping[str, str] = field(default_factory=dict)  # of the data, by part
    dataset: PairedDataset | None = None  # if it was passed as an object; None: cfg.data opens it
    dims: Mapping[str, int] = field(default_factory=dict)  # modality -> width of its features
    features: tuple[Mapping[str, Description], ...] = ()  # by fold: modality -> cache entry
    trained_alone: tuple[str, ...] = ()  # modalities whose encoders learnt from a fold's labels
    corrupted: tuple[Mapping[Condition, Damaged], ...] = ()  # by fold
    damaged_train: tuple[Mapping[Condition, Damaged], ...] = ()  # by fold

    @property
    def cross_validated(self) -> bool:
        """Whether the folds are ours, not the data set's own split."""
        return len(self.folds) > 1

    @property
    def num_outputs(self) -> int:
        """The number of logits."""
        if self.scheme is None:
            return len(self.classes)
        return sum(target.width for target in self.scheme)


class Unit(NamedTuple):
    """A unit of work: one trial, or the trials of several seeds that are trained together."""

    strategy: str
    fold: int
    seeds: tuple[int, ...]
    shuffled: bool  # a control: the labels of training and validation are shuffled
    settings: Settings  # all settings of the fusion
    training: Settings  # settings of training that tuning changed: `epochs`, `optim`
    whole: bool = True  # whether to examine subsets and damage too, not the test split only


def open_bench(
    cfg: BenchmarkConfig, dataset: PairedDataset | None = None
) -> tuple[Bench, PairedDataset]:
    """Open the data set, unless it is passed as an object, and create the folds."""
    opened = open_dataset(cfg.data, targets_of(cfg), dataset)
    cfg, dropped_flags = drop_deselected(cfg, opened.provenance.deselected)
    if not opened.classes and not opened.scheme:
        raise FusionZooError(f"{opened.source} has no target column, and a benchmark needs one")
    if len(opened.modalities) < 2:
        raise FusionZooError(f"{opened.source} has one modality: there is nothing to fuse")
    tasks = build_tasks(cfg, opened)
    count = cfg.folds
    if count is None:
        count = FOLDS if len(opened) < SMALL else 0
    cfg = replace(cfg, folds=count, tune=tuning_trials(cfg))
    folds = make_folds(opened, count, cfg.seed, fold_labels(tasks, opened.targets))
    notes = [f"Settings left out by --data.modalities: {', '.join(dropped_flags)}."]
    bench = Bench(
        cfg,
        opened.modalities,
        tuple(opened.classes),
        opened.targets,
        opened.present,
        folds,
        tuple(opened.groups),
        (*(notes if dropped_flags else ()), *untrained_labels(opened, folds)),
        None if opened.scheme is None else tuple(opened.scheme),
        metric_of(tasks),
        data_identity(opened),
        None if dataset is None else opened,
    )
    return bench, opened


def tuning_trials(cfg: BenchmarkConfig) -> int:
    """Return the number of Optuna trials of each strategy: 8, and none in finetune mode."""
    if cfg.tune is not None:
        return cfg.tune
    return 0 if cfg.mode == "finetune" else 8


def tasks_of(bench: Bench, rows: Tensor) -> Tasks:
    """Create the tasks from the labels of these rows, those of a training split."""
    return create_tasks(bench.cfg, bench.scheme, bench.classes, bench.targets[rows])


def target_spec(bench: Bench) -> dict[str, Any]:
    """Return the part of a model's spec that describes its targets."""
    if bench.scheme is None:
        return {}
    return {"targets": [target.spec for target in bench.scheme]}


def dataset_of(bench: Bench) -> PairedDataset:
    """Return the data set of a benchmark, opened again where it is known by its settings only."""
    if bench.dataset is not None:
        return bench.dataset
    return open_dataset(bench.cfg.data, targets_of(bench.cfg))


def conditions(bench: Bench) -> list[Condition]:
    """Return every corruption, of every modality and severity, that strategies are tested on."""
    if not bench.cfg.corruptions:
        return []
    severities = SEVERITIES if bench.cfg.corruptions == "full" else SEVERITIES[::2]
    return [
        (modality, corruption, severity)
        for modality, kind in bench.modalities.items()
        for corruption in CORRUPTIONS[kind]
        for severity in severities
    ]


def damaged_rows(bench: Bench, fold: Fold) -> Tensor:
    """Return the test samples of a fold that are tested damaged: a stratified third, or all."""
    if bench.cfg.corruptions == "full":
        return fold.test
    generator = torch.Generator().manual_seed(seed_of("damaged", bench.cfg.seed))
    rows = fold.test[torch.randperm(len(fold.test), generator=generator)]
    if bench.scheme is None:  # every third of the samples in the order of their classes
        rows = rows[bench.targets[rows].argsort(stable=True)]
    return rows[::3].sort().values
