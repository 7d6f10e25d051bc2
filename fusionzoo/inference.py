"""Evaluate and predict with a finished model, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial as bind
from itertools import compress
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import torch
import torch.nn.functional as F
from torch import Tensor

from fusionzoo.config import EmbedConfig, EvaluateConfig, PredictConfig, merge, read_yaml
from fusionzoo.config.flags import Tree
from fusionzoo.datasets import DATASETS, PairedBatchSampler, PairedDataset, make_sampler
from fusionzoo.datasets.loader import make_loader
from fusionzoo.datasets.opening.as_trained import (
    complete_for_model,
    refuse_without_labels,
)
from fusionzoo.datasets.opening.complete import target_columns
from fusionzoo.datasets.opening.naming import IN_MEMORY, TABLE, resolve_name
from fusionzoo.datasets.opening.spec import DataSpec
from fusionzoo.datasets.sources.cell_kinds import NONE
from fusionzoo.datasets.sources.infer import named_columns
from fusionzoo.datasets.tables.provenance import MANY_OF, TYPES
from fusionzoo.datasets.tables.table import word_list
from fusionzoo.datasets.tables.tabular import strange_cells
from fusionzoo.encoders.augment import refuse_augmentation
from fusionzoo.encoders.tabular import Categories, Column, Numbers, TabularProcessor
from fusionzoo.errors import FusionZooError, did_you_mean
from fusionzoo.evaluation.measure import (
    POSITIVE,
    THRESHOLDS,
    WEIGHTED_BY,
    Answers,
    Figures,
    logits_of,
    measure,
)
from fusionzoo.evaluation.retrieval import Relevance, relevance_labels, retrieval_intervals
from fusionzoo.evaluation.shapley import subset_label, subsets
from fusionzoo.evaluation.subgroups import SUBGROUPS, subgroup_metrics, two_class_intervals
from fusionzoo.features.frozen import stored_features
from fusionzoo.files import replacing, write_json
from fusionzoo.ground.cells import fold
from fusionzoo.ground.progress import progress_bar
from fusionzoo.inputs.cut import notes_of_cuts
from fusionzoo.machine.devices import pick_device
from fusionzoo.machine.distributed import World
from fusionzoo.model.answering import Answering
from fusionzoo.model.fusion_model import FusionModel
from fusionzoo.model.loading import load
from fusionzoo.model.trained_on import SEEN, TrainedOn, as_trained, count_seen, seen_rows
from fusionzoo.structures import (
    KINDS,
    Batch,
    Features,
    Labels,
    Prediction,
    check_finite,
    evaluating,
)
from fusionzoo.targets import AnyOf, OneOf, join_words, label_word
from fusionzoo.training.calibrate import calibratable
from fusionzoo.training.calibrate import measure as measure_calibration
from fusionzoo.training.loaders import num_workers
from fusionzoo.training.multitask import Tasks
from fusionzoo.training.tasks import OBJECTIVES, standard_objective

A = TypeVar("A", bound=Answering)
Settings = EvaluateConfig | PredictConfig
RETRIEVAL = "retrieval"
INTERVALS = "intervals"  # key of figures of two classes with their 95 % intervals
CALIBRATION = "calibration"  # key of the figures of probabilities, sets and intervals
STRANGE: dict[type[Column], str] = {
    Categories: "categories that the model was not trained on",
    Numbers: "numbers far outside of the range that the model was trained on",
}


def data_settings_of(given: Tree, model: str, trained_on: TrainedOn | None) -> DataSpec:
    """Return a data set's settings: those given, read as the training data were; without a name
    merged over the stored ones.

    Stored are those in the config.yaml of a run folder, else of the model, whose author may be
    another one: files that it names are not opened unasked.
    """
    recipe = Path(model) / "config.yaml"
    run = read_yaml(recipe) if model and recipe.is_file() else {}
    stored = run.get("data") or (trained_on and trained_on.settings)
    chosen = resolve_name(given) if given.get("name") else given  # a name may be a path
    files = [] if run else _files_of({x: y for x, y in (stored or {}).items() if x not in chosen})
    if files and chosen.get("name", TABLE) == TABLE:
        raise FusionZooError(
            f"--data.{files[0][0]} is missing: {model or 'the model'} was trained on {files[0][1]},"
            " as it says, which is opened only if you name it"
        )
    if given.get("name"):
        return complete_for_model(given, stored or {})
    if not stored or stored.get("name") == IN_MEMORY:
        known = "was trained on data in memory" if stored else "does not say what it was trained on"
        raise FusionZooError(
            "--data.name is missing: a data set, or manifest for a file;"
            f" {model or 'the model'} {known}"
        )
    if stored.get("name") == TABLE and not (given.get("root") or stored.get("root")):
        raise FusionZooError(
            f"--data.root is missing: {model or 'the model'} was put together from models of"
            " several files, and has no data of its own: name a table with the columns of all"
        )
    if stored.get("name") == TABLE and given.get("root"):
        return complete_for_model({"name": TABLE, **given}, stored)  # the data have moved
    settings = merge(stored, given)
    settings.pop("augment", None)  # of training samples
    if settings.get("weight_column") == NONE:
        settings["weight_column"] = None
    if run.get("plugins") and settings["name"] not in DATASETS:
        raise FusionZooError(
            f"unknown data set {settings['name']!r}: the run was trained with --plugins"
            f" {run['plugins']}, which is not imported unless it is given here too"
        )
    return DataSpec(settings=settings)


def _files_of(settings: Mapping[str, Any], below: str = "") -> list[tuple[str, str]]:
    """Return the files, folders and URLs that settings of a data set name, with their settings."""
    root = settings.get("root")
    files = [(f"{below}root", str(root))] if root and isinstance(root, str | Path) else []
    for name, value in settings.items():
        if isinstance(value, Mapping):
            files += _files_of(value, f"{below}{name}.")
    return files


def refuse_to_replace(settings: Mapping[str, Any], out: str | None, flag: str = "--out") -> None:
    """Raise an error if the file to write, which `flag` names, is one with the data."""
    for name, file in _files_of(settings):
        if out and Path(out).expanduser().resolve() == Path(file).expanduser().resolve():
            raise FusionZooError(
                f"{flag} names {out}, from which the data are read (--data.{name}): name"
                " another file"
            )


def open_model(cfg: Settings, model: FusionModel | None) -> FusionModel:
    device = pick_device(cfg.device)
    if model is not None:
        return model if model.device == device else model.to(device)
    if not cfg.model:
        raise FusionZooError("--model is missing: a model folder, or a run folder such as runs/a")
    return load(cfg.model, device, plugins=cfg.plugins)


def open_data(cfg: Settings, model: Answering, data: DataSpec | None) -> PairedDataset:
    """Open the data, to evaluate with the columns of labels that the model was trained on."""
    refuse_augmentation(cfg.data)
    measured = (model.targets or ()) if isinstance(cfg, EvaluateConfig) else ()
    targets = {target.name: target.kind for target in measured}
    dataset, _ = open_for_model(cfg, model, data, targets)
    return rows_to_read(model, dataset, cfg.split)


def rows_to_read(
    model: Answering, dataset: PairedDataset, split: str, *, warn: bool = True
) -> PairedDataset:
    """Return the samples of a split; modalities that the model does not read are not decoded."""
    read = [name for name in dataset.modalities if name in model.modalities]
    if not read:
        raise FusionZooError(
            f"the model reads {', '.join(model.modalities)};"
            f" the data has {', '.join(dataset.modalities)}"
        )
    rows = dataset if split == "all" else dataset.split(split)
    if warn:
        warn_of_strange(model, rows)
    return rows.only(read) if len(read) < len(rows.modalities) else rows


def warn_of_strange(model: Answering, dataset: PairedDataset) -> None:
    """Say what modalities that the model reads no sample has, and what cells training did not see:
    other categories, numbers far outside of its range."""
    has = dict(zip(dataset.modalities, dataset.present.any(0).tolist(), strict=True))
    absent = [name for name in model.modalities if not has.get(name)]
    if absent and len(dataset):
        print(
            f"warning: missing in all samples, as {dataset.source} has none: {', '.join(absent)}"
            f" (--data.columns.{absent[0]} names the column of a table)"
        )
    if isinstance(model, FusionModel):
        for note in notes_of_cuts(model.named_encoders(), dataset):
            print(note)
    strange: dict[type[Column], list[str]] = {kind: [] for kind in STRANGE}
    for name, processor in model.collate().processors.items():
        if not isinstance(processor, TabularProcessor) or dataset.modalities.get(name) != "tabular":
            continue
        columns = {fold(column.name): column for column in processor.columns}
        tests = {column: x.is_strange for column, x in columns.items()}
        for column, note in strange_cells(dataset, name, tests).items():
            strange[type(columns[column])].append(f"{note} ({name})")
    for kind, notes in strange.items():
        if notes:
            print(f"warning: {STRANGE[kind]}: {'; '.join(notes)}")


def open_for_model(
    cfg: Settings | EmbedConfig,
    model: Answering,
    data: DataSpec | None,
    targets: Mapping[str, str] | None,
) -> tuple[PairedDataset, Tree]:
    """Open a data set as the model's training data were read; return it with its settings.

    `data` replace those that `cfg` names.
    """
    data = data or DataSpec(settings=cfg.data)
    if data.dataset is not None:
        return _split_as_trained(data.open(targets), model), data.recorded
    wanted = target_columns(data.settings, cfg.target)
    spec = _without_further_media(data_settings_of(wanted, cfg.model, model.trained_on), model)
    refuse_to_replace(spec.settings, cfg.out)
    if not isinstance(cfg, EvaluateConfig) and spec.settings.get("weight_column") is not None:
        # Nothing is measured.
        unweighted = {x: y for x, y in spec.settings.items() if x != "weight_column"}
        spec = replace(spec, settings=unweighted)
    if isinstance(cfg, EvaluateConfig) and (model.classes or model.targets):
        columns = [x.get("columns") or {} for x in (model.data_settings, wanted)]
        refuse_without_labels(spec, [*(targets or ["target"])], *columns)
    spec.show()
    if not isinstance(cfg, EmbedConfig):  # whose file is searched by id
        spec = spec.with_repeated_ids()
    opened = spec.open(targets)
    if repeated := opened.provenance.repeated_ids:
        print(f"rows with an id that an earlier row has: {len(repeated):,}; each is answered")
    settings = data.recorded if data.is_in_memory else spec.settings
    return _split_as_trained(opened, model), settings


def _without_further_media(spec: DataSpec, model: Answering) -> DataSpec:
    """Drop columns called `image`, `audio`, ... that the model does not read."""
    if spec.loaded is None:
        return spec
    targets = [target.name for target in model.answer_targets]
    read = {fold(name) for name in (*model.modalities, *targets)} | named_columns(spec.settings)
    table = spec.loaded.table
    further = [x for x in table.column_names if fold(x) in KINDS and fold(x) not in read]
    return replace(spec, loaded=replace(spec.loaded, table=table.drop_columns(further)))


def _split_as_trained(dataset: PairedDataset, model: Answering) -> PairedDataset:
    """Return the same samples; splits by hash are as where the model's labels are read, and images
    have the range of training."""
    dataset = dataset.read_as(model.data_settings)
    if not (model.classes or model.targets):
        return dataset
    return dataset.split_by_labels({target.name: target.kind for target in model.answer_targets})


@torch.no_grad()
def encode_batches(
    model: FusionModel, dataset: PairedDataset, cfg: Settings, label: str, *, by_length: bool
) -> Iterator[tuple[Batch, dict[str, Features]]]:
    """Yield every batch and its features; shows progress. The caller too needs `torch.no_grad`.

    `by_length` puts samples of similar length together, which is faster; else the data's order.
    """
    stored = stored_features(model, dataset)
    for note in stored.notes:
        print(note)
    sampler = make_sampler(dataset, shuffle=False, pad=False)
    lengths = dataset.lengths() if by_length else None
    loader = make_loader(
        stored.view(dataset),
        PairedBatchSampler(sampler, cfg.batch_size, lengths=lengths),
        stored.collate(model.collate()),
        num_workers=num_workers(cfg.num_workers, World()),
    )
    progress = progress_bar(total=len(dataset), desc=label, unit="sample")
    with progress, evaluating(model):
        for batch in loader:
            batch = batch.to(model.device)
            yield batch, model.encode(batch)
            progress.update(len(batch.ids))
    warn_of_failures(dataset)


def warn_of_failures(dataset: PairedDataset) -> None:
    """Say which values could not be decoded since the data set was opened."""
    failures = dataset.failures()
    if failures:
        sample_id, modality = failures[0]
        print(f"warning: {len(failures)} values could not be decoded: {sample_id} ({modality}) ...")


def retrieval_metrics(answers: Answers) -> dict[str, Any]:
    """Return `{"image_to_text": {"recall@1": {"mean": ..., "low": ..., "high": ...}}}`, or {}."""
    directions = answers.retrieval(retrieval_intervals) or {}
    return {
        direction: {name: dict(x._asdict()) for name, x in figures.items()}
        for direction, figures in directions.items()
    }


def interval_rows(lines: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of a table of figures with intervals."""
    rows = [
        [line, *(f"{x['mean']:.3f} [{x['low']:.3f}, {x['high']:.3f}]" for x in figures.values())]
        for line, figures in lines.items()
    ]
    return ["", *next(iter(lines.values()))], rows


