"""Scores by group of samples: of each group, and against all other samples."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fusionzoo.datasets import PairedDataset
from fusionzoo.datasets.tables.table import table_columns
from fusionzoo.errors import FusionZooError, did_you_mean

from .measure import Answers
from .metrics import COMPARED_BY, Metric
from .statistics import LEVEL, Interval, by_group, crossed, share_interval, weighted

Array = NDArray[np.float64]
MAX_GROUPS = 20
FEW = 10  # samples: a smaller group is shown, and never the worst
MISSING = "(missing)"
SUBGROUPS = "subgroups"  # key of the figures by group in a model's metrics


class HasScores(Protocol):
    """What scores each sample (`training.tasks.Task`)."""

    @property
    def metric(self) -> Metric:
        """The figure: the mean of the scores, up to its sign."""

    def scores(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return each row's score, the higher the better: (N, K), (N, C) -> (N,)."""


class Subgroup(NamedTuple):
    """The mean score of a group, and by how much it is above that of all other samples."""

    name: str
    samples: int
    score: Interval
    difference: Interval  # simultaneous over the groups


class Subgroups(NamedTuple):
    """The groups in the order of their names, and the one with the lowest score."""

    groups: list[Subgroup]
    worst: Subgroup | None  # None: fewer than two groups have `FEW` samples


def compare_subgroups(
    scores: Array,
    names: Sequence[str | None],
    clusters: Sequence[str],
    column: str,
    weights: Array | None = None,
) -> Subgroups:
    """Compare the samples of each group with all others: `scores` (N,), higher is better.

    `names` (N,) are the cells of `column`; samples of one of the `clusters` (N,) belong together.
    A group's interval is Wilson's where each sample is right or wrong and none belong together,
    else Student's over clusters. That of a difference joins both sides' intervals (Newcombe 1998;
    Zou and Donner 2008, doi:10.1002/sim.3095), each at Bonferroni's level, so that it also holds
    for the worst of the groups. Clusters with samples in several groups are counted in each.
    Samples count by their `weights` (N,), above 0; then every interval is Student's.

    Raises:
        FusionZooError: one group, or more than `MAX_GROUPS`
    """
    words = np.array([MISSING if name is None else name for name in names])
    counts = Counter(words.tolist())
    if not 2 <= len(counts) <= MAX_GROUPS:
        raise FusionZooError(
            f"--subgroups {column}: {len(counts):,} groups among {len(words):,} samples, expected 2"
            f" to {MAX_GROUPS}; of numbers or dates, make a column of ranges"
        )
    clustered = np.array(clusters)
    level = 1 - (1 - LEVEL) / len(counts)
    groups = []
    for name in sorted(counts):
        inside = words == name
        sides = [
            (scores[rows], clustered[rows], None if weights is None else weights[rows])
            for rows in (inside, ~inside)
        ]
        difference = _difference(*(_mean(*side, level) for side in sides))
        groups.append(Subgroup(name, counts[name], _mean(*sides[0], LEVEL), difference))
    large = [group for group in groups if group.samples >= FEW]
    worst = min(large, key=lambda x: x.score.mean) if len(large) > 1 else None
    return Subgroups(groups, worst)


def subgroup_metrics(
    task: HasScores, answers: Answers, dataset: PairedDataset, columns: Sequence[str]
) -> dict[str, Any]:
    """Return the fusion's figure by group of samples, for each of these columns of the data.

    Under a column: `metric`, its name; `groups`, by name with `samples`, the figure, `low`, `high`,
    and `difference` from all other samples, above 0 where the group does better; `worst`.
    """
    metric, row_of = task.metric, {key: row for row, key in enumerate(dataset.ids)}
    target = answers.target.reshape(len(answers.target), -1)
    known, weights = ~target.double().isnan().any(1), None
    if answers.weights is not None:
        known &= answers.weights > 0
        weights = answers.weights[known].double().numpy()
    scores = task.scores(answers.fused.float()[known], target[known]).numpy()
    rows = [row_of[key] for key, one in zip(answers.ids, known.tolist(), strict=True) if one]
    found: dict[str, Any] = {}
    for column in columns:
        if column not in table_columns(dataset):
            others = [name for name in table_columns(dataset) if name not in ("id", "split")]
            raise FusionZooError(
                f"--subgroups: {dataset.source} has no column {column!r}."
                f"{did_you_mean(column, others)} It has: {', '.join(others)}"
            )
        names, clusters = (
            [cells[row] for row in rows] for cells in (dataset.column(column), dataset.groups)
        )
        groups, worst = compare_subgroups(scores, names, clusters, column, weights)
        found[column] = {
            "metric": metric.name,
            "groups": {group.name: _figures(group, metric) for group in groups},
            "worst": None if worst is None else worst.name,
        }
    return found


def _figures(group: Subgroup, metric: Metric) -> dict[str, Any]:
    low, high = sorted((metric.shown(group.score.low), metric.shown(group.score.high)))
    return {
        "samples": group.samples,
        metric.name: metric.shown(group.score.mean),
        "low": low,
        "high": high,
        "difference": dict(group.difference._asdict()),
    }


def subgroup_rows(figures: Mapping[str, Any]) -> tuple[list[str], list[list[str]], str]:
    """Return header and rows of a column's table, and what it says of the worst group."""
    metric = next(x for x in COMPARED_BY.values() if x.name == figures["metric"])
    rows = [
        [
            name,
            f"{group['samples']:,}",
            f"{group[metric.name]:.3f} [{group['low']:.3f}, {group['high']:.3f}]",
            "{mean} [{low}, {high}]".format(
                **{x: metric.difference(y) for x, y in group["difference"].items()}
            ),
        ]
        for name, group in figures["groups"].items()
    ]
    unit = ", points" if metric.share else ""
    header = ["group", "samples", metric.title, f"against all others{unit}"]
    worst = figures["worst"]
    if worst is None:
        return header, rows, f"fewer than two groups have {FEW} samples"
    gap = figures["groups"][worst]["difference"]
    proven = "below" if gap["high"] < 0 else "not told apart from"
    return header, rows, f"worst is {worst!r}, {proven} all others"


def _mean(
    scores: Array, clusters: NDArray[np.str_], weights: Array | None, level: float
) -> Interval:
    by_cluster = by_group(weighted(scores[None], weights), clusters.tolist())
    if weights is None and by_cluster.shape[1] == len(scores) and np.isin(scores, (0, 1)).all():
        mean = float(scores.mean())
        return Interval(mean, *share_interval(mean, len(scores), level))
    interval, _ = crossed(by_cluster, level=level)
    if by_cluster.shape[1] < 2:  # of one cluster nothing is known
        return interval._replace(low=-math.inf, high=math.inf)
    return interval


def _difference(a: Interval, b: Interval) -> Interval:
    """Return a - b of two independent means, from the interval of each.

    Newcombe's (1998) example of 56 of 70 against 48 of 80:

    >>> a, b = (Interval(x / n, *share_interval(x / n, n)) for x, n in ((56, 70), (48, 80)))
    >>> [round(x, 4) for x in _difference(a, b)]
    [0.2, 0.0524, 0.3339]
    """
    gain = a.mean - b.mean
    low = gain - math.hypot(a.mean - a.low, b.high - b.mean)
    return Interval(gain, low, gain + math.hypot(a.high - a.mean, b.mean - b.low))
