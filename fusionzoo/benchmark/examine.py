"""Test models: the subsets of modalities, damaged samples."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fusionzoo.datasets import PairedDataset
from fusionzoo.errors import FusionZooError
from fusionzoo.evaluation.calibration import calibration
from fusionzoo.evaluation.cost import head_cost
from fusionzoo.evaluation.measure import Subset, logits_of
from fusionzoo.evaluation.metrics import row_mean
from fusionzoo.evaluation.robustness import corrupted
from fusionzoo.evaluation.shapley import subset_label, subsets
from fusionzoo.features.cache import load_features
from fusionzoo.features.encode import Compute, encode
from fusionzoo.model.fusion_model import FusionModel
from fusionzoo.structures import Features, seed_of
from fusionzoo.training.multitask import Tasks

from .bench import Bench, Condition, Job, conditions, damaged_rows, tasks_of
from .candidates import modalities_of, reads_tokens
from .feeds import BatchFeed, ProbeFeed, device_of, loader_workers
from .store import Row, SeedResult
from .train import FitResult

FeaturesByModality = dict[str, Features]
UNDAMAGED: Condition = ("", "undamaged", 0)


class Examiner:
    """Computes the metrics of the models of one job."""

    def __init__(self, bench: Bench, job: Job, feed: ProbeFeed | BatchFeed) -> None:
        self.bench, self.job, self.feed = bench, job, feed
        self.modalities = modalities_of(bench, job.candidate)
        self.fold = bench.folds[job.fold]
        self.target = bench.targets[self.fold.test]
        self.weights = bench.weights_of(self.fold.test)
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
        test, weights = self._features(model, self.fold.test), None
        model.fusion.cpu()
        chosen = () if self.job.shuffled else subsets(self.modalities)[-2::-1]
        logits, by_subset = predict_given(model, test, chosen)
        answers = [self._scored(logits)]  # the full one first
        answers += [self._scored(x, subset_label(subset)) for subset, x in by_subset.items()]
        rows = [row for _, row in answers]
        if not self.job.shuffled:
            rows += self._broken_pairings(model, test, seed)
            if tests_damage_later(self.bench):
                weights = {name: x.detach().clone() for name, x in model.state_dict().items()}
            else:
                rows += self._damaged(model, test)
        facts = {
            "best_epoch": fit_result.best_epoch,
            "epochs": fit_result.epochs,
            "val_loss": fit_result.loss,
            "seconds": seconds,
            **head_cost(model.fusion, test),
        }
        return SeedResult(
            seed,
            rows,
            facts,
            logits.numpy(),
            val_logits.numpy(),
            torch.stack([scores for scores, _ in answers]).float().numpy(),
            fit_result.losses.numpy(),
            weights,
        )

    def add_damaged(self, model: FusionModel, result: SeedResult) -> SeedResult:
        """Return a model's result with the metrics of damaged samples."""
        model.eval()
        damaged = self._damaged(model, self._features(model, self.fold.test))
        return result._replace(rows=[*result.rows, *damaged])

    def validate(self, model: FusionModel) -> Tensor:
        """Return the logits of the validation samples, (N, K)."""
        model.eval()
        val = self._features(model, self.fold.val)
        model.fusion.cpu()
        return predict(model, val)

    def _features(self, model: FusionModel, rows: Tensor) -> FeaturesByModality:
        """Return the features of samples, those of the cache or those of the model's encoders."""
        if isinstance(self.feed, ProbeFeed):
            (features,) = self.feed([rows], -1)
            return features
        samples = self.feed.dataset.subset(rows)
        return {name: self._encode(model, samples, name) for name in self.modalities}

    def _corrupted(self, model: FusionModel) -> Iterator[tuple[Condition, Features]]:
        """Yield the features of each modality's damaged test samples, condition by condition."""
        rows = damaged_rows(self.bench, self.fold)
        if isinstance(self.feed, ProbeFeed):
            for condition, damaged in self.bench.corrupted[self.job.fold].items():
                if condition[0] in self.modalities:
                    stored = load_features(damaged.description)
                    places = torch.searchsorted(damaged.rows, rows)  # entries are in order of rows
                    yield condition, self.feed.take(condition[0], stored, places)
            return
        samples = self.feed.dataset.subset(rows)
        for condition in conditions(self.bench):
            if condition[0] in self.modalities:
                changed = corrupted(samples, *condition)
                yield condition, self._encode(model, changed, condition[0])

    def _encode(self, model: FusionModel, samples: PairedDataset, modality: str) -> Features:
        workers, device = loader_workers(self.bench.cfg), device_of(self.bench.cfg)
        compute = Compute(num_workers=workers, device=device, progress=False)
        stored = encode(dict(model.named_encoders())[modality], samples, compute)
        return stored.take(torch.arange(len(stored.pooled)), reads_tokens(self.job.candidate))

    def _scored(
        self, logits: Tensor, subset: str = "full", condition: Condition = ("", "", 0)
    ) -> tuple[Tensor, Row]:
        return scored(self.tasks, logits, self.target, self.weights, subset, condition)

    def _damaged(self, model: FusionModel, test: FeaturesByModality) -> list[Row]:
        """Evaluate samples of which one modality is damaged; the same ones undamaged come first."""
        rows: list[Row] = []
        damaged = damaged_rows(self.bench, self.fold)
        numbers = self.test_order[torch.searchsorted(self.sorted_test, damaged)]
        clean = {name: Features(*(x[numbers] for x in whole)) for name, whole in test.items()}
        target, weights = self.target[numbers], self.bench.weights_of(damaged)
        undamaged: tuple[Condition, Features | None] = UNDAMAGED, None
        for condition, features in itertools.chain([undamaged], self._corrupted(model)):
            changed = clean if features is None else {**clean, condition[0]: features}
            logits = predict(model, changed)
            rows.append(scored(self.tasks, logits, target, weights, "full", condition)[1])
        return rows if len(rows) > 1 else []

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
            rows.append(self._scored(predict(model, changed), "full", (name, "pairing", 0))[1])
        return rows


