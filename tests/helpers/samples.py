"""Samples as text that tells any difference, epochs of a loader, and data sets that are equal."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from fusionzoo.datasets import PairedBatchSampler, PairedDataset, make_sampler


def plain(value: Any) -> Any:
    """Return a decoded value, or several, as text that tells any difference."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    if hasattr(value, "samples"):
        return f"{value.rate} {value.samples.tolist()}"
    return f"{value.dtype} {value.tolist()}" if isinstance(value, torch.Tensor) else value


def described(sample: Any) -> str:
    """Return all that a sample holds as text, with the seed, which its representation omits."""
    values = {name: plain(x) for name, x in sample.values.items()}
    return f"{sample.seed} {sample._replace(values=values)}"


def as_list(samples: list[Any]) -> list[Any]:
    return samples


def load(data: PairedDataset, batches: PairedBatchSampler, workers: int) -> list[list[str]]:
    """Return the samples of each batch, described."""
    loader = DataLoader(
        data,  # type: ignore[arg-type]
        batch_sampler=batches,
        collate_fn=as_list,
        num_workers=workers,
        generator=torch.Generator(),
    )
    return [[described(x) for x in batch] for batch in loader]


def epoch(data: PairedDataset, workers: int, size: int = 16) -> list[str]:
    """Return the samples of a shuffled epoch, described."""
    batches = PairedBatchSampler(make_sampler(data, shuffle=True, seed=1), size)
    return [x for batch in load(data, batches, workers) for x in batch]


def assert_same(one: PairedDataset, other: PairedDataset) -> None:
    """Require equal modalities in the same order, rows, splits, labels, groups and values."""
    assert list(one.modalities.items()) == list(other.modalities.items())
    assert (one.ids, one.split_names, one.labels, one.groups) == (
        *(other.ids, other.split_names, other.labels, other.groups),
    )
    assert torch.equal(one.present, other.present)
    for row in range(len(one)):
        assert described(one[row]) == described(other[row])
