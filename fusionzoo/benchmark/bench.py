"""The data of a benchmark: open the data set, create the folds, choose the metric."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusionzoo.config import BenchmarkConfig
from fusionzoo.config.schema import drop_deselected
from fusionzoo.datasets import PairedDataset
from fusionzoo.datasets.opening.spec import DataSpec
from fusionzoo.datasets.sources.table_files import read_split_file
from fusionzoo.datasets.tables.splits import SHARES, SPLITS, describe_shares
from fusionzoo.errors import FusionZooError, did_you_mean
from fusionzoo.evaluation.metrics import COMPARED_BY, METRICS, Metric, compared_by
from fusionzoo.evaluation.robustness import CORRUPTIONS, SEVERITIES
from fusionzoo.features.encode import key_of
from fusionzoo.inputs.command import check_splits, is_split_file, split_words
from fusionzoo.inputs.data import VAL_SHARE, with_image_range, with_validation
from fusionzoo.inputs.identity import data_identity
from fusionzoo.structures import seed_of
from fusionzoo.targets import Target
from fusionzoo.training.build import encoders_at_hand
from fusionzoo.training.multitask import Tasks, build_tasks, create_tasks, targets_of
from fusionzoo.training.tasks import OBJECTIVES

FOLDS = 5
SPREAD = "mean ± standard deviation over them"
HELD_OUT = "a tenth of train held out for validation"
VALIDATION_PARTS = 8  # of the samples that a fold does not test, one part in 8 validates
SMALL = 5000  # samples: smaller data sets are cross-validated unless the settings say otherwise
GOES_ON = "the same command goes on"
CTRL_C = "Ctrl-C"  # what stopped it
Condition = tuple[str, str, int]  # modality, corruption, severity
Settings = dict[str, Any]  # of a fusion or of training
Description = dict[str, Any]  # of an entry of the feature cache


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
    default the targets; -1 marks samples without a label, which are trained on (candidates may
    learn from them) but neither validate nor test.
    """
    labels = dataset.targets if labels is None else labels
    if count == 0:
        for name in SPLITS:
            if name not in dataset.split_names:
                dataset.split(name)  # raises an error that lists the splits there are
        return (_labelled(_rows_of(dataset, dataset), labels),)
    if count < 3:
        raise FusionZooError(f"--folds {count}: at least 3, to test, validate and train")
    folds = []
    parts = _split(dataset, torch.arange(len(labels)), labels, count, seed)
    for number, (others, test) in enumerate(parts):
        validations = _split(dataset, others, labels, VALIDATION_PARTS, seed)
        train, val = validations[number % len(validations)]  # not the same samples in every fold
        folds.append(_labelled(Fold(train, val, test), labels))
    return tuple(folds)


def _split(
    dataset: PairedDataset, rows: Tensor, labels: Tensor, count: int, seed: int
) -> list[tuple[Tensor, Tensor]]:
    """Cut rows into stratified parts that keep groups together: (the other rows, the part) each.

    Fewer parts are made where there are fewer groups, or no class has as many samples.
    """
    from sklearn.model_selection import StratifiedGroupKFold

    group_of = dataset.groups
    groups = [group_of[row] for row in rows.tolist()]
    most = int(labels[rows].unique(return_counts=True)[1].max())
    count = max(2, min(count, len(set(groups)), most))
    splitter = StratifiedGroupKFold(count, shuffle=True, random_state=seed)
    with warnings.catch_warnings():  # a class rarer than the parts is in some of them only
        warnings.filterwarnings("ignore", "The least populated class", UserWarning)
        splits = list(splitter.split(groups, labels[rows], groups))
    return [(rows[rest].sort().values, rows[part].sort().values) for rest, part in splits]


def _rows_of(view: PairedDataset, dataset: PairedDataset) -> Fold:
    """Return the rows in a data set of the splits of a view of it."""
    row_of = {key: row for row, key in enumerate(dataset.ids)}
    placed = [(row_of[key], x) for key, x in zip(view.ids, view.split_names, strict=True)]
    return Fold(**{name: torch.tensor([row for row, x in placed if x == name]) for name in SPLITS})


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
    lacking: Counter[str] = Counter()
    for fold in folds:
        trained = set(dataset.targets[fold.train].tolist())
        tested = dataset.targets[fold.test].tolist()
        lacking.update(dataset.classes[label] for label in tested if label not in trained)
    if not lacking:
        return []
    counts = ", ".join(f"{name} ({count})" for name, count in lacking.items())
    return [
        "Samples of these classes are tested in folds or splits whose training samples have none"
        f" of them, and count as errors: {counts}. Fewer folds, or more of these samples, would"
        " help."
    ]


