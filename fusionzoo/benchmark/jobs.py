"""One job: train one candidate (seed, fold), compute all reported metrics, store them."""

from __future__ import annotations

import itertools
import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fusionzoo.config import BenchmarkConfig, OptimConfig, from_tree, merge
from fusionzoo.datasets import PairedDataset
from fusionzoo.devices import seed_everything
from fusionzoo.encoders import Encoder
from fusionzoo.encoders.augment import set_augmentation
from fusionzoo.errors import FusionZooError
from fusionzoo.evaluation.calibration import calibration
from fusionzoo.evaluation.cost import head_cost, random_features
from fusionzoo.evaluation.robustness import LOST_PART, Corrupted, subset_label, subsets
from fusionzoo.features import StoredFeatures, encode, load_features
from fusionzoo.files import replacing
from fusionzoo.fusion import Fusion, create_fusion
from fusionzoo.model import FusionModel, create_model
from fusionzoo.structures import Features, keep_only, seed_of
from fusionzoo.targets import Number, Target
from fusionzoo.training import run_folder
from fusionzoo.training.build import choose_encoders
from fusionzoo.training.multitask import Tasks

from .bench import (
    Bench,
    Condition,
    Fold,
    Job,
    Settings,
    conditions,
    damaged_rows,
    dataset_of,
    sample_scores,
    target_spec,
    tasks_of,
)
from .candidates import fusion_of, is_linear, modalities_of, parse, reads_tokens
from .feeds import (
    BatchFeed,
    LostParts,
    ProbeFeed,
    damaged_modalities,
    device_of,
    loader_workers,
    removed_modalities,
)
from .train import (
    BalancedTrainer,
    CachedEncoder,
    FitResult,
    SingleTrainer,
    StackedTrainer,
    Trainer,
    Weights,
    fit,
    refit,
    stackable,
)

Row = dict[str, Any]  # of results.parquet


class SeedResult(NamedTuple):
    """The result of one candidate on one fold with one seed; a job has one for each seed."""

    seed: int
    rows: list[Row]  # one per subset, broken pairing and corruption
    facts: dict[str, Any]  # best epoch, loss, costs
    logits: np.ndarray  # (N, K) of the whole test split
    val_logits: np.ndarray
    scores: np.ndarray  # (U, N) of each subset of the modalities, the full one first
    # (C, n) of the damaged samples: undamaged, then in the order of `rows` with a lost part each.
    lost_scores: np.ndarray | None = None
    val_losses: np.ndarray | None = None  # (N,) as in FitResult; linear baselines have none
    weights: Weights | None = None  # of the tested model, until damaged samples are tested too


def folder_of(out: str) -> Path:
    """Return the folder of the stored results of jobs in the folder of a report."""
    return Path(out) / "cells"


def weights_path(path: Path) -> Path:
    """Return the file of the tested models' weights: there until damaged samples are tested."""
    return path.with_suffix(".pt")


def save(path: Path, job: Job, results: Sequence[SeedResult]) -> None:
    """Write the results of a job, completely or not at all."""
    weights = [result.weights for result in results if result.weights is not None]
    if weights:
        path.parent.mkdir(parents=True, exist_ok=True)
        run_folder.write({"weights": weights}, weights_path(path))
    arrays: dict[str, np.ndarray] = {}
    for number, result in enumerate(results):
        arrays[f"logits{number}"], arrays[f"val{number}"] = result.logits, result.val_logits
        arrays[f"scores{number}"] = result.scores
        for name, array in (("lost", result.lost_scores), ("losses", result.val_losses)):
            if array is not None:
                arrays[f"{name}{number}"] = array
    entries = [[result.seed, result.rows, result.facts] for result in results]
    metadata = json.dumps({"unit": job.stored(), "cells": entries})
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial, partial.open("wb") as file:
        np.savez_compressed(file, about=np.array(metadata), allow_pickle=False, **arrays)
    if not weights:
        weights_path(path).unlink(missing_ok=True)


