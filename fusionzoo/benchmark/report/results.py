"""The results of each candidate, seed by seed: means, curves, units and names."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fusionzoo.evaluation import statistics
from fusionzoo.evaluation.calibration import reliability
from fusionzoo.evaluation.shapley import expected, subset_label, subsets
from fusionzoo.targets import OneOf, Target

from ..bench import Bench, tasks_of
from ..store import Row

MAJORITY, PRIOR = "majority class", "frequencies of the labels"  # baselines without any input
MEAN_PRESENT = "mean of singles that are present"
PRODUCT_PRESENT = "product of singles that are present"
BEST_PRESENT = "best single that is present"
CHOSEN, ENSEMBLE = "fusion by validation", "ensemble of seeds"
RATES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # of missing modalities
PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


class Cell(NamedTuple):
    """A cell: its text, the number that it is sorted by if the text does not start with it."""

    text: str
    sort: str = ""
    style: str = ""  # CSS class


class Validation(NamedTuple):
    """A candidate's figures on the validation samples of a fold, means over seeds."""

    score: float
    loss: float
    score_present: float = math.nan  # on those that have one of the candidate's modalities


@dataclass
class CandidateResults:
    """All results of one candidate, seed by seed."""

    name: str
    kind: str  # fusion, single, baseline, or chosen: made of the fusions that validation data chose
    family: str
    seeds: list[int]
    logits: Tensor  # (S, N, K)
    scores: NDArray[np.float64]  # (S, N), higher is better; their mean is the figure
    validation: list[Validation]  # by fold; empty for baselines without any
    rows: list[Row] = field(default_factory=list)
    facts: dict[str, float] = field(default_factory=dict)  # means over seeds and folds
    subset_scores: NDArray[np.float64] | None = None  # (S, U, N) of every subset, the full first
    untuned: float = math.nan  # the score with default settings, of the same seeds
    tuned_settings: str = ""  # what tuning chose, in words; empty: not tuned

    @property
    def val_score(self) -> float:
        """The mean validation score over folds."""
        return float(np.mean([x.score for x in self.validation])) if self.validation else math.nan

    def of_seeds(self, seeds: Sequence[int]) -> CandidateResults:
        """Return the results of some of the seeds; means over seeds stay those of all."""
        if list(seeds) == self.seeds:
            return self
        places = [self.seeds.index(seed) for seed in seeds]
        return replace(
            self,
            seeds=list(seeds),
            logits=self.logits[places],
            scores=self.scores[places],
            rows=[row for row in self.rows if row["seed"] in seeds],
            subset_scores=None if self.subset_scores is None else self.subset_scores[places],
        )

    def mean(self, **where: Any) -> float:
        """Average the score over seeds and samples, by default on the whole test split.

        A fold counts by its samples, or their weights. `where` selects other rows: `subset="a"`,
        `modality="a", corruption="jitter", severity=1`.
        """
        wanted = {"subset": "full", "corruption": "", **where}
        rows = [row for row in self.rows if all(row[key] == x for key, x in wanted.items())]
        if not rows:
            return math.nan
        sizes = [row["weight" if "weight" in row else "samples"] for row in rows]
        return float(np.average([row["score"] for row in rows], weights=sizes))

    def score_by_subset(self, modalities: Sequence[str]) -> dict[frozenset[str], float]:
        """Return the score on every subset of the modalities."""
        return {
            subset: self.mean(subset=row_label(subset, modalities))
            for subset in subsets(modalities)
        }


def of_shared_seeds(candidates: Sequence[CandidateResults]) -> list[CandidateResults]:
    """Return the candidates with the seeds that all of them were trained with."""
    shared = [x for x in candidates[0].seeds if all(x in other.seeds for other in candidates)]
    return [candidate.of_seeds(shared) for candidate in candidates]