def metric_named(name: str) -> Metric:
    """Return the figure with this name: a built-in one, or that of a registered objective."""
    of_objectives = (getattr(OBJECTIVES[objective].cls, "metric", None) for objective in OBJECTIVES)
    for metric in (*COMPARED_BY.values(), *of_objectives):
        if isinstance(metric, Metric) and metric.name == name:
            return metric
    key = name.rpartition(".")[2]  # of several targets `column.metric`
    higher = {METRICS[x].key: METRICS[x].higher for x in METRICS}
    for task in (OBJECTIVES[objective].cls for objective in OBJECTIVES):
        shown = [getattr(task, "leading", ""), *dict(getattr(task, "shown", ()))]
        errors = getattr(task, "errors", ())
        higher |= {x: x not in errors for x in shown if x not in higher}
    if key in higher:
        return compared_by(name, higher[key])
    raise FusionZooError(f"no metric is named {name!r}: give --plugins the file that defines it")


def fold_labels(tasks: Tasks, target: Tensor) -> Tensor:
    """Return a class of each sample to stratify folds by, int64 (N,): -1 where it has no label.

    The first target's `strata` count; samples without a label of it are a class of their own.
    """
    if tasks.plain:
        return target
    label = target[:, : tasks.columns[0]]
    missing = label.isnan().any(1)
    classes = torch.zeros(len(label), dtype=torch.int64)
    classes[~missing] = tasks.first.target.strata(label[~missing])
    classes = classes.masked_fill(missing, int(classes.max()) + 1)
    return classes.masked_fill(target.isnan().all(1), -1)


class DamagedSamples(NamedTuple):
    """A cache entry of damaged samples."""

    description: Description
    rows: Tensor  # (n,) of the data set, in the order of the entry


@dataclass(frozen=True, eq=False)
class Bench:
    """What all jobs of a benchmark share; never changed. Features stay in the cache's files.

    `open_bench` fills the fields down to `dataset`, `prepare.prepare` the rest, in a new object.
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
    metric: Metric = COMPARED_BY["classification"]  # the figure by which candidates are compared
    identity: Mapping[str, str] = field(default_factory=dict)  # of the data, by part
    dataset: PairedDataset | None = None  # if it was passed as an object; None: cfg.data opens it
    dims: Mapping[str, int] = field(default_factory=dict)  # modality -> width of its features
    features: tuple[Mapping[str, Description], ...] = ()  # by fold: modality -> cache entry
    not_run: Mapping[str, str] = field(default_factory=dict)  # candidate -> what it lacks
    corrupted: tuple[Mapping[Condition, DamagedSamples], ...] = ()  # by fold
    of_folds: int = 0  # how many folds there are, where only the first is here; 0: all are here
    protocol: str = ""  # in a sentence, how the data was split
    # Others' predictions by name, and by fold: logits (N, K) of its test samples.
    predictions: Mapping[str, tuple[Tensor, ...]] = field(default_factory=dict)
    weights: Tensor | None = None  # (N,) how much each sample counts; None: all alike
    weighted_by: str | None = None  # the column of the weights

    def weights_of(self, rows: Tensor) -> Tensor | None:
        """Return how much samples count, (n,); None: all alike."""
        return None if self.weights is None else self.weights[rows]

    @property
    def cross_validated(self) -> bool:
        """Whether the folds are ours, not the data set's own split."""
        return len(self.folds) > 1

    @property
    def from_splits(self) -> bool:
        """Whether the folds are splits that are listed or drawn: a sample may be tested several
        times, or never."""
        return bool(self.cfg.splits or self.cfg.repeats)

    @property
    def fold_word(self) -> str:
        """What texts call a fold."""
        return "split" if self.from_splits else "fold"

    @property
    def test_share(self) -> float:
        """The share of its samples that a fold tests; 0 of a single one, which overlaps none."""
        if len(self.folds) == 1:
            return 0.0
        if not self.from_splits:
            return 1 / len(self.folds)
        sizes = torch.tensor([[len(x.test), len(x.train) + len(x.val)] for x in self.folds])
        return float((sizes[:, 0] / sizes.sum(1)).mean())

    @property
    def num_outputs(self) -> int:
        """The number of logits."""
        if self.scheme is None:
            return len(self.classes)
        return sum(target.width for target in self.scheme)