def load(path: Path) -> list[SeedResult] | None:
    """Read the results of a job; None if there are none, or if the file is damaged."""
    if not path.is_file():
        return None
    try:
        with np.load(path, allow_pickle=False) as arrays:
            entries = json.loads(str(arrays["about"]))["cells"]
            names = ("logits", "val", "scores")
            results = [
                SeedResult(*entry, *(arrays[f"{name}{number}"] for name in names))
                for number, entry in enumerate(entries)
            ]
            return [  # files of earlier versions lack these scores
                result._replace(
                    lost_scores=arrays.get(f"lost{number}"),
                    val_losses=arrays.get(f"losses{number}"),
                )
                for number, result in enumerate(results)
            ]
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        print(f"warning: {path} is damaged ({error}); its job is run again")
        path.unlink()
        return None


FeaturesByModality = dict[str, Features]
UNDAMAGED: Condition = ("", "undamaged", 0)


class Examiner:
    """Computes the metrics of the models of one job."""

    def __init__(self, bench: Bench, job: Job, feed: ProbeFeed | BatchFeed) -> None:
        self.bench, self.job, self.feed = bench, job, feed
        self.modalities = modalities_of(bench, job.candidate)
        self.fold = bench.folds[job.fold]
        self.target = bench.targets[self.fold.test]
        self.tasks = tasks_of(bench, self.fold.train)
        self.sorted_test, self.test_order = self.fold.test.sort()

    def examine(
        self,
        model: FusionModel,
        seed: int,
        fit_result: FitResult,
        seconds: float,
        val_logits: Tensor,
    ) -> SeedResult:
        """Return the metrics of one trained model; a control gets those of the test split only.

        Where damaged samples are tested later, the result has the model's weights.
        """
        model.eval()
        test, weights = self.test_features(model), None
        model.fusion.cpu()
        logits = predict(model, test)
        scores = [self._scores(logits)]
        rows, lost_scores = [self._row(logits, "full")], None
        if not self.job.shuffled:
            for subset in subsets(self.modalities)[-2::-1]:  # the full one first, as in `scores`
                masked = predict(model, keep_only(test, *subset))
                scores.append(self._scores(masked))
                rows.append(self._row(masked, subset_label(subset)))
            rows += self._broken_pairings(model, test, seed)
            if tests_damage_later(self.bench):
                weights = {name: x.detach().clone() for name, x in model.state_dict().items()}
            else:
                damaged, lost_scores = self._damaged(model, test)
                rows += damaged
        facts = {
            "best_epoch": fit_result.best_epoch,
            "epochs": fit_result.epochs,
            "val_loss": fit_result.loss,
            "seconds": seconds,
            **head_cost(model.fusion, test),
            "stacked": len(self.job.seeds) > 1,
        }
        return SeedResult(
            seed,
            rows,
            facts,
            logits.numpy(),
            val_logits.numpy(),
            torch.stack(scores).float().numpy(),
            lost_scores,
            fit_result.losses.numpy(),
            weights,
        )

    def add_damaged(self, model: FusionModel, result: SeedResult) -> SeedResult:
        """Return a model's result with the metrics of damaged samples."""
        model.eval()
        damaged, lost_scores = self._damaged(model, self.test_features(model))
        return result._replace(rows=[*result.rows, *damaged], lost_scores=lost_scores)

    def validate(self, model: FusionModel) -> Tensor:
        """Return the logits of the validation samples, (N, K)."""
        model.eval()
        val = self._features(model, self.fold.val)
        model.fusion.cpu()
        return predict(model, val)

    def test_features(self, model: FusionModel) -> FeaturesByModality:
        """Return the features of the test samples."""
        return self._features(model, self.fold.test)

    def _features(self, model: FusionModel, rows: Tensor) -> FeaturesByModality:
        """Return the features of samples, those of the cache or those of the model's encoders."""
        if isinstance(self.feed, ProbeFeed):
            (features,) = self.feed([rows], -1)
            return features
        samples = self.feed.dataset.subset(rows)
        return {name: self._encode(model, samples, name) for name in self.modalities}

    def _corrupted(self, model: FusionModel) -> Iterator[tuple[Condition, Features]]:
        """Yield the features of each modality's damaged test samples, condition by condition."""
        if isinstance(self.feed, ProbeFeed):
            yield from self._corrupted_from_cache(self.feed)
            return
        samples = self.feed.dataset.subset(damaged_rows(self.bench, self.fold))
        for condition in conditions(self.bench):
            if condition[0] in self.modalities:
                damaged = Corrupted(samples, *condition)
                yield condition, self._encode(model, damaged, condition[0])

    def _corrupted_from_cache(self, feed: ProbeFeed) -> Iterator[tuple[Condition, Features]]:
        rows = damaged_rows(self.bench, self.fold)
        for condition, damaged in self.bench.corrupted[self.job.fold].items():
            if condition[0] in self.modalities:
                stored = load_features(damaged.description)
                places = torch.searchsorted(damaged.rows, rows)  # entries are in order of rows
                yield condition, feed.take(condition[0], stored, places)

    def _encode(self, model: FusionModel, samples: PairedDataset, modality: str) -> Features:
        cfg = self.bench.cfg
        stored = encode(
            dict(model.named_encoders())[modality],
            samples,
            num_workers=loader_workers(cfg),
            device=device_of(cfg),
            progress=False,
        )
        return stored.take(_all_rows(stored), reads_tokens(self.job.candidate))

    def _scores(self, logits: Tensor) -> Tensor:
        return sample_scores(self.tasks, logits, self.target)

    def _row(self, logits: Tensor, subset: str, condition: Condition = ("", "", 0)) -> Row:
        return score_row(self.tasks, logits, self.target, self._scores(logits), subset, condition)

    def _damaged(
        self, model: FusionModel, test: FeaturesByModality
    ) -> tuple[list[Row], NDArray[np.float32] | None]:
        """Evaluate samples of which one modality is damaged; the same ones undamaged come first.

        Also return the samples' scores (C, n) undamaged and with each lost part.
        """
        rows: list[Row] = []
        lost_scores: list[Tensor] = []
        damaged = damaged_rows(self.bench, self.fold)
        numbers = torch.searchsorted(self.sorted_test, damaged)
        numbers = self.test_order[numbers]
        clean = {name: Features(*(x[numbers] for x in whole)) for name, whole in test.items()}
        target = self.target[numbers]
        undamaged: tuple[Condition, Features | None] = UNDAMAGED, None
        for condition, features in itertools.chain([undamaged], self._corrupted(model)):
            changed = clean if features is None else {**clean, condition[0]: features}
            logits = predict(model, changed)
            scores = sample_scores(self.tasks, logits, target)
            rows.append(score_row(self.tasks, logits, target, scores, "full", condition))
            if takes_part(self.bench, condition):
                lost_scores.append(scores)
        if len(rows) == 1:
            return [], None
        return rows, torch.stack(lost_scores).float().numpy()

    def _broken_pairings(
        self, model: FusionModel, test: FeaturesByModality, seed: int
    ) -> list[Row]:
        """Evaluate with one modality, each in turn, taken from another sample."""
        rows = []
        for number, (name, features) in enumerate(test.items()):
            present_rows = features.mask.any(1).nonzero()[:, 0]
            generator = torch.Generator().manual_seed(seed_of(seed, number))
            # A random cycle: every sample gets the value of another.
            cycle = present_rows[torch.randperm(len(present_rows), generator=generator)]
            order = torch.arange(len(features.mask))
            order[cycle] = cycle.roll(1)
            changed = {**test, name: Features(*(x[order] for x in features))}
            rows.append(self._row(predict(model, changed), "full", (name, "pairing", 0)))
        return rows


