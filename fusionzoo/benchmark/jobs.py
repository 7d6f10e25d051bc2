"""One job: train one candidate (seed, fold), compute all reported metrics, store them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusionzoo.config import OptimConfig, from_tree, merge
from fusionzoo.encoders import Encoder
from fusionzoo.encoders.augment import set_augmentation
from fusionzoo.errors import FusionZooError
from fusionzoo.evaluation.cost import random_features
from fusionzoo.fusion import Fusion, create_fusion
from fusionzoo.machine.devices import seed_everything
from fusionzoo.machine.distributed import World
from fusionzoo.model.fusion_model import FusionModel, create_model
from fusionzoo.structures import seed_of
from fusionzoo.training import run_folder
from fusionzoo.training.balance import StrategyInputs
from fusionzoo.training.build import choose_encoders

from .bench import Bench, Fold, Job, Settings, dataset_of, learned_rows, target_spec, tasks_of
from .candidates import fusion_of, is_fitted, modalities_of, parse, reads_tokens
from .examine import Examiner
from .feeds import BatchFeed, ProbeFeed, device_of
from .fit_models import run_fitted
from .store import SeedResult, load, save, weights_path
from .train import (
    BalancedTrainer,
    CachedEncoder,
    FeedTrainer,
    FitResult,
    SingleTrainer,
    StackedTrainer,
    Weights,
    fit,
    refit,
    stackable,
)


class TrainedModels(NamedTuple):
    """The trained models of a job."""

    fits: list[FitResult]  # one per seed
    seconds: float  # of training each


def run_job(bench: Bench, job: Job, trained: TrainedModels | None = None) -> list[SeedResult]:
    """Train the models of a job, unless they are trained already, and compute their metrics.

    Validated are the models of the training split. Tested are those or, with `cfg.refit`, models
    that learnt from the validation split too, for as many epochs as were best for the first ones.
    """
    if is_fitted(job.candidate):
        return run_fitted(bench, job)
    models, feed = build(bench, job)
    trained = trained or train(bench, job, models, feed)
    examiner = Examiner(bench, job, feed)
    val_logits = []
    for model, fit_result in zip(models, trained.fits, strict=True):
        model.load_state_dict(fit_result.weights)
        val_logits.append(examiner.validate(model))
    start = time.perf_counter()
    for model, weights in zip(models, tested_weights(bench, job, trained), strict=True):
        model.load_state_dict(weights)
    seconds = trained.seconds + (time.perf_counter() - start) / len(models)
    prior, results = _prior(bench, job), []
    for index, model in enumerate(models):
        model.complete(prior=prior)
        facts = trained.fits[index]
        results.append(examiner.examine(model, job.seeds[index], facts, seconds, val_logits[index]))
    return results


def run_damaged(bench: Bench, job: Job, path: Path) -> None:
    """Test the stored models of a job on damaged samples, and store the results as whole."""
    try:
        weights = run_folder.read(weights_path(path))["weights"]
    except FusionZooError as error:
        print(f"warning: {error}; its job is run again")
        save(path, job, run_job(bench, job))
        weights = run_folder.read(weights_path(path))["weights"]
    results = load(path)
    assert results is not None
    models, feed = build(bench, job)
    examiner = Examiner(bench, job, feed)
    whole = []
    for model, tensors, result in zip(models, weights, results, strict=True):
        model.load_state_dict(tensors)
        model.complete(prior=_prior(bench, job))
        whole.append(examiner.add_damaged(model, result))
    save(path, job, whole)


def _prior(bench: Bench, job: Job) -> Tensor:
    """Return the answer of a job's tested models to a sample without any modality, (K,)."""
    rows = learned_rows(bench, bench.folds[job.fold])
    return tasks_of(bench, rows).prior(bench.targets[rows], bench.weights_of(rows))


def train(
    bench: Bench, job: Job, models: Sequence[FusionModel], feed: ProbeFeed | BatchFeed
) -> TrainedModels:
    """Train the models of a job on the training split."""
    start = time.perf_counter()
    fold, targets = bench.folds[job.fold], _targets(bench, job)
    trainer = _trainer(bench, job, models, feed, targets, fold.train)
    weights = bench.weights_of(fold.val)
    fits = fit(trainer, feed, targets, fold.train, fold.val, job.seeds, weights)
    return TrainedModels(fits, (time.perf_counter() - start) / len(models))


def tested_weights(bench: Bench, job: Job, trained: TrainedModels) -> list[Weights]:
    """Return the weights that are tested: these or, with `cfg.refit`, those of new models.

    New models learn from training and validation split together, each for its best epoch.
    """
    if not bench.cfg.refit:
        return [fit_result.weights for fit_result in trained.fits]
    epochs = [fit_result.best_epoch for fit_result in trained.fits]
    models, feed = build(bench, job)
    rows, targets = learned_rows(bench, bench.folds[job.fold]), _targets(bench, job)
    trainer = _trainer(bench, job, models, feed, targets, rows)
    return refit(trainer, feed, targets, rows, job.seeds, epochs)