@torch.no_grad()
def evaluate(
    cfg: EvaluateConfig, model: FusionModel | None = None, data: DataSpec | None = None
) -> dict[str, Any]:
    """Return the metrics of a model on a split: of the fusion, and under `unimodal` of each
    modality's own head, unless no sample has it; after contrastive training, under `retrieval`, how
    well each modality finds the others, with 95 % intervals; under `calibration` how far
    probabilities, sets and intervals hold, see `training.calibrate.measure`. Of two classes
    `positive` names the positive one, and `intervals` has AUROC, sensitivity and specificity, each
    with `mean`, `low` and `high` of its 95 % interval.

    Of data with a `weight_column` every sample counts by its weight, but for retrieval, and
    `weighted_by` names the column. Under `seen_in_training`: how many of the samples the model was
    trained and validated on, by their ids; None if its folder does not say. With `every_subset`
    also, under `subsets`, those of the fusion given each subset of the modalities, among the
    samples that have one of them, and with `subgroups` under that name the scores by group, see
    `evaluation.subgroups`. `model` and `data` replace those that `cfg` names. Samples without a
    label are left out. `cfg.out` names a JSON file to write.
    """
    model = open_model(cfg, model).with_thresholds(cfg.threshold, cfg.thresholds)
    if not (model.classes or model.targets):
        if not model.align:
            raise FusionZooError(
                "this model was trained without a target: there is nothing to measure"
            )
        return _written(cfg, _retrieval_only(cfg, model, open_data(cfg, model, data)))
    dataset = labelled(model, open_data(cfg, model, data))
    seen = report_seen(model, dataset)
    weighted = {} if dataset.weight_column is None else {WEIGHTED_BY: dataset.weight_column}
    chosen = subsets(list(model.modalities))[1:-1] if cfg.every_subset else []
    answers = collect_answers(model, dataset, cfg, "evaluate", chosen)
    calibrated = {}
    if model.calibration is not None:
        calibrated[CALIBRATION] = measure_calibration(
            model.calibration, model.answer_targets, *calibratable(answers)
        )
    tasks = tasks_of_model(model, answers.target)
    if weighted:
        tasks.check_weights()
    is_moved = cfg.threshold is not None or bool(cfg.thresholds)
    figures = measure(tasks, answers, slow=not is_moved)
    limits = {}
    if is_moved:  # only the losses of the others count
        answers = moved_by_thresholds(model, answers)
        figures = with_losses(measure(tasks, answers, slow=True), figures)
        limits[THRESHOLDS] = thresholds_of(model)
    positive = {POSITIVE: tasks.positive} if tasks.positive else {}
    nested = nested_metrics(figures) | positive | weighted | limits
    two_classes = tasks.two_classes(answers.fused, answers.target)
    if bounds := two_class_intervals(two_classes, answers, dataset):
        nested[INTERVALS] = {name: x._asdict() for name, x in bounds.items()}
    nested |= calibrated | {SEEN: seen}
    if cfg.subgroups:
        if len(tasks.tasks) > 1:
            raise FusionZooError("--subgroups compares by one target, and this model has several")
        columns = word_list(cfg.subgroups)
        nested[SUBGROUPS] = subgroup_metrics(tasks.first, answers, dataset, columns)
    retrieval = retrieval_metrics(answers)
    return _written(cfg, nested | ({RETRIEVAL: retrieval} if retrieval else {}))