def takes_part(bench: Bench, condition: Condition) -> bool:
    """Whether a modality loses a part in a condition, or the condition is the undamaged one."""
    modality, corruption, _ = condition
    return condition == UNDAMAGED or corruption == LOST_PART.get(bench.modalities.get(modality, ""))


def score_row(
    tasks: Tasks,
    logits: Tensor,
    target: Tensor,
    scores: Tensor,
    subset: str,
    condition: Condition = ("", "", 0),
) -> Row:
    """Return a row of results: what was tested, the score and all metrics."""
    metrics = tasks.metrics(logits, target)
    if tasks.plain:
        metrics |= calibration(logits, target)
        metrics.pop("loss")  # `nll` is the same, but for settings of the objective
    modality, corruption, severity = condition
    labels = {"subset": subset, "modality": modality, "corruption": corruption}
    return {**labels, "severity": severity, "score": float(scores.mean()), **metrics}


@torch.no_grad()
def predict(model: FusionModel, features: Mapping[str, Features]) -> Tensor:
    """Return the logits of all samples, (N, K)."""
    count = len(next(iter(features.values())).mask)
    parts = []
    for rows in torch.arange(count).split(256):
        part = {name: Features(*(x[rows] for x in tensors)) for name, tensors in features.items()}
        parts.append(model.fuse(part).logits.float())
    logits = torch.cat(parts)
    if not logits.isfinite().all():
        raise FusionZooError("the logits of the test split are not finite")
    return logits


