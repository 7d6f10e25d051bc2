"""Evaluate a trained model: the whole test split, every subset of modalities, damaged samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from fusionzoo.datasets import PairedDataset
from fusionzoo.errors import FusionZooError
from fusionzoo.evaluation.calibration import calibration
from fusionzoo.evaluation.cost import head_cost
from fusionzoo.evaluation.metrics import classification
from fusionzoo.evaluation.modalities import subset_label, subsets
from fusionzoo.evaluation.robustness import Corrupted
from fusionzoo.fusion import Fusion
from fusionzoo.model import FusionModel
from fusionzoo.structures import Features

from ..bench import Bench, Condition, Unit, conditions
from ..features.cache import load_features
from ..features.encode import Stored, encode
from ..features.feeds import BatchFeed, ProbeFeed, device, workers
from ..fit import Fitted
from ..strategies import names_of, reads_tokens
from .store import Cell, Row

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
                stored = load_features(described)
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
