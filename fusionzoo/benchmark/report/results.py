"""The results of each strategy, seed by seed, and which strategy is best.

Shapes: `S` seeds, `N` test samples (of all folds), `K` classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fusionzoo.evaluation import statistics
from fusionzoo.evaluation.modalities import subset_label, subsets

from ..bench import Bench, Condition, damaged_rows
from ..trials.store import Row

MAJORITY, PRIOR = "majority class", "frequencies of the labels"  # baselines without any input


@dataclass
class StrategyResults:
    """All results of one strategy, seed by seed."""

    name: str
    kind: (
        str  # fusion | single | baseline | incomplete (trained with modalities removed or damaged)
    )
    family: str
    seeds: list[int]
    logits: Tensor  # (S, N, K)
    scores: NDArray[np.float64]  # (S, N), higher is better; their mean is the figure
    val_score: float
    val_loss: float
    rows: list[Row] = field(default_factory=list)
    facts: dict[str, float] = field(default_factory=dict)  # means over seeds and folds
    subset_scores: NDArray[np.float64] | None = None  # (S, U, N) of every subset, the full first
    untuned: float = math.nan  # the score with default settings, first seed
    lost_scores: NDArray[np.float64] | None = None  # (S, C, n) of damaged samples, by lost part
    lost_conditions: list[Condition] = field(default_factory=list)  # C: the first is undamaged

    def mean(self, metric: str = "score", **where: Any) -> float:
        """Average a metric over seeds and folds, by default the score on the whole test split.

        `where` selects other rows: `subset="a"`, `modality="a", corruption="jitter", severity=1`.
        """
        wanted = {"subset": "full", "corruption": "", **where}
        values = [
            row[metric]
            for row in self.rows
            if all(row[key] == value for key, value in wanted.items())
        ]
        return float(np.mean(values)) if values else math.nan

    def score_by_subset(self, modalities: Sequence[str]) -> dict[frozenset[str], float]:
        """Return the score on every subset of the modalities."""
        return {
            subset: self.mean(subset=row_label(subset, modalities))
            for subset in subsets(modalities)
        }


@dataclass
class Summary:
    """Everything that the report shows."""

    bench: Bench
    target: Tensor  # (N,) or (N, C), of the test splits of all folds
    strategies: list[StrategyResults]
    controls: dict[str, Tensor]  # strategy -> logits (N, K) after training on shuffled labels
    failed: dict[str, str]  # strategy -> error
    leaderboard: list[dict[str, Any]] = field(default_factory=list)

    @property
    def rows(self) -> Tensor:
        """The test samples' rows in the data set, (N,)."""
        return torch.cat([fold.test for fold in self.bench.folds])

    @cached_property
    def groups(self) -> list[str] | None:
        """The test samples' groups."""
        groups = self.bench.groups
        return [groups[row] for row in self.rows.tolist()] if groups else None

    @property
    def folds(self) -> int:
        """The number of folds whose training splits overlap; 1 with the data set's own split."""
        return len(self.bench.folds)

    def compare(self, a: StrategyResults, b: StrategyResults) -> statistics.Comparison:
        """Compare two strategies on the same seeds, samples and folds."""
        return statistics.compare(a.scores, b.scores, groups=self.groups, folds=self.folds)

    @cached_property
    def damaged_groups(self) -> list[str] | None:
        """The groups of the samples that are tested damaged."""
        groups, bench = self.bench.groups, self.bench
        rows = torch.cat([damaged_rows(bench, fold) for fold in bench.folds])
        return [groups[row] for row in rows.tolist()] if groups else None

    def interval(
        self, scores: NDArray[np.float64], *, damaged: bool = False
    ) -> statistics.Interval:
        """Return the mean of scores (S, N) with its interval over seeds and samples.

        `damaged`: the scores are those of the samples that are tested damaged.
        """
        groups = self.damaged_groups if damaged else self.groups
        return statistics.crossed(statistics.by_group(scores, groups), self.folds)[0]

    def strategy(self, name: str) -> StrategyResults:
        """Return the results of one strategy."""
        return next(strategy for strategy in self.strategies if strategy.name == name)

    def line(self, name: str) -> dict[str, Any]:
        """Return one strategy's line of the leaderboard."""
        return next(line for line in self.leaderboard if line["strategy"] == name)

    def of_kind(self, kind: str) -> list[StrategyResults]:
        """Return the strategies of a kind, the best on the test split first."""
        strategies = [strategy for strategy in self.strategies if strategy.kind == kind]
        return sorted(strategies, key=lambda strategy: (-strategy.scores.mean(), strategy.name))


def row_label(subset: frozenset[str], modalities: Sequence[str]) -> str:
    """Name a subset as rows do: `full`, `none`, `audio+text`."""
    return "full" if len(subset) == len(modalities) else subset_label(subset)


def best_single(summary: Summary) -> StrategyResults | None:
    """Return the single modality that does best on the test split itself.

    Choosing it there can only favour it over the fusions, so a fusion that beats it beats every
    single modality.
    """
    return next(iter(summary.of_kind("single")), None)


def chosen_fusion(summary: Summary) -> StrategyResults | None:
    """Return the fusion that does best on the validation split, chosen without the test split."""
    fusions = summary.of_kind("fusion")
    return best_on_validation(fusions) if fusions else None


def best_on_validation(strategies: Sequence[StrategyResults]) -> StrategyResults:
    """Return the strategy with the highest validation score, then the lowest loss."""
    return max(strategies, key=lambda strategy: (strategy.val_score, -strategy.val_loss))