def _all_rows(stored: StoredFeatures) -> Tensor:
    return torch.arange(len(stored.pooled))


PENALTIES = (0.1, 1.0, 10.0, 100.0, 1000.0)  # C of scikit-learn: the inverse of the penalty
FARTHEST = 1e-5, 1e7  # where the search ends if the best penalty lies at the end of those
EDGE = 1e-7  # probabilities are kept this far from 0 and 1

Matrix = NDArray[np.float64]


class _Rows(NamedTuple):
    """What a linear model reads of some samples."""

    numbers: Tensor  # (N,) of the samples
    x: Matrix  # (N, D)
    present: Tensor  # (N,) whether they have one of the modalities


def run_linear(bench: Bench, job: Job) -> list[SeedResult]:
    """Fit a linear model on a fold; it has no seed, so all seeds share one result.

    It learns from the samples that have one of its modalities, and answers the others with the
    prior. Each penalty is fitted from zero, which takes 0.05 s (540 rows of 1,280 numbers, 12
    classes): started from its neighbour's weights, scikit-learn stops before it has moved.
    With `cfg.refit` the model that is tested learns from the validation samples too.
    """
    start = time.perf_counter()
    fold, feed = bench.folds[job.fold], ProbeFeed(bench, job)
    wanted = [fold.train, fold.val, fold.test, learned_rows(bench, fold)]
    train, val, test, learned = (
        _Rows(rows, _matrix(x), torch.stack([part.mask.any(1) for part in x.values()]).any(0))
        for rows, x in zip(wanted, feed(wanted, -1), strict=True)
    )
    if not train.present.any():
        names = ", ".join(modalities_of(bench, job.candidate))
        raise FusionZooError(f"no training sample of fold {job.fold} has {names}: add some")
    tasks = tasks_of(bench, fold.train)

    def validated(penalty: float) -> tuple[float, Tensor]:
        logits = _answer(bench, train, val, penalty)
        return float(tasks.criterion(logits, bench.targets[fold.val]).mean()), logits

    penalty, (loss, val_logits) = best_penalty(validated)
    test_logits = _answer(bench, learned, test, penalty)
    scores = sample_scores(tasks, test_logits, bench.targets[fold.test])
    row = score_row(tasks, test_logits, bench.targets[fold.test], scores, "full")
    facts = {"val_loss": loss, "penalty": penalty, "seconds": time.perf_counter() - start}
    return [
        SeedResult(
            seed,
            [row],
            facts,
            test_logits.numpy(),
            val_logits.numpy(),
            scores.numpy()[None].astype(np.float32),
        )
        for seed in job.seeds
    ]


def _answer(bench: Bench, learned: _Rows, asked: _Rows, penalty: float) -> Tensor:
    """Fit a linear model on some samples; return the logits of others, (N, K)."""
    labels = bench.targets[learned.numbers]
    known = learned.present if bench.scheme is not None else learned.present & (labels >= 0)
    tasks = tasks_of(bench, learned.numbers)
    (logits,) = _fit(tasks, learned.x[known.numpy()], labels[known], (asked.x,), penalty)
    return torch.where(asked.present[:, None], logits, prior_logits(bench, learned.numbers))


Fitted = TypeVar("Fitted", bound=tuple[Any, ...])  # the validation loss comes first


def best_penalty(fit_penalty: Callable[[float], Fitted]) -> tuple[float, Fitted]:
    """Return the penalty with the least validation loss, and what was fitted with it.

    Where that is the first or last of PENALTIES, the search goes on beyond it, tenfold each time.
    """
    fitted = {penalty: fit_penalty(penalty) for penalty in PENALTIES}
    while True:
        best = min(fitted, key=lambda penalty: fitted[penalty][0])
        step = {min(fitted): 0.1, max(fitted): 10.0}.get(best)
        if step is None or not FARTHEST[0] < best * step < FARTHEST[1]:
            return best, fitted[best]
        fitted[best * step] = fit_penalty(best * step)


