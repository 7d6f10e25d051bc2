"""One cell: train a strategy with one seed on one fold, then ask it everything the report tells.

A unit is what is worked off, stored and never done again as a whole: one cell, or the cells of
several seeds that are trained together.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4
from zipfile import BadZipFile
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from fusionzoo.config import OptimConfig, from_tree, merge
from fusionzoo.datasets import PairedDataset
from fusionzoo.errors import FusionZooError
from fusionzoo.evaluation.calibration import calibration
from fusionzoo.evaluation.cost import head_cost, random_features
from fusionzoo.evaluation.metrics import classification
from fusionzoo.evaluation.modalities import subset_label, subsets
from fusionzoo.evaluation.robustness import Corrupted
from fusionzoo.fusion import Fusion, create_fusion, fusion_info
from fusionzoo.model import FusionModel, create_model
from fusionzoo.structures import Features
from fusionzoo.training.distributed import seed_everything
from fusionzoo.training.run import choose_encoders, open_dataset

from .features import Scaler, Stored, encode
from .fit import Fitted, Single, Stack, fit, stackable
from .prepare import BatchFeed, Bench, Condition, Fold, conditions, device, workers

ALONE = "alone:"  # prefix of the strategies that see one modality
Settings = dict[str, Any]
Row = dict[str, Any]  # of results.parquet


class Unit(NamedTuple):
    """What one process works off at a time."""

    strategy: str
    fold: int
    seeds: tuple[int, ...]
    shuffled: bool  # labels of training and validation, as a control
    settings: Settings  # of the fusion, complete
    optim: Settings  # what tuning changed


class Cell(NamedTuple):
    """What came of one seed."""

    seed: int
    rows: list[Row]  # a line per subset, shuffled modality and damage
    facts: dict[str, Any]
    logits: np.ndarray  # (N, K) of the complete test split
    val_logits: np.ndarray


class ProbeFeed:
    """Cached features of rows; with several views, each epoch reads the next."""

    def __init__(self, bench: Bench, unit: Unit) -> None:
        self.tokens = reads_tokens(unit.strategy)
        found = bench.features[unit.fold]
        self.views = [
            {
                name: bench.stored({**found[name], "view": view})
                for name in names_of(bench, unit.strategy)
            }
            for view in range(bench.cfg.views)
        ]
        train = bench.folds[unit.fold].train
        self.scalers = {
            name: Scaler.of(one, train, self.tokens)
            for name, one in self.views[0].items()
            if bench.cfg.standardise
        }

    def __call__(self, chunks: Sequence[Tensor], epoch: int) -> Iterator[dict[str, Features]]:
        """Yield the features of each chunk of rows."""
        stored = self.views[max(epoch, 0) % len(self.views)]
        for rows in chunks:
            yield {name: self.take(name, one, rows) for name, one in stored.items()}

    def take(self, name: str, stored: Stored, rows: Tensor) -> Features:
        """Return some rows of one modality, scaled."""
        features = stored.take(rows, self.tokens)
        return self.scalers[name](features) if name in self.scalers else features


def run(bench: Bench, unit: Unit) -> list[Cell]:
    """Train and examine the cells of a unit."""
    began = time.perf_counter()
    models, feed = build(bench, unit)
    fitted = train(bench, unit, models, feed)
    seconds = (time.perf_counter() - began) / len(models)
    examiner = Examiner(bench, unit, feed)
    cells = []
    for seed, model, one in zip(unit.seeds, models, fitted, strict=True):
        model.load_state_dict(one.weights)
        cells.append(examiner.ask(model, seed, one, seconds))
    return cells


def train(
    bench: Bench, unit: Unit, models: Sequence[FusionModel], feed: ProbeFeed | BatchFeed
) -> list[Fitted]:
    """Train the models of a unit, with what tuning changed of the optimiser."""
    cfg, fold = bench.cfg, bench.folds[unit.fold]
    cfg = replace(cfg, optim=from_tree(OptimConfig, merge(vars(cfg.optim), unit.optim)))
    targets = bench.targets
    if unit.shuffled:
        targets = shuffle_labels(targets, fold, crc32(f"{unit.strategy}/{unit.seeds[0]}".encode()))
    if cfg.mode == "finetune":
        targets = targets.to(device(cfg))
    several = len(models) > 1
    groups = [bench.groups[row] for row in fold.train.tolist()] if bench.groups else []
    trainee = (
        Stack(models, cfg)
        if several
        else Single(models[0], cfg, targets[fold.train], groups, unit.seeds[0])
    )
    return fit(trainee, feed, targets, fold.train, fold.val, unit.seeds)


def build(bench: Bench, unit: Unit) -> tuple[list[FusionModel], ProbeFeed | BatchFeed]:
    """Build a model for each seed, and what feeds them."""
    cfg, names = bench.cfg, names_of(bench, unit.strategy)
    models = []
    if cfg.mode == "finetune":
        dataset = open_dataset(cfg.data)
        encoders = choose_encoders(dataset, cfg.encoders)
        kinds = {name: dataset.modalities[name] for name in names}
        for seed in unit.seeds:
            seed_everything(seed)
            chosen = {name: encoders[name] for name in names}
            fusion = {"name": fusion_of(unit.strategy), **unit.settings}
            model = create_model(fusion, chosen, classes=bench.classes, kinds=kinds)
            models.append(model.to(device(cfg)))
        view = dataset.only(names[0]) if len(names) == 1 else dataset
        return models, BatchFeed(view, models[0], cfg)
    for seed in unit.seeds:
        seed_everything(seed)
        models.append(FusionModel({}, head(bench, unit.strategy, unit.settings), {}, bench.classes))
    return models, ProbeFeed(bench, unit)


def head(bench: Bench, strategy: str, settings: Settings) -> Fusion:
    """Build the fusion that a strategy puts on cached features."""
    dims = {name: bench.dims[name] for name in names_of(bench, strategy)}
    return create_fusion(fusion_of(strategy), dims, num_outputs=len(bench.classes), **settings)


def can_stack(bench: Bench, strategy: str, settings: Settings) -> bool:
    """Whether the seeds of a strategy may be trained together."""
    if bench.cfg.mode == "finetune" or bench.cfg.seeds == 1 or not bench.cfg.stack:
        return False
    if reads_tokens(strategy):
        return False  # one copy fills the machine already
    fusion = head(bench, strategy, settings)
    with torch.random.fork_rng(devices=[]):
        features = random_features({name: (1, width) for name, width in fusion.dims.items()}, 8)
    return stackable(fusion, features)


def names_of(bench: Bench, strategy: str) -> list[str]:
    """Return the modalities that a strategy sees."""
    alone = strategy.removeprefix(ALONE)
    return [alone] if strategy.startswith(ALONE) else list(bench.modalities)


def fusion_of(strategy: str) -> str:
    """Return the fusion behind a strategy; one modality alone goes through `concat`."""
    return "concat" if strategy.startswith(ALONE) else strategy


def reads_tokens(strategy: str) -> bool:
    """Whether a strategy reads tokens, or pooled vectors alone."""
    return fusion_info(fusion_of(strategy)).reads == "tokens"


def shuffle_labels(targets: Tensor, fold: Fold, seed: int) -> Tensor:
    """Deal the labels of the training split, and those of validation, out at random."""
    draw = torch.Generator().manual_seed(seed)
    out = targets.clone()
    for rows in (fold.train, fold.val):
        out[rows] = targets[rows[torch.randperm(len(rows), generator=draw)]]
    return out


# ---- what a trained model is asked


class Examiner:
    """Ask trained models of one strategy about the test split, whole and in every way damaged."""

    def __init__(self, bench: Bench, unit: Unit, feed: ProbeFeed | BatchFeed) -> None:
        self.bench, self.unit, self.feed = bench, unit, feed
        self.names = names_of(bench, unit.strategy)
        self.fold = bench.folds[unit.fold]
        self.target = bench.targets[self.fold.test]

    def ask(self, model: FusionModel, seed: int, fitted: Fitted, seconds: float) -> Cell:
        """Return all figures of one trained model."""
        model.eval()
        test, val, damaged = self._features(model)
        fusion = model.fusion.cpu()
        logits = predict(fusion, test)
        rows = [self._row(logits, "full")]
        if not self.unit.shuffled:
            rows += self._subsets(fusion, test) + self._pairings(fusion, test, seed)
            for condition, features in damaged:
                changed = {**test, condition[0]: features}
                rows.append(self._row(predict(fusion, changed), "full", condition))
        facts = {
            "best_epoch": fitted.best_epoch,
            "epochs": fitted.epochs,
            "val_loss": fitted.loss,
            "seconds": seconds,
            **head_cost(fusion, test),
            "stacked": len(self.unit.seeds) > 1,
        }
        return Cell(seed, rows, facts, logits.numpy(), predict(fusion, val).numpy())

    def _features(
        self, model: FusionModel
    ) -> tuple[dict[str, Features], dict[str, Features], Iterator[tuple[Condition, Features]]]:
        """Return what the fusion sees of test and validation, and of damaged test samples."""
        if isinstance(self.feed, ProbeFeed):
            test, val = self.feed([self.fold.test, self.fold.val], -1)
            return test, val, self._damaged_from_cache(self.feed)
        dataset = self.feed.dataset
        test_set, val_set = dataset.subset(self.fold.test), dataset.subset(self.fold.val)
        test, val = (
            {name: self._encode(model, part, name) for name in self.names}
            for part in (test_set, val_set)
        )
        damaged = (
            (one, self._encode(model, Corrupted(test_set, *one), one[0]))
            for one in conditions(self.bench)
            if one[0] in self.names
        )
        return test, val, damaged

    def _damaged_from_cache(self, feed: ProbeFeed) -> Iterator[tuple[Condition, Features]]:
        for condition, described in self.bench.corrupted[self.unit.fold].items():
            if condition[0] in self.names:
                stored = self.bench.stored(described)
                yield condition, feed.take(condition[0], stored, _all(stored))

    def _encode(self, model: FusionModel, part: PairedDataset, name: str) -> Features:
        cfg = self.bench.cfg
        encoder = dict(model.named_encoders())[name]
        stored = encode(encoder, part, num_workers=workers(cfg), device=device(cfg), progress=False)
        return stored.take(_all(stored), reads_tokens(self.unit.strategy))

    def _row(self, logits: Tensor, subset: str, condition: Condition = ("", "", 0)) -> Row:
        figures = classification(logits, self.target) | calibration(logits, self.target)
        figures.pop("loss")  # `nll` is the same
        modality, corruption, severity = condition
        about = {"subset": subset, "modality": modality, "corruption": corruption}
        return {**about, "severity": severity, **figures}

    def _subsets(self, fusion: Fusion, test: dict[str, Features]) -> list[Row]:
        """Answer with every smaller subset of the modalities, the others truly masked."""
        rows = []
        for some in subsets(self.names)[:-1]:
            masked = {
                name: one if name in some else one._replace(mask=torch.zeros_like(one.mask))
                for name, one in test.items()
            }
            rows.append(self._row(predict(fusion, masked), subset_label(some)))
        return rows

    def _pairings(self, fusion: Fusion, test: dict[str, Features], seed: int) -> list[Row]:
        """Give each sample another one's picture, then another one's text, ..."""
        rows = []
        for number, (name, one) in enumerate(test.items()):
            has = one.mask.any(1).nonzero()[:, 0]
            draw = torch.Generator().manual_seed(1000 * seed + number)
            # A random cycle: every sample gets the value of another.
            cycle = has[torch.randperm(len(has), generator=draw)]
            order = torch.arange(len(one.mask))
            order[cycle] = cycle.roll(1)
            changed = {**test, name: Features(*(x[order] for x in one))}
            rows.append(self._row(predict(fusion, changed), "full", (name, "pairing", 0)))
        return rows


@torch.no_grad()
def predict(fusion: Fusion, features: Mapping[str, Features]) -> Tensor:
    """Return the logits of all samples, (N, K)."""
    count = len(next(iter(features.values())).mask)
    parts = []
    for rows in torch.arange(count).split(256):
        part = {name: Features(*(x[rows] for x in one)) for name, one in features.items()}
        parts.append(fusion(part).logits.float())
    logits = torch.cat(parts)
    if not logits.isfinite().all():
        raise FusionZooError("the logits of the test split are not finite")
    return logits


def _all(stored: Stored) -> Tensor:
    return torch.arange(len(stored.pooled))


# ---- stored cells


def save(path: Path, unit: Unit, cells: Sequence[Cell]) -> None:
    """Write a unit's cells: whole, or not at all."""
    arrays: dict[str, np.ndarray] = {}
    for number, cell in enumerate(cells):
        arrays[f"logits{number}"], arrays[f"val{number}"] = cell.logits, cell.val_logits
    told = [[cell.seed, cell.rows, cell.facts] for cell in cells]
    about = json.dumps({"unit": unit._asdict(), "cells": told})
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.stem}.part-{uuid4().hex[:8]}")
    with part.open("wb") as file:
        np.savez_compressed(file, about=np.array(about), allow_pickle=False, **arrays)
    part.replace(path)


def load(path: Path) -> list[Cell] | None:
    """Read a unit's cells; None where there are none, or where the file is damaged."""
    if not path.is_file():
        return None
    try:
        with np.load(path, allow_pickle=False) as found:
            told = json.loads(str(found["about"]))["cells"]
            return [
                Cell(seed, rows, facts, found[f"logits{number}"], found[f"val{number}"])
                for number, (seed, rows, facts) in enumerate(told)
            ]
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        print(f"warning: {path} is damaged ({error}); its cells are run again")
        path.unlink()
        return None