@torch.no_grad()
def collect_answers(
    model: FusionModel,
    dataset: PairedDataset,
    cfg: Settings,
    label: str,
    chosen: Sequence[frozenset[str]] = (),
) -> Answers:
    """Answer samples that `labelled` returned, also given the `chosen` subsets of modalities; with
    their vectors in the common space, if the model has one."""
    labels = encode_labels(model, dataset)
    row_of_id = {sample_id: row for row, sample_id in enumerate(dataset.ids)}
    parts: list[Answers] = []
    for batch, features in encode_batches(model, dataset, cfg, label, by_length=True):
        fused, alone, by_subset = logits_of(model, features, chosen)
        check_finite(fused, ids=batch.ids)
        present = dict(zip(model.modalities, batch.present.unbind(1), strict=True))
        aligned = {}
        for name, project in (model.align or {}).items():
            pooled = features[name].pooled.masked_fill(~present[name][:, None], 0)
            aligned[name] = F.normalize(project(pooled).float())
        part = Answers(
            target=labels[[row_of_id[sample_id] for sample_id in batch.ids]],
            present=present,
            fused=fused,
            alone=alone,
            by_subset=by_subset,
            aligned=aligned,
            relevance=relevance_labels(dataset).of(batch.ids) if aligned else Relevance(),
            ids=batch.ids,
            weights=batch.weight,
            calibrated=model.calibrate(fused.float(), features),
        )
        parts.append(part.cpu())
    return Answers.join(parts)


