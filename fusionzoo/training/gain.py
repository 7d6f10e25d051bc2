"""What the fusion gains over the best modality alone, on the same test samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fusionzoo.datasets import PairedDataset
from fusionzoo.evaluation.measure import Answers
from fusionzoo.evaluation.statistics import paired_interval
from fusionzoo.evaluation.subgroups import measured_rows

from .multitask import Tasks

GAIN = "gain"  # key of it in a run's metrics


def best_alone(tasks: Tasks, unimodal: Mapping[str, Any]) -> str:
    """Name the modality whose head alone has the best leading metric."""
    return max(unimodal, key=lambda name: tasks.leading_value(unimodal[name]))


def paired_gain(tasks: Tasks, answers: Answers, best: str, dataset: PairedDataset) -> Any:
    """Return the gain in the figure that each sample has a score of, with its paired interval.

    `over`, the modality; `metric`; `gain`, `low` and `high`, above 0 where the fusion is better;
    `samples` that have a label, of which the fusion `won` and `lost` some; `words`, a sentence.
    """
    target = answers.target.reshape(len(answers.target), -1)
    known, groups, weights = measured_rows(answers, dataset, ~target.double().isnan().all(1))
    both = (x.float()[known] for x in (answers.fused, answers.alone[best]))
    fused, alone = (tasks.scores(x, answers.target[known]).numpy() for x in both)
    difference, metric = fused - alone, tasks.metric
    interval = paired_interval(difference, groups, weights)
    won, lost = int((difference > 0).sum()), int((difference < 0).sum())
    mean, low, high = map(metric.difference, interval)
    ends = f" ({low} to {high})" if np.isfinite(interval).all() else ""
    verdict = "better" if interval.low > 0 else "worse" if interval.high < 0 else "undecided"
    words = (
        f"{metric.title} over {best} alone {mean}{' points' * metric.share}{ends};"
        f" of {len(fused):,} samples {won:,} won, {lost:,} lost: {verdict}"
    )
    numbers = {"gain": interval.mean, "low": interval.low, "high": interval.high}
    counts = {"samples": len(fused), "won": won, "lost": lost}
    return {"over": best, "metric": metric.name, **numbers, **counts, "words": words}
