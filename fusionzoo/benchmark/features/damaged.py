"""Encode damaged samples: of the test split, and those of training that lose a part."""

from __future__ import annotations

from dataclasses import asdict

import torch
from torch import Tensor

from fusionzoo.datasets import PairedDataset
from fusionzoo.evaluation.robustness import LOST_PART, Corrupted
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
from .lost_parts import SEVERITY, draw_damaged
from .pretrain import is_untrained

Piece = tuple[int, Condition, Damaged]  # number of the fold, how its samples are damaged, and which
_frozen_cache: dict[str, tuple[PairedDataset, Encoders]] = {}  # of this process; one entry


def describe_corrupted(
    bench: Bench,
    dataset: PairedDataset,
    fold_number: int,
    frozen: Encoders,
    descriptions: dict[str, Description],
) -> dict[Condition, Damaged]:
    """Describe the damaged samples of a fold: those of all folds, where they share an encoder."""
    if not conditions(bench):
        return {}
    own = damaged_rows(bench, bench.folds[fold_number])
    shared = torch.cat([damaged_rows(bench, fold) for fold in bench.folds]).unique()
    rows = {name: own if is_untrained(encoder) else shared for name, encoder in frozen.items()}
    samples = {name: fingerprint(dataset.subset(rows[name]), name) for name in frozen}
    damaged = {}
    for condition in conditions(bench):
        name = condition[0]
        damaged[condition] = _entry(descriptions[name], samples[name], rows[name], condition)
    return damaged


def describe_damaged_train(
    bench: Bench,
    dataset: PairedDataset,
    fold_number: int,
    frozen: Encoders,
    descriptions: dict[str, Description],
) -> dict[Condition, Damaged]:
    """Describe a fold's training and validation samples that lose a part, but for the view.

    Those of the highest rate of `damaged_train`, which has those of the others. Folds that share an
    encoder share the entry. A modality of which no sample is drawn has none.
    """
    rate = max(bench.cfg.damaged_train, default=0.0)
    by_fold = [draw_damaged(bench, fold, rate) for fold in bench.folds]
    shared, damaged = torch.stack(by_fold).any(0), {}
    for column, (name, kind) in enumerate(bench.modalities.items()):
        drawn = by_fold[fold_number] if is_untrained(frozen[name]) else shared
        rows = drawn[:, column].nonzero()[:, 0]
        if len(rows):
            condition = (name, LOST_PART[kind], SEVERITY)
            samples = fingerprint(dataset.subset(rows), name)
            damaged[condition] = _entry(descriptions[name], samples, rows, condition)
    return damaged


def _entry(description: Description, samples: str, rows: Tensor, condition: Condition) -> Damaged:
    """Return the cache entry of these rows, whose fingerprint is `samples`, damaged in one way."""
    return Damaged({**description, "samples": samples, "corruption": condition[1:]}, rows)


def encode_all_damaged(bench: Bench) -> None:
    """Encode the damaged samples of every fold that are not in the cache."""
    missing: dict[str, Piece] = {}
    for number, conditions_of_fold in enumerate(bench.corrupted):
        for condition, damaged in conditions_of_fold.items():
            _add_missing(missing, (number, condition, damaged))
    for number, conditions_of_fold in enumerate(bench.damaged_train):
        for condition, damaged in conditions_of_fold.items():
            for view in range(bench.cfg.views):
                description = {**damaged.description, "view": view}
                _add_missing(
                    missing, (number, condition, damaged._replace(description=description))
                )
    pieces = list(missing.values())
    for _ in map_unordered(bench.cfg, bench, pieces, encode_damaged, "encode damaged"):
        pass
    _frozen_cache.clear()


def _add_missing(missing: dict[str, Piece], piece: Piece) -> None:
    description = piece[2].description
    if feature_cache().load(description) is None:
        missing.setdefault(key_of(description), piece)


def encode_damaged(bench: Bench, piece: Piece) -> None:
    """Encode samples of which one modality is damaged in one way."""
    fold_number, condition, damaged = piece
    dataset, encoders = _open_frozen(bench, fold_number)
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
