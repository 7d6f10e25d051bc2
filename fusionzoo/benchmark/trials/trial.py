"""One trial: train one strategy (seed, fold) and compute all reported metrics.

A unit is what one process runs and stores as a whole: one trial, or the trials of several seeds
that are trained together.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusionzoo.config import BenchmarkConfig, OptimConfig, from_tree, merge
from fusionzoo.creating import create_model
from fusionzoo.distributed.process_group import seed_everything
from fusionzoo.encoders import Encoder
from fusionzoo.encoders.augment import set_augmentation
from fusionzoo.evaluation.cost import random_features
from fusionzoo.fusion import Fusion, create_fusion
from fusionzoo.model import FusionModel
from fusionzoo.rng import seed_of
from fusionzoo.training.build import choose_encoders

from ..balanced import BalancedTrainer, CachedEncoder
from ..bench import Bench, Settings, Unit, dataset_of, target_spec, tasks_of
from ..features.feeds import BatchFeed, ProbeFeed, device_of, removed_modalities
from ..features.lost_parts import LostParts, damaged_modalities
from ..fit import FitResult, StopEarly, fit
from ..folds import Fold
from ..strategies import LINEAR, fusion_of, modalities_of, parse, reads_tokens
from ..trainers import SingleTrainer, StackedTrainer, Trainer, stackable
from . import linear
from .examine import Examiner
from .store import TrialResult


class Trained(NamedTuple):
    """The trained models of a unit."""

    fits: list[FitResult]  # one per seed
    seconds: float  # of training each


def run(bench: Bench, unit: Unit, trained: Trained | None = None) -> list[TrialResult]:
    """Train the models of a unit, unless they are trained already, and compute their metrics."""
    if unit.strategy in LINEAR:
        return linear.run(bench, unit)
    start = time.perf_counter()
    models, feed = build(bench, unit)
    if trained is None:
        fits = train(bench, unit, models, feed)
        trained = Trained(fits, (time.perf_counter() - start) / len(models))
    examiner = Examiner(bench, unit, feed)
    train_rows = bench.folds[unit.fold].train
    prior = tasks_of(bench, train_rows).prior(bench.targets[train_rows])
    results = []
    for seed, model, fit_result in zip(unit.seeds, models, trained.fits, strict=True):
        model.load_state_dict(fit_result.weights)
        model.set_prior(prior)
        results.append(examiner.examine(model, seed, fit_result, trained.seconds))
    return results


def train(
    bench: Bench,
    unit: Unit,
    models: Sequence[FusionModel],
    feed: ProbeFeed | BatchFeed,
    stop_early: StopEarly | None = None,
) -> list[FitResult]:
    """Train the models of a unit, with the training settings that tuning chose."""
    cfg, fold = training_settings(bench.cfg, unit.training), bench.folds[unit.fold]
    targets = bench.targets
    if unit.shuffled:
        targets = shuffle_labels(targets, fold, seed_of(unit.strategy, unit.seeds[0]))
    if cfg.mode == "finetune":
        targets = targets.to(device_of(cfg))
    trainer = _trainer(bench, unit, models, feed, cfg, targets)
    return fit(trainer, feed, targets, fold.train, fold.val, unit.seeds, stop_early)


def training_settings(cfg: BenchmarkConfig, changes: Mapping[str, Any]) -> BenchmarkConfig:
    """Return the settings with those of training, `{"epochs": 20, "optim": {...}}`, changed."""
    optim = from_tree(OptimConfig, merge(vars(cfg.optim), changes.get("optim", {})))
    return replace(cfg, epochs=changes.get("epochs", cfg.epochs), optim=optim)


def _trainer(
    bench: Bench,
    unit: Unit,
    models: Sequence[FusionModel],
    feed: ProbeFeed | BatchFeed,
    cfg: BenchmarkConfig,
    targets: Tensor,
) -> Trainer:
    fold = bench.folds[unit.fold]
    tasks = tasks_of(bench, fold.train).to(targets.device)
    if len(models) > 1:
        return StackedTrainer(models, cfg, tasks)
    groups = [bench.groups[row] for row in fold.train.tolist()] if bench.groups else []
    (model,), (seed,), balance = models, unit.seeds, parse(unit.strategy).balance
    if not balance:
        return SingleTrainer(model, cfg, targets[fold.train], groups, seed, tasks)
    splits = None
    if isinstance(feed, BatchFeed):
        rows = {"train": fold.train, "val": fold.val}
        splits = {name: feed.dataset.subset(part) for name, part in rows.items()}
    return BalancedTrainer(model, cfg, tasks, balance, targets, fold.train, groups, seed, splits)


def build(bench: Bench, unit: Unit) -> tuple[list[FusionModel], ProbeFeed | BatchFeed]:
    """Build a model for each seed, and the feed of their inputs."""
    if bench.cfg.mode == "finetune":
        return _build_with_encoders(bench, unit)
    encoders: dict[str, Encoder] = {}
    if parse(unit.strategy).balance:  # strategies ask the encoders for their widths
        encoders = {
            name: CachedEncoder(name, bench.modalities[name], bench.dims[name])
            for name in modalities_of(bench, unit.strategy)
        }
    models = []
    for seed in unit.seeds:
        seed_everything(seed)
        fusion = build_fusion(bench, unit.strategy, unit.settings)
        models.append(FusionModel(encoders, fusion, target_spec(bench), bench.classes))
    return models, ProbeFeed(bench, unit)


def build_fusion(bench: Bench, strategy: str, settings: Settings) -> Fusion:
    """Build the fusion of a strategy for cached features."""
    dims = {name: bench.dims[name] for name in modalities_of(bench, strategy)}
    return create_fusion(fusion_of(strategy), dims, num_outputs=bench.num_outputs, **settings)


def can_stack(bench: Bench, strategy: str, settings: Settings) -> bool:
    """Whether the seeds of a strategy may be trained together."""
    if strategy in LINEAR:
        return True  # the same for every seed
    if bench.cfg.mode == "finetune" or bench.cfg.seeds == 1 or not bench.cfg.stack:
        return False
    if reads_tokens(strategy) or parse(strategy).balance:
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
        model = create_model(
            fusion, components, classes=bench.classes, targets=bench.scheme, kinds=kinds
        )
        set_augmentation(model.named_encoders(), cfg.data.get("augment"), dataset.modalities)
        models.append(model.to(device_of(cfg)))
    if len(names) == 1:
        dataset = dataset.only(names[0])
    damaged = damaged_modalities(bench, unit)
    if damaged is not None:
        dataset = LostParts(dataset, dict(zip(names, damaged.unbind(1), strict=True)))
    return models, BatchFeed(dataset, models[0], cfg, removed_modalities(bench, unit))
