"""The linear baseline: logistic or ridge regression on frozen features."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fusionzoo.errors import FusionZooError
from fusionzoo.structures import Features
from fusionzoo.targets import Number, Target
from fusionzoo.training.multitask import Tasks

from .bench import Bench, Job, learned_rows, sample_scores, tasks_of
from .candidates import modalities_of
from .examine import score_row
from .feeds import ProbeFeed
from .store import SeedResult

PENALTIES = (0.1, 1.0, 10.0, 100.0, 1000.0)  # C of scikit-learn: the inverse of the penalty
FARTHEST = 1e-5, 1e7  # where the search ends if the best penalty lies at the end of those
EDGE = 1e-7  # probabilities are kept this far from 0 and 1
Matrix = NDArray[np.float64]
Fitted = TypeVar("Fitted", bound=tuple[Any, ...])  # the validation loss comes first


class _Rows(NamedTuple):
    """What a linear model reads of some samples."""

    numbers: Tensor  # (N,) of the samples
    x: Matrix  # (N, D)
    present: Tensor  # (N,) whether they have one of the modalities


def run_linear(bench: Bench, job: Job) -> list[SeedResult]:
    """Fit a linear model on a fold; it has no seed, so all seeds share one result.

    It learns from the samples that have one of its modalities, and answers the others with the
    prior. Each penalty is fitted from zero, which takes 0.05 s (540 rows of 1,280 numbers, 12
    classes): started from its neighbour's weights, scikit-learn stops before it has moved.
    With `cfg.refit` the model that is tested learns from the validation samples too.
    """
    start = time.perf_counter()
    fold, feed = bench.folds[job.fold], ProbeFeed(bench, job)
    wanted = [fold.train, fold.val, fold.test, learned_rows(bench, fold)]
    train, val, test, learned = (
        _Rows(rows, _matrix(x), torch.stack([part.mask.any(1) for part in x.values()]).any(0))
        for rows, x in zip(wanted, feed(wanted, -1), strict=True)
    )
    if not train.present.any():
        names = ", ".join(modalities_of(bench, job.candidate))
        raise FusionZooError(f"no training sample of fold {job.fold} has {names}: add some")
    tasks = tasks_of(bench, fold.train)

    def validated(penalty: float) -> tuple[float, Tensor]:
        logits = _answer(bench, train, val, penalty)
        return float(tasks.criterion(logits, bench.targets[fold.val]).mean()), logits

    penalty, (loss, val_logits) = best_penalty(validated)
    test_logits = _answer(bench, learned, test, penalty)
    scores = sample_scores(tasks, test_logits, bench.targets[fold.test])
    row = score_row(tasks, test_logits, bench.targets[fold.test], scores, "full")
    facts = {"val_loss": loss, "penalty": penalty, "seconds": time.perf_counter() - start}
    return [
        SeedResult(
            seed,
            [row],
            facts,
            test_logits.numpy(),
            val_logits.numpy(),
            scores.numpy()[None].astype(np.float32),
        )
        for seed in job.seeds
    ]


def _answer(bench: Bench, learned: _Rows, asked: _Rows, penalty: float) -> Tensor:
    """Fit a linear model on some samples; return the logits of others, (N, K)."""
    labels = bench.targets[learned.numbers]
    known = learned.present if bench.scheme is not None else learned.present & (labels >= 0)
    tasks = tasks_of(bench, learned.numbers)
    (logits,) = _fit(tasks, learned.x[known.numpy()], labels[known], (asked.x,), penalty)
    return torch.where(asked.present[:, None], logits, prior_logits(bench, learned.numbers))


def best_penalty(fit_penalty: Callable[[float], Fitted]) -> tuple[float, Fitted]:
    """Return the penalty with the least validation loss, and what was fitted with it.

    Where that is the first or last of PENALTIES, the search goes on beyond it, tenfold each time.
    """
    fitted = {penalty: fit_penalty(penalty) for penalty in PENALTIES}
    while True:
        best = min(fitted, key=lambda penalty: fitted[penalty][0])
        step = {min(fitted): 0.1, max(fitted): 10.0}.get(best)
        if step is None or not FARTHEST[0] < best * step < FARTHEST[1]:
            return best, fitted[best]
        fitted[best * step] = fit_penalty(best * step)


def prior_logits(bench: Bench, rows: Tensor) -> Tensor:
    """Return the logits of an answer without any input, from the labels of these rows: (K,)."""
    prior = tasks_of(bench, rows).prior(bench.targets[rows])
    return prior.float().clamp(min=1e-9).log()


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
    kind = target.standard_kind()
    if isinstance(target, Number):
        from sklearn.linear_model import Ridge

        model = Ridge(alpha=len(x) / penalty / 100).fit(x, y)
        labels_of = [model.predict(other).reshape(len(other), -1) for other in others]
        return [target.logits_of(torch.from_numpy(predicted)).numpy() for predicted in labels_of]
    if kind == "multilabel":
        columns = [_classify(x, column, 2, others, penalty) for column in y.T]
        return [
            np.stack([logits[n][:, 1] - logits[n][:, 0] for logits in columns], 1)
            for n in range(len(others))
        ]
    classes = _classify(x, y[:, 0], len(target.classes), others, penalty)
    if kind == "classification":
        return classes
    return [_above(np.exp(logits)) for logits in classes]


def _classify(
    x: Matrix, y: NDArray[np.generic], width: int, others: tuple[Matrix, ...], penalty: float
) -> list[Matrix]:
    """Return log-probabilities (N, width); classes that the rows lack get the least."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    results = [np.full((len(other), width), np.log(EDGE)) for other in others]
    present = np.unique(y.astype(int))
    if len(present) == 1:
        for result in results:
            result[:, present[0]] = 0.0
        return results
    model = LogisticRegression(C=penalty, max_iter=500, tol=1e-3)
    with warnings.catch_warnings():  # weights that still grow are judged by the validation loss
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(x, y.astype(int))
    for result, other in zip(results, others, strict=True):
        result[:, model.classes_] = np.log(model.predict_proba(other).clip(EDGE))
    return results


def _above(shares: Matrix) -> Matrix:
    """Turn probabilities of levels into logits of P(level > k | level >= k): (N, K) -> (N, K-1)."""
    at_least = np.flip(np.flip(shares, 1).cumsum(1), 1)
    chance = (at_least[:, 1:] / at_least[:, :-1].clip(EDGE)).clip(EDGE, 1 - EDGE)
    return np.asarray(np.log(chance) - np.log1p(-chance), np.float64)
