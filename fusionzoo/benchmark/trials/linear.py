"""The linear baseline: logistic or ridge regression on the features of all modalities.

Features are those of the frozen encoders, or the vectors themselves, standardised and side by side;
an absent modality is zeros. The strength of the penalty is chosen on the validation split.

Shapes: `N` rows, `D` features of all modalities, `K` logits, `C` label columns.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fusionzoo.structures import Features
from fusionzoo.targets import Target
from fusionzoo.training.tasks.multitask import Tasks

from ..bench import Bench, Unit, tasks_of
from ..features.feeds import ProbeFeed
from ..metric import sample_scores
from .examine import score_row
from .store import TrialResult

PENALTIES = (0.1, 1.0, 10.0, 100.0, 1000.0)  # C of scikit-learn: the inverse of the penalty
EDGE = 1e-7  # probabilities are kept this far from 0 and 1

Matrix = NDArray[np.float64]


def run(bench: Bench, unit: Unit) -> list[TrialResult]:
    """Fit the baseline on a fold; it has no seed, so all seeds share one result."""
    start = time.perf_counter()
    fold = bench.folds[unit.fold]
    tasks = tasks_of(bench, fold.train)
    feed = ProbeFeed(bench, unit)
    train, val, test = (_matrix(x) for x in feed([fold.train, fold.val, fold.test], -1))
    target = bench.targets
    best: tuple[float, float, Tensor, Tensor] | None = None
    for penalty in PENALTIES:
        logits = _fit(tasks, train, target[fold.train], (val, test), penalty)
        loss = float(tasks.criterion(logits[0], target[fold.val]).mean())
        if best is None or loss < best[0]:
            best = loss, penalty, logits[0], logits[1]
    assert best is not None
    loss, penalty, val_logits, test_logits = best
    scores = sample_scores(tasks, test_logits, target[fold.test])
    row = score_row(tasks, test_logits, target[fold.test], scores, "full")
    facts = {"val_loss": loss, "penalty": penalty, "seconds": time.perf_counter() - start}
    return [
        TrialResult(
            seed,
            [row],
            facts,
            test_logits.numpy(),
            val_logits.numpy(),
            scores.numpy()[None].astype(np.float32),
        )
        for seed in unit.seeds
    ]


def _matrix(features: Mapping[str, Features]) -> Matrix:
    """Put the modalities' pooled vectors side by side: (N, D)."""
    parts = [x.pooled.masked_fill(~x.mask.any(1)[:, None], 0) for x in features.values()]
    return np.asarray(torch.cat(parts, 1).double().numpy(), np.float64)


def _fit(
    tasks: Tasks, x: Matrix, labels: Tensor, others: tuple[Matrix, ...], penalty: float
) -> list[Tensor]:
    """Fit each target on its labelled rows; return the logits of other rows, (N, K) each."""
    if tasks.plain:
        parts = [_classify(x, labels.numpy(), tasks.first.target.width, others, penalty)]
    else:
        parts = [
            _fit_target(task.target, x, label, others, penalty)  # type: ignore[arg-type]
            for task, label in zip(tasks.tasks, labels.split(tasks.columns, 1), strict=True)
        ]
    return [
        torch.from_numpy(np.concatenate([part[number] for part in parts], 1)).float()
        for number in range(len(others))
    ]


def _fit_target(
    target: Target, x: Matrix, labels: Tensor, others: tuple[Matrix, ...], penalty: float
) -> list[Matrix]:
    labelled = ~labels.isnan().any(1).numpy()
    x, y = x[labelled], labels.numpy()[labelled]
    if target.kind == "regression":
        from sklearn.linear_model import Ridge

        model = Ridge(alpha=len(x) / penalty / 100).fit(x, y)
        return [model.predict(other).reshape(len(other), -1) for other in others]
    if target.kind == "multilabel":
        columns = [_classify(x, column, 2, others, penalty) for column in y.T]
        return [
            np.stack([logits[n][:, 1] - logits[n][:, 0] for logits in columns], 1)
            for n in range(len(others))
        ]
    classes = _classify(x, y[:, 0], len(target.classes), others, penalty)
    if target.kind == "classification":
        return classes
    return [_above(np.exp(logits)) for logits in classes]


def _classify(
    x: Matrix, y: NDArray[np.generic], width: int, others: tuple[Matrix, ...], penalty: float
) -> list[Matrix]:
    """Return log-probabilities (N, width); classes that the rows lack get the least."""
    from sklearn.linear_model import LogisticRegression

    results = [np.full((len(other), width), np.log(EDGE)) for other in others]
    present = np.unique(y.astype(int))
    if len(present) == 1:
        for result in results:
            result[:, present[0]] = 0.0
        return results
    model = LogisticRegression(C=penalty, max_iter=500, tol=1e-3).fit(x, y.astype(int))
    for result, other in zip(results, others, strict=True):
        result[:, model.classes_] = np.log(model.predict_proba(other).clip(EDGE))
    return results


def _above(shares: Matrix) -> Matrix:
    """Turn probabilities of levels into logits of P(level > k | level >= k): (N, K) -> (N, K-1)."""
    at_least = np.flip(np.flip(shares, 1).cumsum(1), 1)
    chance = (at_least[:, 1:] / at_least[:, :-1].clip(EDGE)).clip(EDGE, 1 - EDGE)
    return np.asarray(np.log(chance) - np.log1p(-chance), np.float64)