@dataclass
class Summary:
    """Everything that the report shows."""

    bench: Bench
    target: Tensor  # (N,) or (N, C), of the test splits of all folds
    candidates: list[CandidateResults]
    controls: dict[str, Tensor]  # candidate -> logits (N, K) after training on shuffled labels
    failed: dict[str, str]  # candidate -> error
    leaderboard: list[dict[str, Any]] = field(default_factory=list)

    @property
    def targets(self) -> Sequence[Target]:
        """The targets, one class included."""
        return self.bench.scheme or (OneOf("target", self.bench.classes),)

    @property
    def rows(self) -> Tensor:
        """The test samples' rows in the data set, (N,)."""
        return torch.cat([fold.test for fold in self.bench.folds])

    @cached_property
    def fold_slices(self) -> list[slice]:
        """Where each fold's test samples stand among those of all folds."""
        ends = np.cumsum([0, *(len(fold.test) for fold in self.bench.folds)]).tolist()
        return [slice(*pair) for pair in pairwise(ends)]

    @cached_property
    def groups(self) -> list[str]:
        """The test samples' groups: all tests of a sample, or of a group, are one."""
        groups = self.bench.groups
        return [groups[row] if groups else str(row) for row in self.rows.tolist()]

    @cached_property
    def weights(self) -> NDArray[np.float64] | None:
        """How much the test samples count, (N,); None: all alike."""
        weights = self.bench.weights_of(self.rows)
        return None if weights is None else weights.double().numpy()

    def mean(
        self, scores: NDArray[np.float64], rows: NDArray[np.bool_] | slice | None = None
    ) -> float:
        """Return the mean of scores (S, n) of the test samples, or some of them, each counting by
        its weight; NaN of samples without any."""
        weights = self.weights
        if weights is None:
            return float(scores.mean())
        chosen = weights if rows is None else weights[rows]
        if not chosen.sum() > 0:
            return math.nan
        return float(np.average(scores.mean(0), weights=chosen))

    def scores_of(
        self, candidate: CandidateResults, rows: NDArray[np.bool_]
    ) -> NDArray[np.float64]:
        """Return the scores of some test samples, (S, n): those by which the figure is theirs; all
        NaN where it is not defined on them."""
        if self.bench.metric.of_rows or rows.all():
            return candidate.scores[:, rows]
        chosen, tasks = torch.from_numpy(rows), tasks_of(self.bench, self.bench.folds[0].train)
        target, weights = self.target[chosen], self.bench.weights_of(self.rows[chosen])
        parts = [tasks.scores(x[chosen], target, weights) for x in candidate.logits]
        return torch.stack(parts).numpy()

    @cached_property
    def first_tests(self) -> NDArray[np.bool_]:
        """Which tests are the first of their sample, (N,): all, unless splits share samples."""
        mask = np.zeros(len(self.rows), np.bool_)
        mask[np.unique(self.rows.numpy(), return_index=True)[1]] = True
        return mask

    @property
    def folds(self) -> int:
        """The number of folds or splits; 1 with the data set's own split."""
        return len(self.bench.folds)

    @cached_property
    def present(self) -> NDArray[np.bool_]:
        """Which modalities each test sample has, (N, M)."""
        return np.asarray(self.bench.present[self.rows].numpy(), np.bool_)

    def compare(
        self, a: CandidateResults, b: CandidateResults, rows: NDArray[np.bool_] | None = None
    ) -> statistics.Comparison:
        """Compare two candidates on the seeds, samples and folds of both; on some samples, (N,).

        McNemar's test, which has no groups, counts a sample's first test alone.
        """
        a, b = of_shared_seeds([a, b])
        rows = np.ones(a.scores.shape[1], np.bool_) if rows is None else rows
        groups = list(compress(self.groups, rows))
        first, second = (self.scores_of(x, rows) for x in (a, b))
        share = self.bench.test_share
        weights = None if self.weights is None else self.weights[rows]
        found = statistics.compare(first, second, groups=groups, test_share=share, weights=weights)
        if weights is not None:
            return found
        once = self.first_tests[rows]
        return found._replace(mcnemar_p=statistics.mcnemar(first[:, once], second[:, once]))

    def interval(self, scores: NDArray[np.float64]) -> statistics.Interval:
        """Return the mean of scores (S, N) with its interval over seeds and samples."""
        share = self.bench.test_share
        return statistics.crossed(scores, share, groups=self.groups, weights=self.weights)[0]

    def candidate(self, name: str) -> CandidateResults:
        """Return the results of one candidate."""
        return next(candidate for candidate in self.candidates if candidate.name == name)

    def line(self, name: str) -> dict[str, Any]:
        """Return one candidate's line of the leaderboard."""
        return next(line for line in self.leaderboard if line["candidate"] == name)

    def of_kind(self, kind: str) -> list[CandidateResults]:
        """Return the candidates of a kind, the best on the test split first."""
        candidates = [candidate for candidate in self.candidates if candidate.kind == kind]
        return sorted(candidates, key=lambda x: (-self.mean(x.scores), x.name))


