"""A finished model on other data: metrics, and predictions as a table.

Shapes: `B` batch, `N` samples, `K` outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from .config import EvaluateConfig, PredictConfig
from .datasets import PairedBatchSampler, PairedDataset, make_sampler
from .distributed.process_group import World, pick_device
from .errors import FusionZooError, did_you_mean
from .eval_mode import quiet
from .evaluation.modalities import subset_label, subsets
from .files import replacing
from .loading import load
from .model import FusionModel
from .predictions import Labels, Prediction
from .structures import Batch, Features
from .targets import OneOf
from .training.build import open_dataset
from .training.data import num_workers
from .training.tasks.base import OBJECTIVES
from .training.tasks.multitask import Tasks

Settings = EvaluateConfig | PredictConfig


def evaluate(
    cfg: EvaluateConfig, model: FusionModel | None = None, dataset: PairedDataset | None = None
) -> dict[str, Any]:
    """Return the metrics of a model on a split: of the fusion, and under `unimodal` of each
    modality's own head.

    With `every_subset` also, under `subsets`, those of the fusion given each subset of the
    modalities. `model` and `dataset` replace those that `cfg` names. Samples without a label are
    left out.
    """
    model = _open_model(cfg, model)
    if not (model.classes or model.targets):
        raise FusionZooError("this model was trained without a target: there is nothing to measure")
    dataset = _labelled(model, _open_data(cfg, model, dataset))
    labels = _encode_labels(model, dataset)
    row_of_id = {sample_id: row for row, sample_id in enumerate(dataset.ids)}
    chosen = subsets(list(model.modalities))[1:-1] if cfg.every_subset else []
    collected: dict[str, list[Tensor]] = {}
    for batch, features in _encode(model, dataset, cfg, "evaluate"):
        logits = _every_logits(model, features, chosen)
        rows = torch.tensor([row_of_id[sample_id] for sample_id in batch.ids])
        for name, tensor in {**logits, "target": labels[rows]}.items():
            collected.setdefault(name, []).append(tensor.cpu())
    tensors = {name: torch.cat(parts) for name, parts in collected.items()}
    target, tasks = tensors.pop("target"), _tasks_of(model, labels)
    metrics = {name: tasks.metrics(logits.float(), target) for name, logits in tensors.items()}
    return _nested(metrics)


def _every_logits(
    model: FusionModel, features: Mapping[str, Features], chosen: Sequence[frozenset[str]]
) -> dict[str, Tensor]:
    """Return logits (B, K): of the fusion (`""`), `unimodal/<modality>`, `subsets/<names>`."""
    logits = {"": model.fusion(features).logits}
    if model.heads is not None:
        logits |= {f"unimodal/{name}": x for name, x in model.heads(features).items()}
    for names in chosen:
        masked = {
            name: x if name in names else x._replace(mask=torch.zeros_like(x.mask))
            for name, x in features.items()
        }
        logits[f"subsets/{subset_label(names)}"] = model.fusion(masked).logits
    return logits


def _nested(metrics: Mapping[str, dict[str, float]]) -> dict[str, Any]:
    """Turn `{"": m, "unimodal/text": n}` into `{**m, "unimodal": {"text": n}}`."""
    nested: dict[str, Any] = dict(metrics[""])
    for name, values in metrics.items():
        group, slash, key = name.partition("/")
        if slash:
            nested.setdefault(group, {})[key] = values
    return nested


def predict(
    cfg: PredictConfig, model: FusionModel | None = None, dataset: PairedDataset | None = None
) -> Path | pa.Table:
    """Predict every sample: `id`, `label`, a probability per class, `present_<modality>`.

    Several targets have columns `<target>.label` and so on; numbers have no probabilities. Returns
    the file written (`cfg.out`, .parquet or .csv), or without one the table in memory.
    """
    model = _open_model(cfg, model)
    if not (model.classes or model.targets):
        raise FusionZooError("this model was trained without a target: it can only embed")
    dataset = _open_data(cfg, model, dataset)
    if not cfg.out:
        return pa.concat_tables(_prediction_tables(model, dataset, cfg))
    path = Path(cfg.out)
    writer_of = _writer_for(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    writer: Any = None
    with replacing(path) as partial:
        try:
            for table in _prediction_tables(model, dataset, cfg):
                writer = writer or writer_of(str(partial), table.schema)
                writer.write_table(table)
        finally:
            if writer is not None:
                writer.close()
    return path


def _writer_for(path: Path) -> Callable[[str, pa.Schema], Any]:
    if path.suffix == ".parquet":
        from pyarrow.parquet import ParquetWriter

        return ParquetWriter
    if path.suffix == ".csv":
        from pyarrow.csv import CSVWriter

        return CSVWriter
    raise FusionZooError(f"--out {path}: predictions are written as .parquet or .csv")


def _prediction_tables(
    model: FusionModel, dataset: PairedDataset, cfg: PredictConfig
) -> Iterator[pa.Table]:
    """Yield a table of predictions for each batch."""
    for batch, features in _encode(model, dataset, cfg, "predict"):
        predictions = model.answer(features)
        columns: dict[str, Any] = {"id": batch.ids}
        for row in (_prediction_row(prediction) for prediction in predictions):
            for name, value in row.items():
                columns.setdefault(name, []).append(value)
        present = batch.present.cpu().unbind(1)
        columns |= {
            f"present_{name}": x.tolist() for name, x in zip(model.modalities, present, strict=True)
        }
        yield pa.table(columns)


def _prediction_row(prediction: Any) -> dict[str, Any]:
    """Return the columns of one sample's prediction."""
    by_target = prediction if isinstance(prediction, dict) else {"": prediction}
    row: dict[str, Any] = {}
    for target, value in by_target.items():
        prefix = f"{target}." if target else ""
        if isinstance(value, Prediction):
            row[f"{prefix}label"] = value.label
        elif isinstance(value, Labels):
            row[f"{prefix}label"] = ";".join(value.labels)
        else:
            row[f"{prefix}label"] = float(value)
            continue
        row |= {f"{prefix}p_{label}": p for label, p in value.probabilities.items()}
    return row


