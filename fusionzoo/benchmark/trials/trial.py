"""One trial: train one strategy (seed, fold) and compute all reported metrics.

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
from fusionzoo.training.build import choose_encoders

from ..bench import Bench, Fold, Settings, Unit, dataset_of
from ..features.feeds import BatchFeed, ProbeFeed, device_of
from ..fit import FitResult, fit
from ..strategies import fusion_of, modalities_of, reads_tokens
from ..trainers import SingleTrainer, StackedTrainer, Trainer, stackable
from .examine import Examiner
from .store import TrialResult


def run(bench: Bench, unit: Unit) -> list[TrialResult]:
    """Train the models of a unit and compute their metrics."""
    start = time.perf_counter()
    models, feed = build(bench, unit)
    fitted = train(bench, unit, models, feed)
    seconds = (time.perf_counter() - start) / len(models)
    examiner = Examiner(bench, unit, feed)
    results = []
    for seed, model, fit_result in zip(unit.seeds, models, fitted, strict=True):
        model.load_state_dict(fit_result.weights)
        results.append(examiner.examine(model, seed, fit_result, seconds))
    return results


def train(
    bench: Bench, unit: Unit, models: Sequence[FusionModel], feed: ProbeFeed | BatchFeed
) -> list[FitResult]:
    """Train the models of a unit, with the optimiser settings that tuning chose."""
    cfg, fold = bench.cfg, bench.folds[unit.fold]
    cfg = replace(cfg, optim=from_tree(OptimConfig, merge(vars(cfg.optim), unit.optim)))
    targets = bench.targets
    if unit.shuffled:
        targets = shuffle_labels(targets, fold, crc32(f"{unit.strategy}/{unit.seeds[0]}".encode()))
    if cfg.mode == "finetune":
        targets = targets.to(device_of(cfg))
    trainer: Trainer
    if len(models) > 1:
        trainer = StackedTrainer(models, cfg)
    else:
        groups = [bench.groups[row] for row in fold.train.tolist()] if bench.groups else []
        trainer = SingleTrainer(models[0], cfg, targets[fold.train], groups, unit.seeds[0])
    return fit(trainer, feed, targets, fold.train, fold.val, unit.seeds)


def build(bench: Bench, unit: Unit) -> tuple[list[FusionModel], ProbeFeed | BatchFeed]:
    """Build a model for each seed, and the feed of their inputs."""
    if bench.cfg.mode == "finetune":
        return _build_with_encoders(bench, unit)
    models = []
    for seed in unit.seeds:
        seed_everything(seed)
        fusion = build_fusion(bench, unit.strategy, unit.settings)
        models.append(FusionModel({}, fusion, {}, bench.classes))
    return models, ProbeFeed(bench, unit)


def build_fusion(bench: Bench, strategy: str, settings: Settings) -> Fusion:
    """Build the fusion of a strategy for cached features."""
    dims = {name: bench.dims[name] for name in modalities_of(bench, strategy)}
    return create_fusion(fusion_of(strategy), dims, num_outputs=len(bench.classes), **settings)


def can_stack(bench: Bench, strategy: str, settings: Settings) -> bool:
    """Whether the seeds of a strategy may be trained together."""
    if bench.cfg.mode == "finetune" or bench.cfg.seeds == 1 or not bench.cfg.stack:
        return False
    if reads_tokens(strategy):
        return False  # one copy keeps the machine busy already
    fusion = build_fusion(bench, strategy, settings)
    with torch.random.fork_rng(devices=[]):
        features = random_features({name: (1, width) for name, width in fusion.dims.items()}, 8)
    return stackable(fusion, features)


def shuffle_labels(targets: Tensor, fold: Fold, seed: int) -> Tensor:
    """Permute the labels within the training split, and within the validation split."""
    generator = torch.Generator().manual_seed(seed)
    shuffled = targets.clone()
    for rows in (fold.train, fold.val):
        shuffled[rows] = targets[rows[torch.randperm(len(rows), generator=generator)]]
    return shuffled


def _build_with_encoders(bench: Bench, unit: Unit) -> tuple[list[FusionModel], BatchFeed]:
    cfg, names = bench.cfg, modalities_of(bench, unit.strategy)
    dataset = dataset_of(bench)
    encoders = choose_encoders(dataset, cfg.encoders)
    components = {name: encoders[name] for name in names}
    kinds = {name: dataset.modalities[name] for name in names}
    fusion = {"name": fusion_of(unit.strategy), **unit.settings}
    models = []
    for seed in unit.seeds:
        seed_everything(seed)
        model = create_model(fusion, components, classes=bench.classes, kinds=kinds)
        models.append(model.to(device_of(cfg)))
    if len(names) == 1:
        dataset = dataset.only(names[0])
    return models, BatchFeed(dataset, models[0], cfg)
