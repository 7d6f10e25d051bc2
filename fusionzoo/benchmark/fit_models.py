"""Fit a model on a fold of the benchmark: choose by validation, test, refit."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from fusionzoo.errors import FusionZooError
from fusionzoo.structures import Features
from fusionzoo.training.fitted.components import (
    CLASSIFIER,
    REGRESSOR,
    Tabular,
    Trees,
    find_weights,
)
from fusionzoo.training.fitted.kernels import KernelSum
from fusionzoo.training.fitted.linear import Linear
from fusionzoo.training.fitted.method import Inputs, Method, Setting

from .bench import Bench, Job, learned_rows, tasks_of
from .candidates import KERNELS, TABULAR, TREES, modalities_of, parse
from .examine import scored
from .feeds import ProbeFeed, device_of
from .store import SeedResult
from .train import mean_costs


class _Rows(NamedTuple):
    """Some samples, and what a fitted model reads of them."""

    numbers: Tensor  # (N,) of the samples in the data set
    inputs: Inputs


def run_fitted(bench: Bench, job: Job) -> list[SeedResult]:
    """Fit a model on a fold; it has no seed, so all seeds share one result.

    It learns from the samples that have one of its modalities, and answers the others with the
    prior. With `cfg.refit` the model that is tested learns from the validation samples too. It gets
    torch's number of threads: where each of two worker processes took all of two cores, logistic
    regressions waited for each other, and took thirty times as long.
    """
    import sklearn.ensemble  # noqa: F401 - limited are libraries that are loaded

    with threadpool_limits(torch.get_num_threads()):
        return _run(bench, job)


def _run(bench: Bench, job: Job) -> list[SeedResult]:
    start = time.perf_counter()
    fold, feed, method = bench.folds[job.fold], ProbeFeed(bench, job), _method(bench, job.candidate)
    wanted = [fold.train, fold.val, fold.test, learned_rows(bench, fold)]
    train, val, test, learned = (
        _Rows(rows, _inputs(list(x.values())))
        for rows, x in zip(wanted, feed(wanted, -1), strict=True)
    )
    if not train.inputs.present.any():
        names = ", ".join(modalities_of(bench, job.candidate))
        raise FusionZooError(f"no training sample of fold {job.fold} has {names}: add some")
    tasks = tasks_of(bench, fold.train)

    def validated(setting: Setting) -> tuple[tuple[float, float], Tensor]:
        logits, weights = _answer(bench, method, train, val, setting), bench.weights_of(fold.val)
        return mean_costs(tasks.costs(logits, bench.targets[fold.val], weights), weights), logits

    setting, ((_, loss), val_logits) = method.choose(validated)
    test_logits = _answer(bench, method, learned, test, setting)
    weights = bench.weights_of(fold.test)
    scores, row = scored(tasks, test_logits, bench.targets[fold.test], weights)
    facts = {"val_loss": loss, "seconds": time.perf_counter() - start, **setting}
    logits = (test_logits.numpy(), val_logits.numpy())
    whole = scores.numpy()[None].astype(np.float32)
    return [SeedResult(seed, [row], facts, *logits, whole) for seed in job.seeds]


def obstacle(bench: Bench, candidate: str) -> str:
    """Say why a fitted model cannot be run here, and what to do; empty if it can."""
    most = _method(bench, candidate).most_rows
    rows = max(len(learned_rows(bench, fold)) for fold in bench.folds)
    if most is not None and rows > most:
        return f"it would learn from {rows:,} samples, and is for at most {most:,}"
    if bench.weights is not None and not _method(bench, candidate).weighs_rows:
        return "it takes no weights of samples (--data.weight_column)"
    if parse(candidate).base != TABULAR:
        return ""
    kinds = {target.standard_kind() for target in bench.scheme or ()}
    needed = [REGRESSOR] * ("regression" in kinds) + [CLASSIFIER] * (kinds != {"regression"})
    try:
        for kind in needed:
            find_weights(kind)
    except FusionZooError as error:
        return str(error)
    return ""


def prior_logits(bench: Bench, rows: Tensor) -> Tensor:
    """Return the logits of an answer without any input, from the labels of these rows: (K,)."""
    prior = tasks_of(bench, rows).prior(bench.targets[rows], bench.weights_of(rows))
    return prior.float().clamp(min=1e-9).log()


def _method(bench: Bench, candidate: str) -> Method:
    base = parse(candidate).base
    if base == TREES:
        return Trees()
    if base == KERNELS:
        return KernelSum()
    return Tabular(device_of(bench.cfg)) if base == TABULAR else Linear()


def _answer(bench: Bench, method: Method, learned: _Rows, asked: _Rows, setting: Setting) -> Tensor:
    """Fit a model on some samples; return the logits of others, (N, K)."""
    labels, tasks = bench.targets[learned.numbers], tasks_of(bench, learned.numbers)
    known = torch.from_numpy(learned.inputs.present.any(1))
    known = known if bench.scheme is not None else known & (labels >= 0)
    weights = bench.weights_of(learned.numbers)
    if weights is not None:
        known = known & (weights > 0)
        over_mean = (weights / weights[known].double().mean()).double().numpy()
        learned = learned._replace(inputs=learned.inputs._replace(weights=over_mean))
    inputs = learned.inputs.of(known.numpy())
    logits = method.answer(tasks, inputs, labels[known], asked.inputs, setting)
    present = torch.from_numpy(asked.inputs.present.any(1))[:, None]
    return torch.where(present, logits, prior_logits(bench, learned.numbers))


def _inputs(features: list[Features]) -> Inputs:
    """Return the modalities' pooled vectors as matrices, zeros where a sample lacks one."""
    present = torch.stack([x.mask.any(1) for x in features], 1)
    parts = [
        np.asarray(x.pooled.masked_fill(~there[:, None], 0).double().numpy(), np.float64)
        for x, there in zip(features, present.unbind(1), strict=True)
    ]
    return Inputs(tuple(parts), present.numpy())
