"""Metrics of a finished model on other data.

Shapes: `B` batch, `N` samples, `C` numbers of a label, `K` outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fusionzoo.config import EvaluateConfig
from fusionzoo.datasets import PairedDataset
from fusionzoo.errors import FusionZooError, did_you_mean
from fusionzoo.evaluation.modalities import subset_label, subsets
from fusionzoo.files import write_json
from fusionzoo.model import FusionModel
from fusionzoo.structures import Features, keep_only
from fusionzoo.targets import OneOf
from fusionzoo.trained_on import count_seen
from fusionzoo.training.evaluate import measurable
from fusionzoo.training.tasks.base import OBJECTIVES
from fusionzoo.training.tasks.multitask import Tasks

from .batches import encode_batches, open_data, open_model
from .retrieval import RETRIEVAL, aligned_tensors, retrieval_metrics

SEEN = "seen_in_training"  # key of the numbers of samples whose ids training read, by split


@torch.no_grad()
def evaluate(
    cfg: EvaluateConfig, model: FusionModel | None = None, dataset: PairedDataset | None = None
) -> dict[str, Any]:
    """Return the metrics of a model on a split: of the fusion, and under `unimodal` of each
    modality's own head; after contrastive training, under `retrieval`, how well each modality finds
    the others, with 95 % intervals.

    Under `seen_in_training`: how many of the samples the model was trained and validated on, by
    their ids; None if its folder does not say. With `every_subset` also, under `subsets`, those of
    the fusion given each subset of the modalities, among the samples that have one of them. `model`
    and `dataset` replace those that `cfg` names. Samples without a label are left out. `cfg.out`
    names a JSON file to write.
    """
    model = open_model(cfg, model)
    if not (model.classes or model.targets):
        if not model.align:
            raise FusionZooError(
                "this model was trained without a target: there is nothing to measure"
            )
        return _written(cfg, _retrieval_only(cfg, model, open_data(cfg, model, dataset)))
    dataset = labelled(model, open_data(cfg, model, dataset))
    seen = report_seen(model, dataset)
    labels = encode_labels(model, dataset)
    row_of_id = {sample_id: row for row, sample_id in enumerate(dataset.ids)}
    chosen = subsets(list(model.modalities))[1:-1] if cfg.every_subset else []
    collected: dict[str, list[Tensor]] = {"present": []}
    aligned: list[dict[str, Tensor]] = []
    ids: list[str] = []
    for batch, features in encode_batches(model, dataset, cfg, "evaluate", by_length=True):
        logits = _every_logits(model, features, chosen)
        rows = torch.tensor([row_of_id[sample_id] for sample_id in batch.ids])
        aligned.append(aligned_tensors(model, batch, features))
        ids += batch.ids
        for name, tensor in {**logits, "target": labels[rows], "present": batch.present}.items():
            collected.setdefault(name, []).append(tensor.cpu())
    tensors = {name: torch.cat(parts) for name, parts in collected.items()}
    target, tasks = tensors.pop("target"), tasks_of_model(model, labels)
    present = dict(zip(model.modalities, tensors.pop("present").unbind(1), strict=True))
    subset_rows = {
        f"subsets/{subset_label(names)}": torch.stack([present[name] for name in names]).any(0)
        for names in chosen
    }
    every = torch.ones(len(target), dtype=torch.bool)
    metrics = {}
    for name, values in tensors.items():
        measured = subset_rows.get(name, every)
        if name not in subset_rows or measurable(tasks, target, measured):
            metrics[name] = tasks.metrics(values[measured].float(), target[measured])
    nested = _nested(metrics) | {SEEN: seen}
    retrieval = retrieval_metrics(_joined(aligned), ids, dataset)
    return _written(cfg, nested | ({RETRIEVAL: retrieval} if retrieval else {}))


def _retrieval_only(
    cfg: EvaluateConfig, model: FusionModel, dataset: PairedDataset
) -> dict[str, Any]:
    """Return the figures of a model that was trained without a target."""
    aligned, ids, seen = [], [], report_seen(model, dataset)
    for batch, features in encode_batches(model, dataset, cfg, "evaluate", by_length=True):
        aligned.append(aligned_tensors(model, batch, features))
        ids += batch.ids
    retrieval = retrieval_metrics(_joined(aligned), ids, dataset)
    if not retrieval:
        raise FusionZooError(
            f"{dataset.source}: no sample has two modalities, so there is nothing to measure"
        )
    return {RETRIEVAL: retrieval, SEEN: seen}


def report_seen(model: FusionModel, dataset: PairedDataset) -> dict[str, int | None]:
    """Count the samples that training read, and say so; None where that is not known."""
    seen = count_seen(model.trained_on, dataset)
    if None in seen.values():
        print("whether the model was trained on some of these samples is not known")
    elif any(seen.values()):
        print(
            f"warning: of the {len(dataset):,} samples, {seen['train']:,} have ids that the model"
            f" was trained on and {seen['val']:,} ids that it was validated on: these figures are"
            " not those of new data"
        )
    return seen


def _joined(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _written(cfg: EvaluateConfig, metrics: dict[str, Any]) -> dict[str, Any]:
    """Write the metrics to `cfg.out`, if any, and return them."""
    if cfg.out:
        path = Path(cfg.out)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, metrics)
    return metrics


def _every_logits(
    model: FusionModel, features: Mapping[str, Features], chosen: Sequence[frozenset[str]]
) -> dict[str, Tensor]:
    """Return logits (B, K): of the fusion (`""`), `unimodal/<modality>`, `subsets/<names>`."""
    logits = {"": model.fuse(features).logits}
    if model.heads is not None:
        logits |= {f"unimodal/{name}": x for name, x in model.heads(features).items()}
    for names in chosen:
        logits[f"subsets/{subset_label(names)}"] = model.fuse(keep_only(features, *names)).logits
    return logits


def _nested(metrics: Mapping[str, dict[str, float]]) -> dict[str, Any]:
    """Turn `{"": m, "unimodal/text": n}` into `{**m, "unimodal": {"text": n}}`."""
    nested: dict[str, Any] = dict(metrics[""])
    for name, values in metrics.items():
        group, slash, key = name.partition("/")
        if slash:
            nested.setdefault(group, {})[key] = values
    return nested


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
        raise FusionZooError(f"{dataset.source}: no sample has a label, so nothing can be measured")
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
        OBJECTIVES.create(target.kind, target, values[~values.isnan().any(-1)])
        for target, values in zip(model.targets, parts, strict=True)
    ]
    return Tasks(tasks, [1.0] * len(tasks))
