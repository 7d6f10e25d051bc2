"""Weights with which samples are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusionzoo.errors import FusionZooError


def weights_of(dataset: Any, weights: str | Sequence[float] | Tensor, indices: Tensor) -> Tensor:
    """Return the weights of the samples at `indices`."""
    if isinstance(weights, str):
        if weights != "class":
            raise FusionZooError(f"weights={weights!r}; the only named scheme is 'class'")
        targets = dataset.targets[indices]
        if targets.ndim > 1:
            raise FusionZooError("class_weighted needs a target of one class, in column `target`")
        return (1.0 / torch.bincount(targets).double())[targets]
    values = torch.as_tensor(weights, dtype=torch.float64)
    if values.shape != (len(dataset),) or not bool((values.isfinite() & (values >= 0)).all()):
        raise FusionZooError(
            f"{values.numel()} weights for {len(dataset)} samples; one each, finite, none negative"
        )
    if not values[indices].any():
        raise FusionZooError("all weights are 0: there is nothing to sample from")
    return values[indices]