def prior_logits(bench: Bench, rows: Tensor) -> Tensor:
    """Return the logits of an answer without any input, from the labels of these rows: (K,)."""
    prior = tasks_of(bench, rows).prior(bench.targets[rows])
    return prior.float().clamp(min=1e-9).log()


def _matrix(features: Mapping[str, Features]) -> Matrix:
    """Put the modalities' pooled vectors side by side: (N, D)."""
    parts = [x.pooled.masked_fill(~x.mask.any(1)[:, None], 0) for x in features.values()]
    return np.asarray(torch.cat(parts, 1).double().numpy(), np.float64)


def _fit(
    tasks: Tasks, x: Matrix, labels: Tensor, others: tuple[Matrix, ...], penalty: float
) -> list[Tensor]:
    """Fit each target on its labelled rows; return the logits of other rows, (N, K) each."""
    if tasks.plain:
        parts = [_classify(x, labels.numpy(), tasks.first.target.width, others, penalty)]
    else:
        parts = [
            _fit_target(task.target, x, label, others, penalty)  # type: ignore[arg-type]
            for task, label in zip(tasks.tasks, labels.split(tasks.columns, 1), strict=True)
        ]
    return [
        torch.from_numpy(np.concatenate([part[number] for part in parts], 1)).float()
        for number in range(len(others))
    ]


def _fit_target(
    target: Target, x: Matrix, labels: Tensor, others: tuple[Matrix, ...], penalty: float
) -> list[Matrix]:
    labelled = ~labels.isnan().any(1).numpy()
    x, y = x[labelled], labels.numpy()[labelled]
    kind = target.standard_kind()
    if isinstance(target, Number):
        from sklearn.linear_model import Ridge

        model = Ridge(alpha=len(x) / penalty / 100).fit(x, y)
        labels_of = [model.predict(other).reshape(len(other), -1) for other in others]
        return [target.logits_of(torch.from_numpy(found)).numpy() for found in labels_of]
    if kind == "multilabel":
        columns = [_classify(x, column, 2, others, penalty) for column in y.T]
        return [
            np.stack([logits[n][:, 1] - logits[n][:, 0] for logits in columns], 1)
            for n in range(len(others))
        ]
    classes = _classify(x, y[:, 0], len(target.classes), others, penalty)
    if kind == "classification":
        return classes
    return [_above(np.exp(logits)) for logits in classes]


