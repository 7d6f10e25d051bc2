"""Retrieval figures of a model whose modalities share a space, for `fusionzoo evaluate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusionzoo.datasets import PairedDataset
from fusionzoo.evaluation.answers import GROUP, AnswerKeys
from fusionzoo.evaluation.retrieval import any_pair, retrieval_intervals
from fusionzoo.model import FusionModel
from fusionzoo.structures import Batch, Features

RETRIEVAL = "retrieval"


def aligned_tensors(
    model: FusionModel, batch: Batch, features: Mapping[str, Features]
) -> dict[str, Tensor]:
    """Return `aligned/<modality>` (B, D) and `present` (B, M); nothing without a common space."""
    if not model.align:
        return {}
    present = dict(zip(features, batch.present.unbind(1), strict=True))
    vectors = {
        f"aligned/{name}": F.normalize(
            project(features[name].pooled.masked_fill(~present[name][:, None], 0)).float()
        ).cpu()
        for name, project in model.align.items()
    }
    columns = [present[name] for name in model.align]
    return {**vectors, "present": torch.stack(columns, dim=1).cpu()}


def retrieval_metrics(
    tensors: Mapping[str, Tensor], ids: Sequence[str], dataset: PairedDataset
) -> dict[str, Any]:
    """Return `{"image_to_text": {"recall@1": {"mean": ..., "low": ..., "high": ...}}}`, or {}."""
    aligned = {n.partition("/")[2]: x for n, x in tensors.items() if n.startswith("aligned/")}
    if len(aligned) < 2 or not any_pair(tensors["present"]):
        return {}
    keys = AnswerKeys(dataset).of(ids)
    content = {n.partition("/")[2]: x for n, x in keys.items() if n.startswith("content/")}
    directions = retrieval_intervals(
        aligned, tensors["present"], content=content, groups=keys.get(GROUP)
    )
    return {
        direction: {name: dict(x._asdict()) for name, x in figures.items()}
        for direction, figures in directions.items()
    }


def retrieval_rows(directions: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of a table: a line per direction, figures with intervals."""
    names = list(next(iter(directions.values())))
    rows = [
        [
            direction.replace("_to_", " -> "),
            *(f"{x['mean']:.3f} [{x['low']:.3f}, {x['high']:.3f}]" for x in figures.values()),
        ]
        for direction, figures in directions.items()
    ]
    return ["", *names], rows