def _targets(bench: Bench, job: Job) -> Tensor:
    """Return the targets of all rows, those of training and validation shuffled for a control."""
    targets = bench.targets
    if job.shuffled:
        fold = bench.folds[job.fold]
        targets = shuffle_labels(targets, fold, seed_of(job.candidate, job.seeds[0]))
    return targets.to(device_of(bench.cfg)) if bench.cfg.mode == "finetune" else targets


def _trainer(
    bench: Bench,
    job: Job,
    models: Sequence[FusionModel],
    feed: ProbeFeed | BatchFeed,
    targets: Tensor,
    rows: Tensor,
) -> FeedTrainer:
    """Return what trains the models of a job on these rows, with the settings that tuning chose."""
    cfg, tuned = bench.cfg, job.training
    optim = from_tree(OptimConfig, merge(vars(cfg.optim), tuned.get("optim", {})))
    cfg = replace(cfg, epochs=tuned.get("epochs", cfg.epochs), optim=optim)
    tasks = tasks_of(bench, rows).to(targets.device)
    weights = bench.weights_of(rows)
    if len(models) > 1:
        return StackedTrainer(models, cfg, tasks, weights)
    groups = [bench.groups[row] for row in rows.tolist()] if bench.groups else []
    (model,), (seed,), balance = models, job.seeds, parse(job.candidate).balance
    if not balance:
        return SingleTrainer(model, cfg, targets[rows], groups, seed, tasks, weights)
    splits = None
    if isinstance(feed, BatchFeed):
        parts = {"train": rows, "val": bench.folds[job.fold].val}
        splits = {name: feed.dataset.subset(part) for name, part in parts.items()}
    world = World(device=next(model.parameters()).device)
    inputs = StrategyInputs(model, targets[rows].cpu(), seed, world)
    return BalancedTrainer(inputs, cfg, tasks, balance, rows, groups, splits, weights)


def build(bench: Bench, job: Job) -> tuple[list[FusionModel], ProbeFeed | BatchFeed]:
    """Build a model for each seed, and the feed of their inputs."""
    if bench.cfg.mode == "finetune":
        return _build_with_encoders(bench, job)
    encoders: dict[str, Encoder] = {}
    if parse(job.candidate).balance:  # training strategies ask the encoders for their widths
        encoders = {
            name: CachedEncoder(name, bench.modalities[name], bench.dims[name])
            for name in modalities_of(bench, job.candidate)
        }
    models = []
    for seed in job.seeds:
        seed_everything(seed)
        fusion = build_fusion(bench, job.candidate, job.settings)
        models.append(FusionModel(encoders, fusion, target_spec(bench), bench.classes))
    return models, ProbeFeed(bench, job)


def build_fusion(bench: Bench, candidate: str, settings: Settings) -> Fusion:
    """Build the fusion of a candidate for cached features."""
    dims = {name: bench.dims[name] for name in modalities_of(bench, candidate)}
    return create_fusion(fusion_of(candidate), dims, num_outputs=bench.num_outputs, **settings)


def can_stack(bench: Bench, candidate: str, settings: Settings) -> bool:
    """Whether the seeds of a candidate may be trained together."""
    if is_fitted(candidate):
        return True  # the same for every seed
    if bench.cfg.mode == "finetune" or bench.cfg.seeds == 1:
        return False
    if reads_tokens(candidate) or parse(candidate).balance:
        return False  # one copy keeps the machine busy already
    fusion = build_fusion(bench, candidate, settings)
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


def _build_with_encoders(bench: Bench, job: Job) -> tuple[list[FusionModel], BatchFeed]:
    cfg, names = bench.cfg, modalities_of(bench, job.candidate)
    dataset = dataset_of(bench)
    encoders = choose_encoders(dataset, cfg.encoders)
    components = {name: encoders[name] for name in names}
    kinds = {name: dataset.modalities[name] for name in names}
    fusion = {"name": fusion_of(job.candidate), **job.settings}
    models = []
    for seed in job.seeds:
        seed_everything(seed)
        labels = dict[str, Any](classes=bench.classes, targets=bench.scheme)
        model = create_model(fusion, components, **labels, kinds=kinds)
        set_augmentation(model.named_encoders(), cfg.data.get("augment"), dataset.modalities)
        models.append(model.to(device_of(cfg)))
    if len(names) == 1:
        dataset = dataset.only(names[0])
    return models, BatchFeed(dataset, models[0], cfg)
