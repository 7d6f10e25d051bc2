"""What the fusion gains over the best modality alone, on the same test samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from fusionzoo.datasets import PairedDataset
from fusionzoo.evaluation.measure import Answers
from fusionzoo.evaluation.statistics import paired_interval
from fusionzoo.evaluation.subgroups import measured_rows

from .multitask import Tasks

GAIN = "gain"  # key of it in a run's metrics


def alone(modality: str) -> str:
    """Name the line of a modality's own head."""
    return f"{modality} alone"


def linear_on(modality: str) -> str:
    """Name the line of a linear model of a modality."""
    return f"linear on {modality}"


def single_lines(
    tasks: Tasks, unimodal: Mapping[str, Any], linear: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the metrics of single modalities by their lines in the table: of each one's own head,
    and of a linear model of it where that is better."""
    lines = {}
    for name, figures in unimodal.items():
        lines[alone(name)] = figures
        if name in linear and tasks.leading_value(linear[name]) > tasks.leading_value(figures):
            lines[linear_on(name)] = linear[name]
    return lines


def best_line(tasks: Tasks, lines: Mapping[str, Any]) -> str:
    """Name the line with the best leading metric."""
    return max(lines, key=lambda line: tasks.leading_value(lines[line]))


def paired_gain(
    tasks: Tasks, answers: Answers, line: str, other: Tensor, dataset: PairedDataset
) -> dict[str, Any]:
    """Return the gain of the fusion over other answers to the same samples, logits (N, K), in the
    figure that each sample has a score of, with its paired interval.

    `over`, their line; `metric`; `gain`, `low` and `high`, above 0 where the fusion is better;
    `samples` that have a label, of which the fusion `won` and `lost` some; `words`, a sentence.
    """
    tasks = Tasks([*tasks.tasks], tasks.weights, tasks.plain)  # whichever figure chose the epoch
    target = answers.target.reshape(len(answers.target), -1)
    known, groups, weights = measured_rows(answers, dataset, ~target.double().isnan().all(1))
    pair = (x.float()[known] for x in (answers.fused, other))
    fused, single = (tasks.scores(x, answers.target[known]).numpy() for x in pair)
    difference, metric = fused - single, tasks.metric
    interval = paired_interval(difference, groups, weights)
    won, lost = int((difference > 0).sum()), int((difference < 0).sum())
    mean, low, high = map(metric.difference, interval)
    ends = f" ({low} to {high})" if np.isfinite(interval).all() else ""
    verdict = "better" if interval.low > 0 else "worse" if interval.high < 0 else "undecided"
    words = (
        f"{metric.title} over {line} {mean}{' points' * metric.share}{ends};"
        f" of {len(fused):,} samples {won:,} won, {lost:,} lost: {verdict}"
    )
    numbers = {"gain": interval.mean, "low": interval.low, "high": interval.high}
    counts = {"samples": len(fused), "won": won, "lost": lost}
    return {"over": line, "metric": metric.name, **numbers, **counts, "words": words}
