"""The results of each candidate, seed by seed: means, curves, units and names."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fusionzoo.evaluation import statistics
from fusionzoo.evaluation.calibration import reliability
from fusionzoo.evaluation.robustness import expected, subset_label, subsets

from ..bench import Bench, Condition, damaged_rows
from ..jobs import Row

MAJORITY, PRIOR = "majority class", "frequencies of the labels"  # baselines without any input


@dataclass
class CandidateResults:
    """All results of one candidate, seed by seed."""

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
    candidates: list[CandidateResults]
    controls: dict[str, Tensor]  # candidate -> logits (N, K) after training on shuffled labels
    failed: dict[str, str]  # candidate -> error
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

    def compare(self, a: CandidateResults, b: CandidateResults) -> statistics.Comparison:
        """Compare two candidates on the same seeds, samples and folds."""
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

    def candidate(self, name: str) -> CandidateResults:
        """Return the results of one candidate."""
        return next(candidate for candidate in self.candidates if candidate.name == name)

    def line(self, name: str) -> dict[str, Any]:
        """Return one candidate's line of the leaderboard."""
        return next(line for line in self.leaderboard if line["strategy"] == name)

    def of_kind(self, kind: str) -> list[CandidateResults]:
        """Return the candidates of a kind, the best on the test split first."""
        candidates = [candidate for candidate in self.candidates if candidate.kind == kind]
        return sorted(candidates, key=lambda candidate: (-candidate.scores.mean(), candidate.name))


def row_label(subset: frozenset[str], modalities: Sequence[str]) -> str:
    """Name a subset as rows do: `full`, `none`, `audio+text`."""
    return "full" if len(subset) == len(modalities) else subset_label(subset)


def best_single(summary: Summary) -> CandidateResults | None:
    """Return the single modality that does best on the test split itself.

    Choosing it there can only favour it over the fusions, so a fusion that beats it beats every
    single modality.
    """
    return next(iter(summary.of_kind("single")), None)


def chosen_fusion(summary: Summary) -> CandidateResults | None:
    """Return the fusion that does best on the validation split, chosen without the test split."""
    fusions = summary.of_kind("fusion")
    return best_on_validation(fusions) if fusions else None


def best_on_validation(candidates: Sequence[CandidateResults]) -> CandidateResults:
    """Return the candidate with the highest validation score, then the lowest loss."""
    return max(candidates, key=lambda candidate: (candidate.val_score, -candidate.val_loss))


RATES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # of missing modalities


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


def lost_area(candidate: CandidateResults, modalities: Sequence[str]) -> NDArray[np.float64] | None:
    """Return each damaged sample's area under its curve over the severity of a lost part, (S, n).

    Averaged over all modalities; one that the candidate does not see changes nothing. Linear in the
    sample's scores. None where lost parts were not tested.
    """
    if candidate.lost_scores is None:
        return None
    weights = np.zeros(len(candidate.lost_conditions))
    for modality in modalities:
        numbers = [0]  # undamaged
        numbers += [n for n, x in enumerate(candidate.lost_conditions) if x[0] == modality]
        if len(numbers) == 1:
            weights[0] += 1
            continue
        at = [candidate.lost_conditions[number][2] for number in numbers]
        for number, curve in zip(numbers, np.eye(len(at)), strict=True):
            weights[number] += area(curve.tolist(), at)
    return np.einsum("c,scn->sn", weights / len(modalities), candidate.lost_scores)


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
    return {
        corruption: [
            undamaged,
            *(
                candidate.mean(modality=modality, corruption=corruption, severity=severity)
                for severity in severities(candidate)[1:]
            ),
        ]
        for corruption in corruptions
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


PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))

ACRONYMS = {
    "mae": "MAE",
    "mse": "MSE",
    "rmse": "RMSE",
    "map": "mAP",
    "sample_f1": "sample F1",
    "auroc": "AUROC",
    "r2": "R²",
}


def metric_name(metric: str) -> str:
    """Write a metric's name.

    >>> metric_name("balanced_accuracy"), metric_name("macro_f1"), metric_name("mae")
    ('balanced accuracy', 'macro F1', 'MAE')
    """
    return ACRONYMS.get(metric, metric.replace("_", " ").replace(" f1", " F1"))


def thousands(number: float) -> str:
    """Write a count with thousands separators.

    >>> thousands(12345)
    '12,345'
    """
    return f"{number:,.0f}"


def readable(number: float) -> str:
    """Write a large count with three digits and a prefix.

    >>> readable(950), readable(128396), readable(4.0e6), readable(999_999)
    ('950', '128 k', '4 M', '1 M')
    """
    for size, prefix in PREFIXES:
        if number >= 0.9995 * size:
            return f"{float(f'{number / size:.3g}'):g} {prefix}"
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """Write a time in its two largest units.

    >>> duration(2.44), duration(48.2), duration(192), duration(3840)
    ('2.4 s', '48 s', '3 min 12 s', '1 h 04 min')
    """
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    rest = round(seconds)
    if rest < 60:
        return f"{rest} s"
    if rest < 3600:
        return f"{rest // 60} min {rest % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def decimal(number: float) -> str:
    """Write a score or an error: three decimals, fewer for large numbers.

    >>> decimal(0.87512), decimal(47.318), decimal(12345.6)
    ('0.875', '47.32', '12,346')
    """
    size = abs(number)
    return f"{number:,.{3 if size < 10 else 2 if size < 100 else 1 if size < 1000 else 0}f}"


FORMATS = ("manifest", "folders")  # data sets that are named by their path
# File names that say nothing; the folder's name does.
GENERIC = re.compile(r"(data|dataset|manifest|index|metadata|samples|table|all|train)$", re.I)
STORED = re.compile(r"data-[0-9a-f]{12}\.parquet$")  # a table in memory, written to the cache
IN_MEMORY = "a table in memory"


def data_title(settings: Mapping[str, Any]) -> str:
    """Name a data set by its settings: a manifest or folder by its path, others by their name.

    >>> data_title({"name": "manifest", "root": "/data/products/manifest.csv"})
    'products'
    >>> data_title({"name": "interactions", "task": "xor", "samples": 600})
    'interactions (xor)'
    """
    name, root = str(settings["name"]), settings.get("root")
    if name in FORMATS and isinstance(root, str) and root:
        return _path_title(root)
    if "/" in name:  # the source of a data set that was passed as an object
        return _path_title(name)
    return f"{name} ({settings['task']})" if "task" in settings else name


def _path_title(path: str) -> str:
    if STORED.search(path):
        return IN_MEMORY
    place = PurePath(path)
    if GENERIC.match(place.stem) and place.parent.name:
        return place.parent.name
    return place.stem if place.suffix else place.name
