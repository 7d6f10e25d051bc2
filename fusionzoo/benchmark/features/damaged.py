"""Encode the damaged samples of the test split."""

from __future__ import annotations

from dataclasses import asdict

import torch

from fusionzoo.datasets import PairedDataset
from fusionzoo.evaluation.robustness import Corrupted
from fusionzoo.features.cache import feature_cache
from fusionzoo.features.encode import fingerprint, key_of

from ..bench import (
    Bench,
    Condition,
    Damaged,
    Description,
    conditions,
    damaged_rows,
    dataset_of,
)
from ..executors import map_unordered
from .encoders import Encoders, build_encoders, freeze_all, store_features
from .pretrain import is_untrained

_frozen_cache: dict[str, tuple[PairedDataset, Encoders]] = {}  # of this process; one entry


def describe_corrupted(
    bench: Bench,
    dataset: PairedDataset,
    fold_number: int,
    frozen: Encoders,
    descriptions: dict[str, Description],
) -> dict[Condition, Damaged]:
    """Describe the damaged samples of a fold: those of all folds, where they share an encoder."""
    own = damaged_rows(bench, bench.folds[fold_number])
    shared = torch.cat([damaged_rows(bench, fold) for fold in bench.folds]).unique()
    if not conditions(bench):
        return {}
    rows = {name: own if is_untrained(encoder) else shared for name, encoder in frozen.items()}
    samples = {name: fingerprint(dataset.subset(rows[name]), name) for name in frozen}
    damaged = {}
    for condition in conditions(bench):
        name = condition[0]
        changed = {"samples": samples[name], "corruption": condition[1:]}
        damaged[condition] = Damaged({**descriptions[name], **changed}, rows[name])
    return damaged


def encode_all_corrupted(bench: Bench) -> None:
    """Encode the damaged samples of every fold that are not in the cache."""
    missing: dict[str, tuple[int, Condition]] = {}
    for number, conditions_of_fold in enumerate(bench.corrupted):
        for condition, damaged in conditions_of_fold.items():
            if not feature_cache().has(damaged.description):
                missing.setdefault(key_of(damaged.description), (number, condition))
    pieces = list(missing.values())
    for _ in map_unordered(bench.cfg, bench, pieces, encode_corrupted, "encode damaged"):
        pass
    _frozen_cache.clear()


def encode_corrupted(bench: Bench, piece: tuple[int, Condition]) -> None:
    """Encode the damaged samples of a fold, one modality damaged in one way."""
    fold_number, condition = piece
    dataset, encoders = _open_frozen(bench, fold_number)
    damaged = bench.corrupted[fold_number][condition]
    samples = Corrupted(dataset.subset(damaged.rows), *condition)
    store_features(bench, samples, encoders[condition[0]], damaged.description, progress=False)


def _open_frozen(bench: Bench, fold_number: int) -> tuple[PairedDataset, Encoders]:
    """Return data set and frozen encoders, built once per process; weights come from the cache."""
    key = key_of([asdict(bench.cfg), fold_number, bench.features[fold_number]])
    if key not in _frozen_cache:
        dataset = dataset_of(bench)
        encoders = build_encoders(bench.cfg, dataset)
        _frozen_cache.clear()
        _frozen_cache[key] = dataset, freeze_all(bench, dataset, fold_number, encoders)[0]
    return _frozen_cache[key]
