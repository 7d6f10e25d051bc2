"""A model's answers: a class with its probability, or labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor


class Prediction(NamedTuple):
    """Which class, or level, the model gives to one sample."""

    label: str
    probability: float
    probabilities: dict[str, float]


class Labels(NamedTuple):
    """Which labels the model gives to one sample: all that are more likely than not."""

    labels: list[str]
    probabilities: dict[str, float]


def predictions(
    classes: Sequence[str], shares: Tensor, chosen: Sequence[int] | None = None
) -> list[Any]:
    """Name the probabilities (N, K); the chosen class is the likeliest unless it is given."""
    made = [dict(zip(classes, row, strict=True)) for row in shares.tolist()]
    likeliest = [max(row, key=row.__getitem__) for row in made]
    best = likeliest if chosen is None else [classes[index] for index in chosen]
    return [Prediction(label, row[label], row) for label, row in zip(best, made, strict=True)]
