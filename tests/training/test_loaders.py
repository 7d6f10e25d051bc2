"""Loaders of a run: splits of fixed shapes are prepared once, and batches are their rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import fusionzoo as fz
from fusionzoo.config import RunConfig
from fusionzoo.datasets import Collate, PairedDataset
from fusionzoo.machine.distributed import World
from fusionzoo.structures import Batch
from fusionzoo.training import loaders
from fusionzoo.training.loaders import build_loader, chunks

ROWS = 40


def table(**columns: Any) -> PairedDataset:
    draw = np.random.default_rng(0)
    vectors: list[Any] = [*draw.normal(size=(ROWS, 3))]
    vectors[::4] = [None] * len(vectors[::4])
    frame = pd.DataFrame({"x": draw.normal(size=ROWS), "colour": ["red", "blue", None, "red"] * 10})
    frame = frame.assign(vector=vectors, target=["a", "b"] * (ROWS // 2), split="train", **columns)
    return fz.create_dataset(frame, target="target")


def collate_of(dataset: PairedDataset, **encoders: Any) -> Collate:
    specs = dataset.default_encoders | encoders
    built = {
        name: fz.create_encoder(kind, **specs[name]) for name, kind in dataset.modalities.items()
    }
    return Collate({name: encoder.processor(train=True) for name, encoder in built.items()})


def epochs(dataset: PairedDataset, collate: Collate) -> Iterator[Batch]:
    loader = build_loader(dataset, collate, RunConfig(), World(), "train")
    for epoch in range(2):
        for batches in chunks(loader, 1, epoch):
            yield from batches


def test_a_split_of_fixed_shapes_is_read_once_and_gives_the_same_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dataset = table()
    collate = collate_of(dataset)
    with monkeypatch.context() as patch:
        patch.setattr(loaders, "whole_batch", lambda *_: None)
        expected = [*epochs(dataset, collate)]
    read, reads = PairedDataset.__getitem__, []
    monkeypatch.setattr(
        PairedDataset, "__getitem__", lambda self, key: reads.append(key) or read(self, key)
    )
    batches = [*epochs(dataset, collate)]
    assert len(reads) == ROWS
    assert [x.ids for x in batches] == [x.ids for x in expected]
    for batch, one in zip(batches, expected, strict=True):
        assert torch.equal(batch.present, one.present) and torch.equal(batch.target, one.target)
        for name, inputs in one.inputs.items():
            assert all(torch.equal(batch.inputs[name][key], x) for key, x in inputs.items())


def test_other_splits_are_read_sample_by_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = table()
    collate = collate_of(dataset)
    assert loaders.whole_batch(dataset, collate) is not None
    assert loaders.whole_batch(dataset.edited(lambda x: x), collate) is None
    texts = table(text=[f"word {row}" for row in range(ROWS)])
    chars = {"text": {"name": "chars", "dim": 8}}
    assert loaders.whole_batch(texts, collate_of(texts, **chars)) is None  # padded
    two = collate_of(dataset)
    two.second_view = True
    assert loaders.whole_batch(dataset, two) is None
    monkeypatch.setattr(loaders, "WHOLE_BYTES", 100)
    assert loaders.whole_batch(dataset, collate) is None