def moved_by_thresholds(model: FusionModel, answers: Answers) -> Answers:
    """Return the answers with logits moved by the model's thresholds, see `Calibration.move`."""
    assert model.calibration is not None
    move = bind(model.calibration.move, model.answer_targets)
    has_any = answers.has_any(answers.present)
    nobody = torch.zeros_like(has_any)  # heads of single modalities have no temperature
    return replace(
        answers,
        fused=move(answers.fused.float(), has_any),
        alone={name: move(x.float(), nobody) for name, x in answers.alone.items()},
        by_subset={names: move(x.float(), has_any) for names, x in answers.by_subset.items()},
    )


def with_losses(moved: Figures, figures: Figures) -> Figures:
    """Return the figures of moved logits with the losses of those that were not moved."""

    def mend(by_threshold: Mapping[str, float], plain: Mapping[str, float]) -> dict[str, float]:
        losses = {name: x for name, x in plain.items() if name.rpartition(".")[2] == "loss"}
        return {**by_threshold, **losses}

    return Figures(
        mend(moved.fused, figures.fused),
        {name: mend(x, figures.alone[name]) for name, x in moved.alone.items()},
        {names: mend(x, figures.by_subset[names]) for names, x in moved.by_subset.items()},
    )


def thresholds_of(model: FusionModel) -> dict[str, float]:
    """Return the thresholds by which a model answers, by label; of several targets `tags.sea`."""
    assert model.calibration is not None
    entries = model.calibration.targets
    return {
        f"{name}.{label}" if len(entries) > 1 else label: x
        for name, entry in entries.items()
        for label, x in entry.thresholds.items()
    }