class Job(NamedTuple):
    """A piece of a benchmark's work: a candidate on a fold, with one seed or several together."""

    candidate: str
    fold: int
    seeds: tuple[int, ...]
    shuffled: bool  # a control: the labels of training and validation are shuffled
    settings: Settings  # all settings of the fusion
    training: Settings  # settings of training that tuning changed: `epochs`, `optim`


def dataset_settings(dataset: PairedDataset) -> dict[str, Any]:
    """Return settings that identify a data set in memory; they cannot open it again."""
    encoders = json.loads(json.dumps(dataset.default_encoders, default=str))
    key = key_of([data_identity(dataset), encoders, dataset.on_error])
    return {"name": dataset.source, "in_memory": key}


def open_bench(cfg: BenchmarkConfig, data: DataSpec | None = None) -> tuple[Bench, PairedDataset]:
    """Open the data set and create the folds; `data` replace those that `cfg` names."""
    cfg = replace(cfg, data=check_splits(cfg, cfg.data))
    data = data or DataSpec(settings=cfg.data)
    opened = data.open(targets_of(cfg))
    if data.is_in_memory:
        cfg = replace(cfg, data={**cfg.data, **dataset_settings(opened)})
    cfg, dropped_flags = drop_deselected(cfg, opened.provenance.deselected)
    if not opened.classes and not opened.scheme:
        raise FusionZooError(f"{opened.source} has no target column, and a benchmark needs one")
    cfg, opened = with_image_range(cfg, opened)  # opens files
    encoders, encoder_notes = encoders_at_hand(opened, cfg.encoders)
    cfg = replace(cfg, encoders=encoders)
    for note in encoder_notes:
        print(note)
    if len(opened.modalities) < 2:
        raise FusionZooError(f"{opened.source} has one modality: there is nothing to fuse")
    tasks = build_tasks(cfg, opened)
    cfg, opened, folds, protocol = _split_data(cfg, opened, fold_labels(tasks, opened.targets))
    refit = cfg.refit if cfg.refit is not None else len(folds) > 1 and cfg.mode == "probe"
    cfg = replace(cfg, tune=tuning_trials(cfg), refit=refit)
    dropped = [f"Settings left out by --data.modalities: {', '.join(dropped_flags)}."]
    notes = [*encoder_notes, *_weights_note(tasks, opened, folds)]
    notes += [*dropped * bool(dropped_flags), *untrained_labels(opened, folds)]
    bench = Bench(
        cfg,
        opened.modalities,
        tuple(opened.classes),
        opened.targets,
        opened.present,
        folds,
        tuple(opened.groups),
        tuple(notes),
        None if opened.scheme is None else tuple(opened.scheme),
        tasks.metric,
        data_identity(opened),
        opened if data.is_in_memory else None,
        protocol=protocol,
        weights=opened.weights,
        weighted_by=opened.weight_column,
    )
    _check_metric(tasks, bench)
    return bench, opened


def _check_metric(tasks: Tasks, bench: Bench) -> None:
    """Raise an error if the chosen metric is not defined on a fold's samples, by any answer."""
    if bench.metric.of_rows:
        return
    splits: dict[str, Tensor] = {}
    for number, fold in enumerate(bench.folds):
        where = f"samples of {bench.fold_word} {number}"
        splits |= {f"validation {where}": fold.val, f"test {where}": fold.test}
        if conditions(bench):
            splits[f"damaged test {where}"] = damaged_rows(bench, fold)
    if not bench.present.all():  # some are compared alone, of all folds together
        splits["test samples"] = torch.cat([fold.test for fold in bench.folds])
    for words, rows in splits.items():
        blank = torch.zeros(len(rows), bench.num_outputs)
        if tasks.scores(blank, bench.targets[rows], bench.weights_of(rows)).isnan().any():
            raise tasks.undefined(f"the {words}")


def _weights_note(tasks: Tasks, dataset: PairedDataset, folds: Sequence[Fold]) -> list[str]:
    """Say by what samples are weighted, for the report; an error where they cannot be."""
    if dataset.weights is None:
        return []
    tasks.check_weights()
    column = dataset.weight_column
    for number, fold in enumerate(folds):
        for name, rows in zip(SPLITS, (fold.train, fold.val, fold.test), strict=True):
            if not (dataset.weights[rows] > 0).any():
                raise FusionZooError(
                    f"fold {number}: all weights of its {name} samples are 0 in column {column!r}"
                    " (--data.weight_column)"
                )
    return [
        f"Samples are weighted by {column}: in training, tuning, every score, interval and test, in"
        " baselines and fitted models. The calibration error, its diagram, the risk and the"
        " controls count all alike; McNemar's test is left out."
    ]


