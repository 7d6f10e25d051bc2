"""Scores by group of samples: of each group, and against all other samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from torch import Tensor

from fusionzoo.datasets import PairedDataset
from fusionzoo.datasets.tables.table import table_columns
from fusionzoo.errors import FusionZooError, check_known

from .measure import Answers
from .metrics import COMPARED_BY, Metric
from .statistics import LEVEL, Groups, Interval, auroc_interval, mean_interval

Array = NDArray[np.float64]
Words = NDArray[np.str_]
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
    scores: Array, names: Words, clusters: Groups, *, weights: Array | None = None
) -> Subgroups:
    """Compare the samples of each group with all others: `scores` (S, N), higher is better.

    `names` (N,) are the groups; samples of one of the `clusters` (N,) belong together. A group's
    interval is Wilson's where one seed has each sample right or wrong and none belong together, and
    of clusters where all are right or all wrong, else Student's over seeds and clusters. That of a
    difference joins both sides' intervals (Newcombe 1998; Zou and Donner 2008,
    doi:10.1002/sim.3095), each at Bonferroni's level, so that it also holds for the worst of the
    groups. Clusters with samples in several groups are counted in each. Scores count by their
    `weights` (N,), above 0; then every interval is Student's.
    """
    clustered = np.array(clusters)
    every = sorted(set(names.tolist()))
    groups = []
    for name in every:
        inside = names == name
        sides = [_part(scores, clustered, weights, rows) for rows in (inside, ~inside)]
        level = 1 - (1 - LEVEL) / len(every)  # at which all hold together (Bonferroni)
        difference = _difference(*(mean_interval(*side, level) for side in sides))
        groups.append(Subgroup(name, int(inside.sum()), mean_interval(*sides[0]), difference))
    large = [group for group in groups if group.samples >= FEW]
    worst = min(large, key=lambda x: x.score.mean) if len(large) > 1 else None
    return Subgroups(groups, worst)


def _part(
    scores: Array, clusters: Words, weights: Array | None, rows: NDArray[np.bool_]
) -> tuple[Array, Words, Array | None]:
    """Return scores (S, n), clusters and weights of some samples."""
    return scores[:, rows], clusters[rows], None if weights is None else weights[rows]


def subgroup_cells(dataset: PairedDataset, column: str) -> list[str | None]:
    """Return the samples' cells of a column of the data, also of one that is an input in a table.

    Raises:
        FusionZooError: the data has no such column
    """
    known = [name for name in table_columns(dataset) if name not in ("id", "split")]
    if column in known:
        return dataset.column(column)
    inputs = {
        name: modality
        for modality in dataset.modalities
        if pa.types.is_struct(dataset.table[modality].type)
        for name in (x.name for x in dataset.table[modality].type.fields)
    }
    known += [name for name in inputs if name not in known]
    check_known(column, known, f"--subgroups: {dataset.source} has no column {column!r}")
    cells = pc.struct_field(dataset.chosen(inputs[column]), column)
    return list(cells.cast(pa.string()).to_pylist())


def group_names(cells: Sequence[str | None], column: str) -> Words:
    """Return the group of each sample, (N,): its cell of a column.

    Raises:
        FusionZooError: one group, or more than `MAX_GROUPS`
    """
    words = np.array([MISSING if cell is None else cell for cell in cells])
    count = len(set(words.tolist()))
    if not 2 <= count <= MAX_GROUPS:
        raise FusionZooError(
            f"--subgroups {column}: {count:,} group{'s' * (count != 1)} among {len(words):,}"
            f" samples, expected 2 to {MAX_GROUPS}; of numbers or dates, make a column of ranges"
        )
    return words


def measured_rows(
    answers: Answers, dataset: PairedDataset, known: Tensor
) -> tuple[Tensor, Words, Array | None]:
    """Return which samples count, bool (N,), of those with a `known` label; their groups and
    weights."""
    weights = None
    if answers.weights is not None:
        known = known & (answers.weights > 0)
        weights = answers.weights[known].double().numpy()
    group_of = dict(zip(dataset.ids, dataset.groups, strict=True))
    return known, np.array([group_of[key] for key in answers.ids])[known.numpy()], weights


def two_class_intervals(
    parts: Mapping[str, tuple[Tensor, Tensor]], answers: Answers, dataset: PairedDataset
) -> dict[str, Interval]:
    """Return AUROC, sensitivity and specificity with 95 % intervals, by the names that they have in
    a model's metrics.

    `parts` are `Tasks.two_classes`. Samples of a group count together. Figures of a class that no
    sample has are left out.
    """
    intervals = {}
    for prefix, (logits, index) in parts.items():
        rows, groups, weights = measured_rows(answers, dataset, index >= 0)
        truth = index[rows].numpy() == 1
        margin = (logits[:, 1].double() - logits[:, 0])[rows].numpy()
        if truth.any() and not truth.all():
            intervals[f"{prefix}auroc"] = auroc_interval(margin, truth, groups, weights)
        right = (margin > 0) == truth
        for name, inside in (("sensitivity", truth), ("specificity", ~truth)):
            if inside.any():
                side = _part(right[None].astype(np.float64), groups, weights, inside)
                intervals[f"{prefix}{name}"] = mean_interval(*side)
    return intervals


def subgroup_metrics(
    task: HasScores, answers: Answers, dataset: PairedDataset, columns: Sequence[str]
) -> dict[str, Any]:
    """Return the fusion's figure by group of samples, for each of these columns of the data.

    Under a column: `metric`, its name; `groups`, by name with `samples`, the figure, `low`, `high`,
    and `difference` from all other samples, above 0 where the group does better; `worst`.
    """
    metric = task.metric
    target = answers.target.reshape(len(answers.target), -1)
    known, clusters, weights = measured_rows(answers, dataset, ~target.double().isnan().any(1))
    scores = task.scores(answers.fused.float()[known], target[known]).numpy()[None]
    row_of = {key: row for row, key in enumerate(dataset.ids)}
    rows = [row_of[key] for key, one in zip(answers.ids, known.tolist(), strict=True) if one]
    found: dict[str, Any] = {}
    for column in columns:
        cells = subgroup_cells(dataset, column)
        names = group_names([cells[row] for row in rows], column)
        groups, worst = compare_subgroups(scores, names, clusters, weights=weights)
        figures = {group.name: _figures(group, metric) for group in groups}
        name = None if worst is None else worst.name
        found[column] = {"metric": metric.name, "groups": figures, "worst": name}
    return found


def _figures(group: Subgroup, metric: Metric) -> dict[str, Any]:
    low, high = sorted((metric.shown(group.score.low), metric.shown(group.score.high)))
    figure = {metric.name: metric.shown(group.score.mean), "low": low, "high": high}
    return {"samples": group.samples, **figure, "difference": dict(group.difference._asdict())}


def subgroup_rows(figures: Mapping[str, Any]) -> tuple[list[str], list[list[str]], str]:
    """Return header and rows of a column's table, and what it says of the worst group."""
    metric = next(x for x in COMPARED_BY.values() if x.name == figures["metric"])
    rows = []
    for name, group in figures["groups"].items():
        score = f"{group[metric.name]:.3f} [{group['low']:.3f}, {group['high']:.3f}]"
        gap = group["difference"]
        mean, low, high = (metric.difference(gap[x]) for x in ("mean", "low", "high"))
        rows.append([name, f"{group['samples']:,}", score, f"{mean} [{low}, {high}]"])
    unit = ", points" if metric.share else ""
    header = ["group", "samples", metric.title, f"against all others{unit}"]
    worst = figures["worst"]
    if worst is None:
        return header, rows, f"fewer than two groups have {FEW} samples"
    gap = figures["groups"][worst]["difference"]
    proven = "below" if gap["high"] < 0 else "not told apart from"
    return header, rows, f"worst is {worst!r}, {proven} all others"


def _difference(a: Interval, b: Interval) -> Interval:
    """Return a - b of two independent means, from the interval of each.

    Newcombe's (1998) example of 56 of 70 against 48 of 80:

    >>> from fusionzoo.evaluation.statistics import share_interval
    >>> a, b = (Interval(x / n, *share_interval(x / n, n)) for x, n in ((56, 70), (48, 80)))
    >>> [round(x, 4) for x in _difference(a, b)]
    [0.2, 0.0524, 0.3339]
    """
    gain = a.mean - b.mean
    low = gain - math.hypot(a.mean - a.low, b.high - b.mean)
    return Interval(gain, low, gain + math.hypot(a.high - a.mean, b.mean - b.low))
