"""One trial: train one strategy (seeds, fold) and compute all reported metrics.

A unit is what one process runs and stores as a whole: one trial, or the trials of several seeds
that are trained together.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from zlib import crc32

import torch
from torch import Tensor

from fusionzoo.config import OptimConfig, from_tree, merge
from fusionzoo.creating import create_model
from fusionzoo.distributed.process_group import seed_everything
from fusionzoo.evaluation.cost import random_features
from fusionzoo.fusion import Fusion, create_fusion
from fusionzoo.model import FusionModel
from fusionzoo.training.build import choose_encoders, open_dataset

from ..bench import Bench, Fold, Settings, Unit
from ..features.feeds import BatchFeed, ProbeFeed, device
from ..fit import Fitted, Single, Stack, fit, stackable
from ..strategies import fusion_of, names_of, reads_tokens
from .examine import Examiner
from .store import Cell


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


def shuffle_labels(targets: Tensor, fold: Fold, seed: int) -> Tensor:
    """Deal the labels of the training split, and those of validation, out at random."""
    draw = torch.Generator().manual_seed(seed)
    out = targets.clone()
    for rows in (fold.train, fold.val):
        out[rows] = targets[rows[torch.randperm(len(rows), generator=draw)]]
    return out
