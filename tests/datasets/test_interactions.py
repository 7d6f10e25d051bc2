"""Interactions: the information is where the task says, and nowhere else."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict

import pytest
import torch

from fusionzoo import PairedDataset, create_dataset
from fusionzoo.datasets.builtin.interactions import TASKS, interactions_bayes_accuracy


def bits(data: PairedDataset, name: str) -> list[int]:
    """Read one modality's bit: on which side of its mean, along its main direction."""
    values = torch.stack([data[i].values[name] for i in range(len(data))])
    direction = torch.linalg.svd(values - values.mean(0), full_matrices=False).Vh[0]
    return (values @ direction > 0).int().tolist()


def best_accuracy(data: PairedDataset, names: tuple[str, ...]) -> float:
    """Guess, for each pattern of bits, its most frequent target."""
    seen: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    columns = [bits(data, name) for name in names]
    for pattern, target in zip(zip(*columns, strict=True), data.targets.tolist(), strict=True):
        seen[pattern][target] += 1
    return sum(max(counts.values()) for counts in seen.values()) / len(data)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("num_modalities", "flip"), [(2, 0.0), (3, 0.0), (2, 0.2)])
def test_the_best_accuracy_is_the_known_one(task: str, num_modalities: int, flip: float) -> None:
    data = create_dataset("interactions", task=task, num_modalities=num_modalities, flip=flip)
    for known in range(1, num_modalities + 1):
        # The first ones: for `unique` it is a that knows.
        names = tuple(data.modalities)[:known]
        wanted = interactions_bayes_accuracy(task, num_modalities, flip, known)
        assert best_accuracy(data, names) == pytest.approx(wanted, abs=0.04)


def test_what_only_one_modality_knows_the_others_do_not() -> None:
    data = create_dataset("interactions", task="unique", num_modalities=3)
    assert best_accuracy(data, ("b", "c")) == pytest.approx(0.5, abs=0.04)


def test_xor_is_hidden_from_every_proper_subset() -> None:
    data = create_dataset("interactions", task="xor", num_modalities=3)
    for pair in itertools.combinations(data.modalities, 2):
        assert best_accuracy(data, pair) == pytest.approx(0.5, abs=0.05)
    assert best_accuracy(data, ("a", "b", "c")) == 1.0


def test_splits_and_encoders_are_given() -> None:
    data = create_dataset("interactions", samples=500, width=5)
    assert data.splits == {"train": 300, "val": 100, "test": 100}
    assert data.default_encoders["b"] == {
        "name": "vector/mlp",
        "dim": 32,
        "hidden": 32,
        "in_dim": 5,
    }
