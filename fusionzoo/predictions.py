"""Predictions of a model: a class with its probability, or a set of labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor


class Prediction(NamedTuple):
    """The predicted class, or level, of one sample."""

    label: str
    probability: float
    probabilities: dict[str, float]


class Labels(NamedTuple):
    """The predicted labels of one sample: those with a probability above 0.5."""

    labels: list[str]
    probabilities: dict[str, float]


def predictions(
    classes: Sequence[str], shares: Tensor, chosen: Sequence[int] | None = None
) -> list[Any]:
    """Build a `Prediction` per row of probabilities (N, K), of the classes with indices `chosen`
    (None: the most likely)."""
    rows = [dict(zip(classes, row, strict=True)) for row in shares.tolist()]
    likeliest = [max(row, key=row.__getitem__) for row in rows]
    best = likeliest if chosen is None else [classes[index] for index in chosen]
    return [Prediction(label, row[label], row) for label, row in zip(best, rows, strict=True)]
