"""A number per sample, by which a batch sampler puts similar samples into one batch."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fusionzoo.errors import FusionZooError, did_you_mean

from .paired import PairedDataset
from .stretch import is_video


def group_values(dataset: PairedDataset, by: str) -> Tensor:
    """Return what similar samples share, float64 (N,): for `PairedBatchSampler(lengths=...)`.

    `length`: the sizes of texts, clips and sequences, so that batches need little padding;
    `aspect_ratio`: width / height of the first modality of pictures, 1 where one is missing; else
    the name of a column of the data, numbers as they are and text in alphabetical order.
    """
    if by == "length":
        return dataset.lengths()
    if by == "aspect_ratio":
        return _aspect_ratios(dataset)
    return _column_values(dataset, by)


def _aspect_ratios(dataset: PairedDataset) -> Tensor:
    images = [name for name, kind in dataset.modalities.items() if kind == "image"]
    if not images:
        raise FusionZooError(
            f"--train.group_by aspect_ratio: {dataset.source} has no modality of pictures"
        )
    ratios = [_aspect_ratio(value) for value in dataset.references(images[0])]
    return torch.tensor(ratios, dtype=torch.float64)


def _aspect_ratio(value: Any) -> float:
    """Return width / height; of a file from its header, without decoding it.

    Of several pictures that of the first; a video counts as square.
    """
    if isinstance(value, list):
        return _aspect_ratio(value[0]) if value else 1.0
    if is_video(value):
        return 1.0
    if value is None:
        return 1.0
    if isinstance(value, Path | bytes):
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(io.BytesIO(value) if isinstance(value, bytes) else value) as image:
                width, height = image.size
        except (OSError, UnidentifiedImageError):
            return 1.0  # a drawing, or a file whose decoding reports the error
        return width / height
    if hasattr(value, "width"):  # a PIL picture
        return float(value.width / value.height)
    shape = value.shape[:2] if value.shape[-1] in (1, 3, 4) else value.shape[-2:]
    return float(shape[1] / shape[0])


def _column_values(dataset: PairedDataset, name: str) -> Tensor:
    columns = [c for c in dataset.table.column_names if c not in dataset.modalities]
    if name not in columns:
        known = ["length", "aspect_ratio", *columns]
        raise FusionZooError(
            f"--train.group_by {name}: {dataset.source} has no such column."
            f"{did_you_mean(name, known)} There are: {', '.join(known)}"
        )
    cells = dataset.column(name)
    try:
        return torch.tensor([float(c) if c is not None else 0.0 for c in cells]).double()
    except ValueError:
        order = {value: rank for rank, value in enumerate(sorted({str(c or "") for c in cells}))}
        return torch.tensor([order[str(c or "")] for c in cells], dtype=torch.float64)