def _classify(
    x: Matrix, y: NDArray[np.generic], width: int, others: tuple[Matrix, ...], penalty: float
) -> list[Matrix]:
    """Return log-probabilities (N, width); classes that the rows lack get the least."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    results = [np.full((len(other), width), np.log(EDGE)) for other in others]
    present = np.unique(y.astype(int))
    if len(present) == 1:
        for result in results:
            result[:, present[0]] = 0.0
        return results
    model = LogisticRegression(C=penalty, max_iter=500, tol=1e-3)
    with warnings.catch_warnings():  # weights that still grow are judged by the validation loss
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(x, y.astype(int))
    for result, other in zip(results, others, strict=True):
        result[:, model.classes_] = np.log(model.predict_proba(other).clip(EDGE))
    return results


def _above(shares: Matrix) -> Matrix:
    """Turn probabilities of levels into logits of P(level > k | level >= k): (N, K) -> (N, K-1)."""
    at_least = np.flip(np.flip(shares, 1).cumsum(1), 1)
    chance = (at_least[:, 1:] / at_least[:, :-1].clip(EDGE)).clip(EDGE, 1 - EDGE)
    return np.asarray(np.log(chance) - np.log1p(-chance), np.float64)


class Trained(NamedTuple):
    """The trained models of a job."""

    fits: list[FitResult]  # one per seed
    seconds: float  # of training each


def run_job(bench: Bench, job: Job, trained: Trained | None = None) -> list[SeedResult]:
    """Train the models of a job, unless they are trained already, and compute their metrics.

    Validated are the models of the training split. Tested are those or, with `cfg.refit`, models
    that learnt from the validation split too, for as many epochs as were best for the first ones.
    """
    if is_linear(job.candidate):
        return run_linear(bench, job)
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


def tests_damage_later(bench: Bench) -> bool:
    """Whether damaged samples are tested last, since they change no choice and no verdict.

    In finetune mode a model would be trained, or its encoders stored, for that alone.
    """
    return bench.cfg.mode == "probe" and bool(conditions(bench))


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
    return tasks_of(bench, rows).prior(bench.targets[rows])


def learned_rows(bench: Bench, fold: Fold) -> Tensor:
    """Return the rows that the tested models of a fold learn from, (N,)."""
    return torch.cat([fold.train, fold.val]).sort().values if bench.cfg.refit else fold.train


def train(
    bench: Bench, job: Job, models: Sequence[FusionModel], feed: ProbeFeed | BatchFeed
) -> Trained:
    """Train the models of a job on the training split, with the settings that tuning chose."""
    start = time.perf_counter()
    cfg, fold = training_settings(bench.cfg, job.training), bench.folds[job.fold]
    targets = _targets(bench, job)
    trainer = _trainer(bench, job, models, feed, cfg, targets, fold.train)
    fits = fit(trainer, feed, targets, fold.train, fold.val, job.seeds)
    return Trained(fits, (time.perf_counter() - start) / len(models))


def tested_weights(bench: Bench, job: Job, trained: Trained) -> list[Weights]:
    """Return the weights that are tested: these or, with `cfg.refit`, those of new models.

    New models learn from training and validation split together, each for its best epoch.
    """
    if not bench.cfg.refit:
        return [fit_result.weights for fit_result in trained.fits]
    epochs = [fit_result.best_epoch for fit_result in trained.fits]
    models, feed = build(bench, job)
    cfg, rows = (
        training_settings(bench.cfg, job.training),
        learned_rows(bench, bench.folds[job.fold]),
    )
    targets = _targets(bench, job)
    trainer = _trainer(bench, job, models, feed, cfg, targets, rows)
    return refit(trainer, feed, targets, rows, job.seeds, epochs)


def _targets(bench: Bench, job: Job) -> Tensor:
    """Return the targets of all rows, those of training and validation shuffled for a control."""
    targets = bench.targets
    if job.shuffled:
        fold = bench.folds[job.fold]
        targets = shuffle_labels(targets, fold, seed_of(job.candidate, job.seeds[0]))
    return targets.to(device_of(bench.cfg)) if bench.cfg.mode == "finetune" else targets


def training_settings(cfg: BenchmarkConfig, changes: Mapping[str, Any]) -> BenchmarkConfig:
    """Return the settings with those of training, `{"epochs": 20, "optim": {...}}`, changed."""
    optim = from_tree(OptimConfig, merge(vars(cfg.optim), changes.get("optim", {})))
    return replace(cfg, epochs=changes.get("epochs", cfg.epochs), optim=optim)


def _trainer(
    bench: Bench,
    job: Job,
    models: Sequence[FusionModel],
    feed: ProbeFeed | BatchFeed,
    cfg: BenchmarkConfig,
    targets: Tensor,
    rows: Tensor,
) -> Trainer:
    """Return what trains the models of a job on these rows."""
    tasks = tasks_of(bench, rows).to(targets.device)
    if len(models) > 1:
        return StackedTrainer(models, cfg, tasks)
    groups = [bench.groups[row] for row in rows.tolist()] if bench.groups else []
    (model,), (seed,), balance = models, job.seeds, parse(job.candidate).balance
    if not balance:
        return SingleTrainer(model, cfg, targets[rows], groups, seed, tasks)
    splits = None
    if isinstance(feed, BatchFeed):
        parts = {"train": rows, "val": bench.folds[job.fold].val}
        splits = {name: feed.dataset.subset(part) for name, part in parts.items()}
    return BalancedTrainer(model, cfg, tasks, balance, targets, rows, groups, seed, splits)


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
    if is_linear(candidate):
        return True  # the same for every seed
    if bench.cfg.mode == "finetune" or bench.cfg.seeds == 1 or not bench.cfg.stack:
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
        model = create_model(
            fusion, components, classes=bench.classes, targets=bench.scheme, kinds=kinds
        )
        set_augmentation(model.named_encoders(), cfg.data.get("augment"), dataset.modalities)
        models.append(model.to(device_of(cfg)))
    if len(names) == 1:
        dataset = dataset.only(names[0])
    damaged = damaged_modalities(bench, job)
    if damaged is not None:
        dataset = LostParts(dataset, dict(zip(names, damaged.unbind(1), strict=True)))
    return models, BatchFeed(dataset, models[0], cfg, removed_modalities(bench, job))
