"""Evaluate a trained model: the whole test split, every subset of modalities, corrupted samples."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fusionzoo.datasets import PairedDataset
from fusionzoo.errors import FusionZooError
from fusionzoo.evaluation.calibration import calibration
from fusionzoo.evaluation.cost import head_cost
from fusionzoo.evaluation.modalities import subset_label, subsets
from fusionzoo.evaluation.robustness import LOST_PART, Corrupted
from fusionzoo.features.cache import load_features
from fusionzoo.features.encode import StoredFeatures, encode
from fusionzoo.model import FusionModel
from fusionzoo.rng import seed_of
from fusionzoo.structures import Features, keep_only
from fusionzoo.training.tasks.multitask import Tasks

from ..bench import Bench, Condition, Unit, conditions, damaged_rows, tasks_of
from ..features.feeds import BatchFeed, ProbeFeed, device_of, loader_workers
from ..fit import FitResult
from ..metric import sample_scores
from ..strategies import modalities_of, reads_tokens
from .store import Row, TrialResult

FeaturesByModality = dict[str, Features]
UNDAMAGED: Condition = ("", "undamaged", 0)


class Examiner:
    """Computes the metrics of the models of one unit."""

    def __init__(self, bench: Bench, unit: Unit, feed: ProbeFeed | BatchFeed) -> None:
        self.bench, self.unit, self.feed = bench, unit, feed
        self.modalities = modalities_of(bench, unit.strategy)
        self.fold = bench.folds[unit.fold]
        self.target = bench.targets[self.fold.test]
        self.tasks = tasks_of(bench, self.fold.train)
        self.sorted_test, self.test_order = self.fold.test.sort()

    def examine(
        self, model: FusionModel, seed: int, fit_result: FitResult, seconds: float
    ) -> TrialResult:
        """Return all metrics of one trained model; a control gets those of the test split only."""
        model.eval()
        test, val, corrupted = self._features(model)
        model.fusion.cpu()
        logits = predict(model, test)
        scores = [self._scores(logits)]
        rows, lost_scores = [self._row(logits, "full")], None
        if self.unit.whole and not self.unit.shuffled:
            for subset in subsets(self.modalities)[-2::-1]:  # the full one first, as in `scores`
                masked = predict(model, keep_only(test, *subset))
                scores.append(self._scores(masked))
                rows.append(self._row(masked, subset_label(subset)))
            rows += self._broken_pairings(model, test, seed)
            damaged, lost_scores = self._damaged(model, test, corrupted)
            rows += damaged
        facts = {
            "best_epoch": fit_result.best_epoch,
            "epochs": fit_result.epochs,
            "val_loss": fit_result.loss,
            "seconds": seconds,
            **head_cost(model.fusion, test),
            "stacked": len(self.unit.seeds) > 1,
        }
        return TrialResult(
            seed,
            rows,
            facts,
            logits.numpy(),
            predict(model, val).numpy(),
            torch.stack(scores).float().numpy(),
            lost_scores,
        )

    def test_features(self, model: FusionModel) -> FeaturesByModality:
        """Return the features of the test samples."""
        return self._features(model)[0]

    def _features(
        self, model: FusionModel
    ) -> tuple[FeaturesByModality, FeaturesByModality, Iterator[tuple[Condition, Features]]]:
        """Return the features of test and validation samples, and of corrupted test samples."""
        if isinstance(self.feed, ProbeFeed):
            test, val = self.feed([self.fold.test, self.fold.val], -1)
            return test, val, self._corrupted_from_cache(self.feed)
        dataset = self.feed.dataset
        test_set, val_set = dataset.subset(self.fold.test), dataset.subset(self.fold.val)
        test, val = (
            {name: self._encode(model, samples, name) for name in self.modalities}
            for samples in (test_set, val_set)
        )
        damaged_set = dataset.subset(damaged_rows(self.bench, self.fold))
        corrupted = (
            (condition, self._encode(model, Corrupted(damaged_set, *condition), condition[0]))
            for condition in conditions(self.bench)
            if condition[0] in self.modalities
        )
        return test, val, corrupted

    def _corrupted_from_cache(self, feed: ProbeFeed) -> Iterator[tuple[Condition, Features]]:
        rows = damaged_rows(self.bench, self.fold)
        for condition, damaged in self.bench.corrupted[self.unit.fold].items():
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
        return stored.take(_all_rows(stored), reads_tokens(self.unit.strategy))

    def _scores(self, logits: Tensor) -> Tensor:
        return sample_scores(self.tasks, logits, self.target)

    def _row(self, logits: Tensor, subset: str, condition: Condition = ("", "", 0)) -> Row:
        return score_row(self.tasks, logits, self.target, self._scores(logits), subset, condition)

    def _damaged(
        self,
        model: FusionModel,
        test: FeaturesByModality,
        corrupted: Iterator[tuple[Condition, Features]],
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
        for condition, features in itertools.chain([(UNDAMAGED, None)], corrupted):
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