def _split_data(
    cfg: BenchmarkConfig, dataset: PairedDataset, labels: Tensor
) -> tuple[BenchmarkConfig, PairedDataset, tuple[Fold, ...], str]:
    """Split a data set as the settings say; return both, the folds and what was done, in words."""
    views = read_splits(cfg, dataset)
    if views:
        folds = tuple(_labelled(_rows_of(view, dataset), labels) for view in views)
        return cfg, dataset, folds, describe_splits(cfg, views)
    count = cfg.folds
    if count is None:
        count = FOLDS if len(dataset) < SMALL else 0
    cfg, protocol = replace(cfg, folds=count), f"{count} folds, each tested once"
    if not count:
        cfg, validated = with_validation(cfg, dataset)
        protocol = "the data's own split" + f", {HELD_OUT}" * (validated is not dataset)
        dataset = validated
    return cfg, dataset, make_folds(dataset, count, cfg.seed, labels), protocol


def read_splits(cfg: BenchmarkConfig, dataset: PairedDataset) -> list[PairedDataset]:
    """Return a view of the data set for each split of `--splits` or `--repeats`; none without.

    A view has the samples of one split. Where it has no validation samples, a tenth of the training
    samples is held out. Errors name the file or column that cannot be used.
    """
    words = split_words(cfg)
    if cfg.repeats is not None:
        seeds, shares = range(cfg.seed, cfg.seed + cfg.repeats), cfg.data.get("shares", SHARES)
        views = [(f"seed {seed}", dataset.draw_splits(seed, shares)) for seed in seeds]
    else:
        views = [(word, _listed(dataset, word)) for word in words]
    return [_complete(view, name) for name, view in views]


def _listed(dataset: PairedDataset, word: str) -> PairedDataset:
    """Return the samples that a file or a column puts into splits."""
    if is_split_file(word):
        return dataset.with_splits(read_split_file(Path(word).expanduser()), word)
    columns = dataset.table.column_names
    if word not in columns:
        others = [name for name in columns if name not in ("id", "split", "target", "group")]
        raise FusionZooError(
            f"--splits {word}: neither a file, nor a column of {dataset.source}."
            f"{did_you_mean(word, others)}"
        )
    cells = map(str, dataset.chosen(word).fill_null("").to_pylist())
    split_of = {key: cell for key, cell in zip(dataset.ids, cells, strict=True) if cell.strip()}
    return dataset.with_splits(split_of, f"column {word!r}")


def _complete(view: PairedDataset, name: str) -> PairedDataset:
    """Return a view with a validation split; an error if it cannot be trained or tested on."""
    for split in ("train", "test"):
        if split not in view.splits:
            counts = ", ".join(f"{word} ({count:,})" for word, count in view.splits.items())
            raise FusionZooError(f"{name}: no sample is in {split}; there are {counts}")
    return view if "val" in view.splits else view.hold_out(VAL_SHARE)


def describe_splits(cfg: BenchmarkConfig, views: Sequence[PairedDataset]) -> str:
    """Say in a sentence what the splits are and whose validation samples were held out.

    `views` are those of `read_splits`.
    """
    count = f"{len(views)} {'random ' * (cfg.repeats is not None)}split{'s' * (len(views) > 1)}"
    if cfg.repeats is not None:
        shares = describe_shares(cfg.data.get("shares", SHARES))
        last = cfg.seed + cfg.repeats - 1
        seeds = f"seed {last}" if cfg.repeats == 1 else f"seeds {cfg.seed} to {last}"
        text = f"{count} of {shares} ({seeds})"
    else:
        text = f"{count} as listed in {', '.join(split_words(cfg))}"
    held_out = ["held out as val" in view.provenance.split_rule for view in views]
    if any(held_out):
        some = "" if all(held_out) else f" in {sum(held_out)} of them"
        text += f", {HELD_OUT}{some}"
    return f"{text}; {SPREAD}" if len(views) > 1 else text


def tuning_trials(cfg: BenchmarkConfig) -> int:
    """Return the number of tuning trials of each candidate: 8, and none in finetune mode."""
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
    return DataSpec(settings=bench.cfg.data).open(targets_of(bench.cfg))


def conditions(bench: Bench) -> list[Condition]:
    """Return every corruption, of every modality and severity, that candidates are tested on."""
    if bench.cfg.corruptions == "none":
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


def learned_rows(bench: Bench, fold: Fold) -> Tensor:
    """Return the rows that the tested models of a fold learn from, (N,)."""
    return torch.cat([fold.train, fold.val]).sort().values if bench.cfg.refit else fold.train