def nested_metrics(figures: Figures) -> dict[str, Any]:
    """Return the metrics of the fusion; under `unimodal` of each modality's own head, and under
    `subsets` of the fusion given these, among the samples that have one of them."""
    subsets = {subset_label(names): x for names, x in figures.by_subset.items()}
    below = {"unimodal": figures.alone, "subsets": subsets}
    return {**figures.fused, **{name: x for name, x in below.items() if x}}


def _retrieval_only(
    cfg: EvaluateConfig, model: FusionModel, dataset: PairedDataset
) -> dict[str, Any]:
    """Return the figures of a model that was trained without a target."""
    seen = report_seen(model, dataset)
    retrieval = retrieval_metrics(collect_answers(model, dataset, cfg, "evaluate"))
    if not retrieval:
        raise FusionZooError(
            f"{dataset.source}: no sample has two modalities, so there is nothing to measure"
        )
    return {RETRIEVAL: retrieval, SEEN: seen}


def report_seen(model: FusionModel, dataset: PairedDataset) -> dict[str, int | None]:
    """Count the samples that training read, and say so; None where that is not known."""
    seen = count_seen(model.trained_on, dataset, list(model.modalities))
    if None in seen.values():
        print("whether the model was trained on some of these samples is not known")
    elif any(seen.values()):
        what = "contents" if dataset.provenance.numbered else "ids"
        print(
            f"warning: of the {len(dataset):,} samples, {seen['train']:,} have {what} that the"
            f" model was trained on and {seen['val']:,} {what} that it was validated on: these"
            " figures are not those of new data"
        )
    return seen


