"""What is known of each strategy, seed by seed, and which of them is the best.

Shapes: `S` seeds, `N` test samples (of all folds), `K` classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fusionzoo.evaluation.modalities import subset_label, subsets

from ..bench import Bench
from ..trials.store import Row

MAJORITY = "majority class"  # a baseline


@dataclass
class Strategy:
    """All that is known of one strategy, seed by seed."""

    name: str
    kind: str  # fusion | single | baseline
    family: str
    seeds: list[int]
    logits: Tensor  # (S, N, K)
    val_accuracy: float
    val_loss: float
    rows: list[Row] = field(default_factory=list)
    facts: dict[str, float] = field(default_factory=dict)  # means over seeds and folds
    right: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0)))  # (S, N)

    def figure(self, name: str, **where: Any) -> float:
        """Average a metric over seeds and folds, where the row says so: the whole, by default."""
        wanted = {"subset": "full", "corruption": "", **where}
        found = [r[name] for r in self.rows if all(r[k] == v for k, v in wanted.items())]
        return float(np.mean(found)) if found else math.nan

    def by_subset(self, modalities: Sequence[str]) -> dict[frozenset[str], float]:
        """Return the accuracy for every subset of the modalities."""
        return {
            some: self.figure("accuracy", subset=label(some, modalities))
            for some in subsets(modalities)
        }


@dataclass
class Summary:
    """Everything that the report shows."""

    bench: Bench
    target: Tensor  # (N,)
    strategies: list[Strategy]
    controls: dict[str, Tensor]  # strategy -> answers (N,) after training on shuffled labels
    failed: dict[str, str]
    leaderboard: list[dict[str, Any]] = field(default_factory=list)

    def of(self, name: str) -> Strategy:
        """Return one strategy."""
        return next(one for one in self.strategies if one.name == name)

    def line(self, name: str) -> dict[str, Any]:
        """Return one strategy's line of the leaderboard."""
        return next(line for line in self.leaderboard if line["strategy"] == name)

    def kind(self, kind: str) -> list[Strategy]:
        """Return the strategies of a kind, the best first."""
        found = [one for one in self.strategies if one.kind == kind]
        return sorted(found, key=lambda one: (-one.figure("accuracy"), one.name))


def label(some: frozenset[str], modalities: Sequence[str]) -> str:
    """Name a subset as the rows do: `full`, `none`, `audio+text`."""
    return "full" if len(some) == len(modalities) else subset_label(some)


def best_single(summary: Summary) -> Strategy | None:
    """Return the single modality that does best on the test split itself.

    Fusion has to beat every modality alone, so the strongest is the one to beat; that it is chosen
    where it is judged can only flatter it, not fusion.
    """
    return next(iter(summary.kind("single")), None)


def chosen_fusion(summary: Summary) -> Strategy | None:
    """Return the fusion that does best on the validation split: chosen without the test split."""
    fusions = summary.kind("fusion")
    return best_on_validation(fusions) if fusions else None


def best_on_validation(strategies: Sequence[Strategy]) -> Strategy:
    """Return who answers most validation samples, then who has the least loss there."""
    return max(strategies, key=lambda one: (one.val_accuracy, -one.val_loss))