def all_metrics(
    tasks: Tasks, logits: Tensor, target: Tensor, weights: Tensor | None
) -> dict[str, float]:
    """Return the metrics of answers to samples, of classes with those of calibration."""
    metrics = tasks.metrics(logits, target, weights)
    if tasks.plain:
        metrics |= calibration(logits, target, weights)
        metrics.pop("loss")  # `nll` is the same, but for settings of the objective
    return metrics


def scored(
    tasks: Tasks,
    logits: Tensor,
    target: Tensor,
    weights: Tensor | None,
    subset: str = "full",
    condition: Condition = ("", "", 0),
) -> tuple[Tensor, Row]:
    """Return each sample's score, (N,), and a row of results: what was tested, the mean score and
    all metrics.

    With weights (N,) also `weight`, their sum, by which rows of several folds are averaged.
    """
    scores = tasks.scores(logits, target, weights)
    modality, corruption, severity = condition
    labels = {"subset": subset, "modality": modality, "corruption": corruption}
    score = {"severity": severity, "score": float(row_mean(scores, weights))}
    if math.isnan(score["score"]) and not tasks.metric.of_rows:
        raise tasks.undefined(f"these answers to {len(target):,} test samples")
    if weights is not None:
        score["weight"] = float(weights.double().sum())
    return scores, {**labels, **score, **all_metrics(tasks, logits, target, weights)}


def predict(model: FusionModel, features: Mapping[str, Features]) -> Tensor:
    """Return the logits of all samples, (N, K)."""
    return predict_given(model, features)[0]


def predict_given(
    model: FusionModel, features: Mapping[str, Features], chosen: Sequence[Subset] = ()
) -> tuple[Tensor, dict[Subset, Tensor]]:
    """Return the logits of all samples (N, K), and those given subsets of the modalities."""
    parts = []
    for rows in torch.arange(len(next(iter(features.values())).mask)).split(256):
        part = {name: Features(*(x[rows] for x in tensors)) for name, tensors in features.items()}
        fused, _, by_subset = logits_of(model, part, chosen)
        parts.append([x.float() for x in (fused, *by_subset.values())])
    logits, *masked = (torch.cat(blocks) for blocks in zip(*parts, strict=True))
    if not all(x.isfinite().all() for x in (logits, *masked)):
        raise FusionZooError("the logits of the test split are not finite")
    return logits, dict(zip(chosen, masked, strict=True))


def tests_damage_later(bench: Bench) -> bool:
    """Whether damaged samples are tested last, since they change no choice and no verdict.

    In finetune mode a model would be trained, or its encoders stored, for that alone.
    """
    return bench.cfg.mode == "probe" and bool(conditions(bench))