def row_label(subset: frozenset[str], modalities: Sequence[str]) -> str:
    """Name a subset as rows do: `full`, `none`, `audio+text`."""
    return "full" if len(subset) == len(modalities) else subset_label(subset)


def best_single(summary: Summary) -> CandidateResults | None:
    """Return the single modality that does best on the test split itself.

    Choosing it there can only favour it over the fusions, so a fusion that beats it beats every
    single modality.
    """
    return next(iter(summary.of_kind("single")), None)


@dataclass(frozen=True)
class Choice:
    """The candidate that validation data chooses, in each fold anew.

    A sample may validate one fold and be tested in another. Chosen over the validation samples of
    all folds, a candidate is therefore chosen on its test samples, too; chosen fold by fold it is
    not, and the mean over folds is the score of the whole procedure, choice included.
    """

    results: CandidateResults  # on each fold's test samples those of the candidate chosen there
    by_fold: list[str]
    name: str  # chosen in most folds; among equals the best on validation data over all folds

    @property
    def counts(self) -> dict[str, int]:
        """The number of folds that chose each candidate, the most frequent first."""
        return dict(Counter(self.by_fold).most_common())


def choose(
    summary: Summary, candidates: Sequence[CandidateResults], name: str, kind: str = "baseline"
) -> Choice:
    """Choose a candidate in each fold by its validation score; the results are named `name`."""
    chosen = [best_on_validation(candidates, fold) for fold in range(summary.folds)]
    chosen = of_shared_seeds(chosen)
    by_fold = [candidate.name for candidate in chosen]
    parts = list(zip(chosen, summary.fold_slices, strict=True))
    of_fold = list(enumerate(chosen))
    costs = set.intersection(*(set(candidate.facts) for candidate in chosen))
    results = CandidateResults(
        name,
        kind,
        "baseline",
        chosen[0].seeds,
        torch.cat([candidate.logits[:, part] for candidate, part in parts], 1),
        np.concatenate([candidate.scores[:, part] for candidate, part in parts], 1),
        [candidate.validation[fold] for fold, candidate in of_fold],
        [row for fold, x in of_fold for row in x.rows if row["fold"] == fold and is_plain(row)],
        {key: float(np.mean([x.facts[key] for x in chosen])) for key in sorted(costs)},
    )

    def often(candidate: CandidateResults) -> tuple[float, ...]:
        loss = float(np.mean([x.loss for x in candidate.validation]))
        return by_fold.count(candidate.name), candidate.val_score, -loss

    return Choice(results, by_fold, max(chosen, key=often).name)


def is_plain(row: Row) -> bool:
    """Whether a row of results is about undamaged samples with all modalities."""
    return row["subset"] == "full" and not row["corruption"]


def chosen_fusion(summary: Summary) -> Choice | None:
    """Return the fusion that does best on each fold's validation data."""
    fusions = summary.of_kind("fusion")
    return choose(summary, fusions, CHOSEN, "chosen") if fusions else None


