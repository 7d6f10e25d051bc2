"""The figures of a report: probes, neighbours, geometry, similarity of spaces, retrieval."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fusionzoo.evaluation.geometry import (
    alignment,
    effective_rank,
    linear_cka,
    modality_gap,
    uniformity,
)
from fusionzoo.evaluation.retrieval import any_pair, retrieval_intervals
from fusionzoo.evaluation.statistics import Interval, by_group, crossed
from fusionzoo.vectors.file import unit

from .sample import EmbeddedSample

FOLDS = 5
NEIGHBOURS = 10
MIN_PER_CLASS = 5  # samples; rarer classes are left out of probes
MAX_CLASSES = 200  # more values than that are numbers or names rather than classes
MAX_CKA = 3000  # samples, whose products are (N, N)
NOTHING = Interval(math.nan, math.nan, math.nan)


def column_figures(sample: EmbeddedSample, column: str) -> dict[str, Any]:
    """Return the figures of one column of vectors, of the rows that have it."""
    rows = sample.usable[column].nonzero()[:, 0]
    vectors = sample.vectors[column][rows]
    figures: dict[str, Any] = {
        "file": sample.name,
        "vectors": column,
        "width": vectors.shape[1],
        "samples": len(rows),
        "effective_rank": effective_rank(vectors) if len(rows) > 1 else math.nan,
        "uniformity": uniformity(vectors) if len(rows) > 1 else math.nan,
    }
    labelled = probe_rows([sample.targets[row] for row in rows.tolist()])
    names = ("linear_probe", "knn", "majority")
    figures |= dict.fromkeys(names, NOTHING) | {"silhouette": math.nan, "labelled": 0}
    if labelled:
        targets = [str(sample.targets[row]) for row in rows[labelled].tolist()]
        names_of_groups = sample.group_names()
        groups = [names_of_groups[row] for row in rows[labelled].tolist()]
        figures |= probes(unit(vectors[labelled]).numpy(), np.array(targets), groups)
        figures["labelled"] = len(labelled)
    return figures


def probe_rows(targets: Sequence[str | None]) -> list[int]:
    """Return the rows whose class is frequent enough; none if the targets are no classes."""
    counts = Counter(target for target in targets if target is not None)
    frequent = {target for target, count in counts.items() if count >= MIN_PER_CLASS}
    if not 1 < len(frequent) <= MAX_CLASSES:
        return []
    return [row for row, target in enumerate(targets) if target in frequent]


def probes(vectors: Any, targets: Any, groups: Sequence[str]) -> dict[str, Any]:
    """Return the accuracy of a linear probe and of neighbours over grouped folds: (N, D), (N,).

    Intervals count that samples come in groups and that folds share training data.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import silhouette_score
    from sklearn.model_selection import StratifiedGroupKFold
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    from fusionzoo.evaluation.statistics import Array

    nothing = {"linear_probe": NOTHING, "knn": NOTHING, "majority": NOTHING}
    distinct, codes = np.unique(targets, return_inverse=True)
    folds = min(FOLDS, len(set(groups)))
    if folds < 2:
        return nothing
    right: dict[str, Array] = {name: np.zeros(len(targets)) for name in nothing}
    split = StratifiedGroupKFold(folds, shuffle=True, random_state=0)
    for train, test in split.split(vectors, codes, groups):
        if not len(test) or len(np.unique(codes[train])) < 2:
            return nothing
        linear = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=2000))
        near = KNeighborsClassifier(min(NEIGHBOURS, len(train)), metric="cosine")
        for name, model in (("linear_probe", linear), ("knn", near)):
            model.fit(vectors[train], codes[train])
            right[name][test] = model.predict(vectors[test]) == codes[test]
        right["majority"][test] = codes[test] == np.bincount(codes[train]).argmax()
    figures: dict[str, Any] = {
        name: crossed(by_group(scores[None], groups), folds)[0] for name, scores in right.items()
    }
    silhouette = float(silhouette_score(vectors, codes, metric="cosine"))
    return figures | {"silhouette": silhouette, "classes": len(distinct)}


def pair_figures(sample: EmbeddedSample) -> list[dict[str, Any]]:
    """Return alignment and gap of each pair of modalities in the common space."""
    lines = []
    for first, second in combinations(sample.aligned, 2):
        both = sample.usable[f"aligned_{first}"] & sample.usable[f"aligned_{second}"]
        if both.any():
            a, b = sample.aligned[first][both], sample.aligned[second][both]
            shuffled = b.roll(1, 0) if len(b) > 1 else b
            lines.append(
                {
                    "file": sample.name,
                    "pair": f"{first} and {second}",
                    "samples": int(both.sum()),
                    "alignment": alignment(a, b),
                    "of_others": alignment(a, shuffled),
                    "gap": modality_gap(a, b),
                }
            )
    return lines


def cka_table(samples: Sequence[EmbeddedSample]) -> tuple[list[str], list[list[float]]]:
    """Return linear CKA of every two columns of vectors, of the same file or of two.

    Rows of the samples are the same ids.
    """
    columns: list[tuple[str, Tensor, Tensor]] = []
    for sample in samples:
        prefix = f"{sample.name}: " if len(samples) > 1 else ""
        columns += [(prefix + n, x, sample.usable[n]) for n, x in sample.vectors.items()]
    matrix = [[1.0] * len(columns) for _ in columns]
    for (i, (_, x, has_x)), (j, (_, y, has_y)) in combinations(enumerate(columns), 2):
        rows = (has_x & has_y).nonzero()[:MAX_CKA, 0]
        matrix[i][j] = matrix[j][i] = linear_cka(x[rows], y[rows])
    return [name for name, _, _ in columns], matrix


def retrieval(sample: EmbeddedSample) -> dict[str, dict[str, Interval]]:
    """Return the figures of each direction in the common space."""
    aligned = sample.aligned
    if len(aligned) < 2:
        return {}
    present = torch.stack([sample.usable[f"aligned_{name}"] for name in aligned], dim=1)
    if not any_pair(present):
        return {}
    return retrieval_intervals(aligned, present, content=sample.content, groups=sample.groups)
