"""Training samples of which a modality loses a part: which they are, and how they are read.

A part is lost by the modality's corruption in `LOST_PART`, such as occlusion, at `SEVERITY`.
Shapes: `N` samples, `M` modalities.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fusionzoo.datasets import PairedDataset
from fusionzoo.evaluation.robustness import LOST_PART, corrupt_sample
from fusionzoo.features.encode import StoredFeatures
from fusionzoo.rng import seed_of
from fusionzoo.structures import Features, Sample

from ..bench import Bench, Unit
from ..folds import Fold
from ..strategies import modalities_of, parse

SEVERITY = 3  # the middle one


def damaged_modalities(bench: Bench, unit: Unit) -> Tensor | None:
    """Return which modalities lose a part in a unit's training and validation, bool (N, M).

    M are the modalities of the strategy. None: all samples are whole.
    """
    rate = parse(unit.strategy).damaged
    if not rate:
        return None
    columns = [list(bench.modalities).index(m) for m in modalities_of(bench, unit.strategy)]
    return draw_damaged(bench, bench.folds[unit.fold], rate)[:, columns]


def draw_damaged(bench: Bench, fold: Fold, rate: float) -> Tensor:
    """Draw which modalities of a fold's training and validation samples lose a part, bool (N, M).

    Each that a sample has is drawn with this rate, the same ones for every strategy; a higher rate
    adds to those of a lower one. The test split stays whole.
    """
    generator = torch.Generator().manual_seed(seed_of("damaged in training", bench.cfg.seed))
    damaged = bench.present & (torch.rand(bench.present.shape, generator=generator) < rate)
    learned = torch.zeros(len(damaged), dtype=torch.bool)
    learned[torch.cat([fold.train, fold.val])] = True
    return damaged & learned[:, None]


class LostParts(PairedDataset):
    """A data set in which some samples lose a part of a modality, always the same part."""

    def __init__(self, dataset: PairedDataset, damaged: Mapping[str, Tensor]) -> None:
        """`damaged` maps modalities to the samples whose value loses a part, bool (N,)."""
        self.__dict__.update(copy.copy(dataset).__dict__)
        self.damaged_rows = {  # numbers in the table, which views share
            name: set(dataset.rows[mask].tolist()) for name, mask in damaged.items()
        }

    def __getitem__(self, key: int | tuple[int, int]) -> Sample | None:
        sample = super().__getitem__(key)
        row = int(self.rows[key[0] if isinstance(key, tuple) else key])
        for name, kind in self.modalities.items():
            if sample is not None and row in self.damaged_rows.get(name, ()):
                sample = corrupt_sample(sample, name, kind, LOST_PART[kind], SEVERITY)
        return sample


class DamagedFeatures(NamedTuple):
    """Cached features of a modality's damaged samples, which replace those of the whole ones."""

    places: Tensor  # (N,) in `stored`; -1: the sample stays whole
    stored: StoredFeatures


def damaged_features(stored: StoredFeatures, rows: Tensor, damaged: Tensor) -> DamagedFeatures:
    """Select samples of a cache entry; `rows` (n,) are those of the entry, `damaged` is (N,)."""
    places = torch.full(damaged.shape, -1)
    places[rows] = torch.arange(len(rows))
    return DamagedFeatures(places.masked_fill(~damaged, -1), stored)


def replace_rows(features: Features, rows: Tensor, others: Features) -> Features:
    """Replace the features of some samples; both are padded to the larger number of tokens.

    Shapes: features (..., B, T, D); `rows` bool (..., B) with n ones; others (n, T, D).
    """
    missing = others.mask.shape[-1] - features.mask.shape[-1]
    short, long = max(missing, 0), max(-missing, 0)
    tokens, mask = F.pad(features.tokens, (0, 0, 0, short)), F.pad(features.mask, (0, short))
    tokens, mask, pooled = tokens.clone(), mask.clone(), features.pooled.clone()
    tokens[rows] = F.pad(others.tokens, (0, 0, 0, long))
    mask[rows] = F.pad(others.mask, (0, long))
    pooled[rows] = others.pooled
    return Features(tokens, mask, pooled)