def _written(cfg: EvaluateConfig, metrics: dict[str, Any]) -> dict[str, Any]:
    """Write the metrics to `cfg.out`, if any, and return them."""
    if cfg.out:
        write_json(Path(cfg.out), metrics)
    return metrics


def labelled(model: FusionModel, dataset: PairedDataset) -> PairedDataset:
    """Return the samples with a label of the model's classes; other labels are an error."""
    if model.targets is not None:
        return dataset
    labels, classes = dataset.labels, set(model.classes)
    for sample_id, label in zip(dataset.ids, labels, strict=True):
        if label is not None and label not in classes:
            raise FusionZooError(
                f"{dataset.source}, sample {sample_id!r}: label {label!r} is none of the model's"
                f" {len(model.classes)} classes.{did_you_mean(label, model.classes)}"
            )
    rows = [row for row, label in enumerate(labels) if label is not None]
    if not rows:
        raise FusionZooError(
            f"{dataset.source}: no sample has a label, so nothing can be measured: --target names"
            " the column of a table"
        )
    return dataset.subset(rows)


def encode_labels(model: FusionModel, dataset: PairedDataset) -> Tensor:
    """Encode labels as the model was trained: indices (N,), or numbers (N, C), NaN if missing."""
    if model.targets is None:
        index_of = {label: index for index, label in enumerate(model.classes)}
        return torch.tensor([index_of[str(label)] for label in dataset.labels])
    rows = []
    columns = {target.name: dataset.column(target.name) for target in model.targets}
    for row in range(len(dataset)):
        values: list[float] = []
        for target in model.targets:
            cell = columns[target.name][row]
            values += [float("nan")] * target.columns if not cell else target.encode(cell)
        rows.append(values)
    return torch.tensor(rows, dtype=torch.float32)