def best_on_validation(candidates: Sequence[CandidateResults], fold: int) -> CandidateResults:
    """Return the candidate with a fold's highest validation score, then the lowest loss."""

    def goodness(candidate: CandidateResults) -> tuple[float, float]:
        score, loss = candidate.validation[fold][:2]
        return score, -loss

    return max(candidates, key=goodness)


def missing_curve(
    candidate: CandidateResults, modalities: Sequence[str], only: str | None = None
) -> list[float]:
    """Return the expected score at each of RATES: all modalities missing at random, or one."""
    scores = candidate.score_by_subset(modalities)
    return [
        expected(scores, {name: rate if only in (None, name) else 0.0 for name in modalities})
        for rate in RATES
    ]


def missing_area(
    candidate: CandidateResults, modalities: Sequence[str]
) -> NDArray[np.float64] | None:
    """Return each sample's area under its missing-rate curve, (S, N): linear in its subset scores.

    None where not every subset was tested.
    """
    order = subsets(modalities)[::-1]
    if candidate.subset_scores is None or candidate.subset_scores.shape[1] != len(order):
        return None
    weights = []
    for subset in order:
        only = {other: float(other == subset) for other in order}
        curve = [expected(only, dict.fromkeys(modalities, rate)) for rate in RATES]
        weights.append(area(curve, RATES))
    return np.einsum("u,sun->sn", np.array(weights), candidate.subset_scores)


def severities(candidate: CandidateResults) -> list[int]:
    """Return the severities that were tested, 0 first."""
    return sorted({row["severity"] for row in candidate.rows})


def corruption_curves(candidate: CandidateResults, modality: str) -> dict[str, list[float]]:
    """Return the score at each severity, from 0, for each corruption of a modality."""
    corruptions = dict.fromkeys(
        row["corruption"]
        for row in candidate.rows
        if row["modality"] == modality and row["severity"]
    )
    undamaged = candidate.mean(corruption="undamaged")  # on the samples that are damaged elsewhere
    at = severities(candidate)[1:]
    return {
        name: [
            undamaged,
            *(candidate.mean(modality=modality, corruption=name, severity=x) for x in at),
        ]
        for name in corruptions
    }


def area(curve: Sequence[float], at: Sequence[float]) -> float:
    """Average a curve over its range (trapezoids)."""
    return float(np.trapezoid(curve, at) / (at[-1] - at[0]))


def reliability_of(candidate: CandidateResults, target: Tensor) -> list[tuple[float, float, int]]:
    """Return (confidence, accuracy, count) of each bin, with the seeds pooled."""
    probabilities = candidate.logits.double().softmax(-1).flatten(0, 1)
    bins = reliability(probabilities, target.repeat(len(candidate.logits)))
    return list(zip(*(x.tolist() for x in bins), strict=True))


def pareto(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """Return the Pareto front of (cost, quality): low cost and high quality are better.

    >>> pareto({"a": (1, 0.5), "b": (2, 0.9), "c": (3, 0.8)})
    ['a', 'b']
    """
    front, best = [], -math.inf
    for name, (_, quality) in sorted(points.items(), key=lambda p: (p[1][0], -p[1][1])):
        if quality > best:
            front.append(name)
            best = quality
    return front


def readable(number: float) -> str:
    """Write a large count with three digits and a prefix.

    >>> readable(950), readable(128396), readable(4.0e6), readable(999_999)
    ('950', '128 k', '4 M', '1 M')
    """
    for size, prefix in PREFIXES:
        if number >= 0.9995 * size:
            return f"{float(f'{number / size:.3g}'):g} {prefix}"
    return f"{number:.0f}"


def decimal(number: float) -> str:
    """Write a score or an error: three decimals, fewer for large numbers.

    >>> decimal(0.87512), decimal(47.318), decimal(12345.6)
    ('0.875', '47.32', '12,346')
    """
    size = abs(number)
    return f"{number:,.{3 if size < 10 else 2 if size < 100 else 1 if size < 1000 else 0}f}"
