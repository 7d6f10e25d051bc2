"""The modes of `pid` that need no clusters: `batch` and `sample`, from probes of the features.

Shapes: `N` samples, `C` classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .by_batch import decompose_batches
from .by_sample import shift, split_samples, surprises
from .codes import Features
from .decompose import Parts
from .pid import Fold, Pair, Setup, joined, make_pair, pairs_of, usable_rows
from .probes import Probabilities, Probe


class FoldEstimate(NamedTuple):
    """The parts of one fold's test rows."""

    values: NDArray[np.float64]  # (N, 4) of each row; (1, 4) of all in mode `batch`
    rows: NDArray[np.int64]  # (N,)


def pid_by_probes(setup: Setup, mode: str, ids: Sequence[str]) -> list[Pair]:
    """Decompose as `pid` does, by the mode `batch` or `sample`; ids of all rows (N,).

    Probes of p(y | x_1), p(y | x_2) and p(y | x_1, x_2) learn on a fold's training rows and are
    read on its test rows, of those that have both sources: the mean over folds, with the interval
    of that mean. Samples have values of their own in mode `sample`, whose mean is the table.

    Pitfalls. `batch`: what the joint probe knows and the unimodal ones miss becomes synergy, and
    what it misses is lost; probes are calibrated on rows left out. The search for q is not convex.
    `sample`: a density depends on the features' unit, so they are whitened, and on their width, so
    only as many principal components as both sources have count (at most 16). Parts of a single
    sample may be negative, and one of means may be after the shift. Authors' programs print nats
    or bits: here all is in bits.
    """
    names = list(setup.folds[0].features)
    return [_pair(setup, mode, ids, first, second) for first, second in pairs_of(names)]


def _pair(
    setup: Setup, mode: str, ids: Sequence[str], first: tuple[str, ...], second: tuple[str, ...]
) -> Pair:
    estimates = [_fold(setup, mode, fold, first, second) for fold in setup.folds]
    values = np.concatenate([fold.values for fold in estimates])
    rows = np.concatenate([fold.rows for fold in estimates])
    shifted = shift(values) if mode == "sample" else values
    by_fold = np.array(
        [(shift(fold.values) if mode == "sample" else fold.values).mean(0) for fold in estimates]
    )
    spread = by_fold.std(0, ddof=1) if len(by_fold) > 1 else np.full(4, np.nan)
    by_sample: Mapping[str, Parts] | None = None
    if mode == "sample":
        by_sample = {
            ids[row]: Parts(*parts)
            for row, parts in zip(rows.tolist(), shifted.tolist(), strict=True)
        }
    return make_pair(
        (first, second),
        shifted.mean(0),
        spread / np.sqrt(len(by_fold)),
        groups=len(by_fold),
        rows=len(rows),
        by_sample=by_sample,
    )


def _fold(
    setup: Setup, mode: str, fold: Fold, first: tuple[str, ...], second: tuple[str, ...]
) -> FoldEstimate:
    train, test = (usable_rows(fold, part, (*first, *second)) for part in (fold.train, fold.test))
    sources = [joined(fold, names) for names in (first, second)]
    both = np.concatenate(sources, axis=1)
    target = fold.target[test]
    probes = [
        Probe(x[train], fold.target[train], setup.classes, setup.seed) for x in (*sources, both)
    ]
    probabilities = [probe(x[test]) for probe, x in zip(probes, (*sources, both), strict=True)]
    if mode == "batch":
        parts = decompose_batches([x[test] for x in sources], probabilities, setup.seed)
        return FoldEstimate(np.array([parts]), test)
    information = information_of(probabilities, target, probes[0].frequencies)
    surprise = surprises([x[train] for x in sources], [x[test] for x in sources], setup.seed)
    return FoldEstimate(split_samples(information, surprise), test)


def information_of(
    probabilities: Sequence[Probabilities], target: NDArray[np.int64], frequencies: Features
) -> NDArray[np.float64]:
    """Return log2 p(y | x) / p(y) of each row's class: three (N, C), (N,), (C,) -> (N, 3)."""
    chosen = [p[np.arange(len(target)), target] for p in probabilities]
    return np.asarray(np.log2(np.stack(chosen, axis=1) / frequencies[target][:, None]))