def tasks_of_model(model: FusionModel, labels: Tensor) -> Tasks:
    """Return the tasks that measure the model's answers."""
    if model.targets is None:
        target = OneOf("target", tuple(model.classes))
        return Tasks([OBJECTIVES.create("classification", target, labels)], plain=True)
    parts = labels.split([target.columns for target in model.targets], dim=1)
    tasks = [
        OBJECTIVES.create(standard_objective(target.kind), target, values[~values.isnan().any(-1)])
        for target, values in zip(model.targets, parts, strict=True)
    ]
    return Tasks(tasks, [1.0] * len(tasks))


def predict(
    cfg: PredictConfig, model: FusionModel | None = None, data: DataSpec | None = None
) -> Path | pa.Table:
    """Predict every sample: `id`, `label`, a probability per class, `present_<modality>`.

    Ids have the name of their column in the user's table, and `id` where there is none. Ids and
    labels have the types that they have in the tables asked about and trained on. A column
    `seen_in_training` marks samples that training or validation read, if it is known of some.

    With `cfg.coverage` also `set`, or `lower` and `upper` of numbers and levels, which hold the
    truth with that chance. Rows stand in the order of the data. Several targets have columns
    `<target>.label` and so on; numbers have no probabilities. Returns the file written (`cfg.out`,
    .parquet or .csv), or without one the table in memory.
    """
    model, opened = open_to_predict(cfg, open_model(cfg, model), data)
    answered = calibrated_batches(model, opened, cfg)
    return write_tables(cfg, prediction_tables(model, opened, cfg, answered))


def open_to_predict(cfg: PredictConfig, model: A, data: DataSpec | None) -> tuple[A, PairedDataset]:
    """Return the model, with its thresholds, and the samples that a prediction is about."""
    if not (model.classes or model.targets):
        raise FusionZooError("this model was trained without a target: it can only embed")
    model = model.with_thresholds(cfg.threshold, cfg.thresholds)
    say_unlearnt(model)
    if cfg.coverage is not None:
        check_coverage(model, cfg.coverage)
    return model, open_data(cfg, model, data)


def say_unlearnt(model: Answering) -> None:
    """Say which multilabel targets have no thresholds."""
    for target in model.answer_targets:
        entry = model.calibration and model.calibration.targets[target.name]
        if isinstance(target, AnyOf) and not (entry and entry.thresholds):
            print(
                f"{target.name}: no thresholds were learnt, so labels are answered above 0.5"
                " (--thresholds sets others)"
            )


def write_tables(cfg: PredictConfig, tables: Iterator[pa.Table]) -> Path | pa.Table:
    """Write tables of predictions as they come to `cfg.out`; without one, return them as one."""
    if not cfg.out:
        return pa.concat_tables(tables)
    path = Path(cfg.out)
    writer_of = _writer_for(path)
    writer: Any = None
    with replacing(path) as partial:
        try:
            for table in map(_with_joined_lists, tables) if path.suffix == ".csv" else tables:
                writer = writer or writer_of(str(partial), table.schema)
                writer.write_table(table)
        finally:
            if writer is not None:
                writer.close()
    return path


def _with_joined_lists(table: pa.Table) -> pa.Table:
    """Return a table whose lists of labels are text, `sun;beach`, for a file without lists."""
    for place, field in enumerate(table.schema):
        if pa.types.is_list(field.type):
            words = [join_words([*map(label_word, x)]) for x in table[field.name].to_pylist()]
            table = table.set_column(place, field.name, pa.array(words, pa.string()))
    return table


def check_coverage(model: Answering, coverage: float) -> None:
    """Raise an error where the model folder's validation scores do not allow this coverage."""
    if model.calibration is None:
        raise FusionZooError(
            f"--coverage {coverage:g}: the model folder holds no scores of validation data; train"
            " again with --train.calibrate auto"
        )
    for target in model.answer_targets:
        model.calibration.targets[target.name].limit(coverage, target.name)