def _open_model(cfg: Settings, model: FusionModel | None) -> FusionModel:
    device = pick_device(cfg.device)
    if model is not None:
        return model.to(device)
    if not cfg.model:
        raise FusionZooError("--model is missing: a model folder, or a run folder such as runs/a")
    return load(cfg.model, device, plugins=cfg.plugins)


def _open_data(cfg: Settings, model: FusionModel, dataset: PairedDataset | None) -> PairedDataset:
    """Open the data, with the columns of labels that the model knows."""
    kinds = {target.name: target.kind for target in model.targets or ()}
    if dataset is None:
        if not cfg.data.get("name"):
            raise FusionZooError("--data.name is missing: a data set, or manifest for a file")
        dataset = open_dataset(cfg.data, kinds if isinstance(cfg, EvaluateConfig) else {})
    if not set(model.modalities) & set(dataset.modalities):
        raise FusionZooError(
            f"the model reads {', '.join(model.modalities)};"
            f" the data has {', '.join(dataset.modalities)}"
        )
    return dataset if cfg.split == "all" else dataset.split(cfg.split)


def _labelled(model: FusionModel, dataset: PairedDataset) -> PairedDataset:
    """Return the samples with a label of the model's classes; other labels are an error."""
    if model.targets is not None:
        return dataset
    labels = dataset.labels
    for sample_id, label in zip(dataset.ids, labels, strict=True):
        if label is not None and label not in model.classes:
            raise FusionZooError(
                f"{dataset.source}, sample {sample_id!r}: label {label!r} is none of the model's"
                f" {len(model.classes)} classes.{did_you_mean(label, model.classes)}"
            )
    rows = [row for row, label in enumerate(labels) if label is not None]
    if not rows:
        raise FusionZooError(f"{dataset.source}: no sample has a label, so nothing can be measured")
    return dataset.subset(rows)


def _encode_labels(model: FusionModel, dataset: PairedDataset) -> Tensor:
    """Encode labels as the model was trained: indices (N,), or numbers (N, C), NaN if missing."""
    if model.targets is None:
        return torch.tensor([model.classes.index(str(label)) for label in dataset.labels])
    rows = []
    columns = {target.name: dataset._column(target.name) for target in model.targets}
    for row in range(len(dataset)):
        values: list[float] = []
        for target in model.targets:
            cell = columns[target.name][row]
            values += [float("nan")] * target.columns if not cell else target.encode(cell)
        rows.append(values)
    return torch.tensor(rows, dtype=torch.float32)


def _tasks_of(model: FusionModel, labels: Tensor) -> Tasks:
    """Return the tasks that measure the model's answers."""
    if model.targets is None:
        target = OneOf("target", tuple(model.classes))
        return Tasks([OBJECTIVES.create("classification", target, labels)], plain=True)
    parts = labels.split([target.columns for target in model.targets], dim=1)
    tasks = [
        OBJECTIVES.create(target.kind, target, values[~values.isnan().any(-1)])
        for target, values in zip(model.targets, parts, strict=True)
    ]
    return Tasks(tasks, [1.0] * len(tasks))


@torch.no_grad()
def _encode(
    model: FusionModel, dataset: PairedDataset, cfg: Settings, label: str
) -> Iterator[tuple[Batch, dict[str, Features]]]:
    """Yield every batch and its features; shows progress."""
    sampler = make_sampler(dataset, shuffle=False, pad=False)
    loader: Any = DataLoader(
        dataset,
        batch_sampler=PairedBatchSampler(sampler, cfg.batch_size, lengths=dataset.lengths()),
        collate_fn=model.collate(),
        num_workers=num_workers(cfg.num_workers, World()),
    )
    progress = tqdm(total=len(dataset), desc=label, unit="sample", dynamic_ncols=True)
    with progress, quiet(model):
        for batch in loader:
            batch = batch.to(model.device)
            yield batch, model.encode(batch)
            progress.update(len(batch.ids))
    failures = dataset.failures()
    if failures:
        sample_id, modality = failures[0]
        print(f"warning: {len(failures)} values could not be decoded: {sample_id} ({modality}) ...")