def _writer_for(path: Path) -> Callable[[str, pa.Schema], Any]:
    if path.suffix == ".parquet":
        from pyarrow.parquet import ParquetWriter

        return bind(ParquetWriter, write_page_checksum=True)
    if path.suffix == ".csv":
        from pyarrow.csv import CSVWriter

        return CSVWriter
    raise FusionZooError(f"--out {path}: predictions are written as .parquet or .csv")


@torch.no_grad()
def calibrated_batches(
    model: FusionModel, dataset: PairedDataset, cfg: PredictConfig
) -> Iterator[tuple[Batch, Tensor]]:
    """Yield every batch and its logits (B, K), in the data's order."""
    for batch, features in encode_batches(model, dataset, cfg, "predict", by_length=False):
        yield batch, model.calibrated_logits(features)


def prediction_tables(
    model: Answering,
    dataset: PairedDataset,
    cfg: PredictConfig,
    answered: Iterable[tuple[Batch, Tensor]],
) -> Iterator[pa.Table]:
    """Yield a table of predictions for each batch and its logits (B, K), divided by the
    temperatures."""
    repeated = dataset.provenance.repeated_ids or {}
    types = {**model.types_of_labels, "id": dataset.provenance.types.get("id", "")}
    seen = _ids_seen(model, dataset)
    for batch, logits in answered:
        named = batch._replace(ids=[repeated.get(x, x) for x in batch.ids])
        answers = model.decode(logits, named.ids)
        table = prediction_table(named, answers, list(model.modalities), types)
        id_column = dataset.provenance.id_column
        if id_column.casefold() not in {x.casefold() for x in table.column_names[1:]}:
            table = table.rename_columns({"id": id_column})
        columns: dict[str, list[Any]] = {}
        if cfg.coverage is not None and model.calibration is not None:
            columns |= model.calibration.regions(model.answer_targets, logits, cfg.coverage)
        if seen:
            columns[SEEN] = [x in seen for x in batch.ids]
        for name, values in columns.items():
            place = table.num_columns - len(model.modalities)  # before `present_<modality>`
            table = table.add_column(place, name, pa.array(values))
        yield table


def _ids_seen(model: Answering, dataset: PairedDataset) -> set[str]:
    """Return the ids of the samples that training or validation read, as far as is known."""
    by_split = seen_rows(model.trained_on, dataset, list(model.modalities)).values()
    masks = [x.tolist() for x in by_split if x is not None]
    return {sample_id for mask in masks for sample_id in compress(dataset.ids, mask)}


def prediction_table(
    batch: Batch,
    predictions: Sequence[Any],
    modalities: Sequence[str],
    types: Mapping[str, str],
) -> pa.Table:
    """Return the predictions of a batch, one row per sample, with ids and labels of these types."""
    columns: dict[str, Any] = {"id": [*map(TYPES[types.get("id", "")], batch.ids)]}
    for row in (_prediction_row(prediction, types) for prediction in predictions):
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    present = batch.present.cpu().unbind(1)
    columns |= {f"present_{name}": x.tolist() for name, x in zip(modalities, present, strict=True)}
    return pa.table(columns)


def _prediction_row(prediction: Any, types: Mapping[str, str]) -> dict[str, Any]:
    """Return the columns of one sample's prediction."""
    by_target = prediction if isinstance(prediction, dict) else {"target": prediction}
    typed = as_trained(prediction, types)
    row: dict[str, Any] = {}
    for target, value in by_target.items():
        prefix, answer = (f"{target}.", typed[target]) if len(by_target) > 1 else ("", typed)
        if isinstance(value, Prediction):
            row[f"{prefix}label"] = answer.label
        elif isinstance(value, Labels):
            is_list = types.get(target, "").startswith(MANY_OF)
            row[f"{prefix}label"] = answer.labels if is_list else join_words(value.labels)
        else:
            row[f"{prefix}label"] = float(value)
            continue
        row |= {f"{prefix}p_{label}": p for label, p in value.probabilities.items()}
    return row
