"""Decompose with probes of the features: the modes `batch` and `sample`, and limits to all parts.

Shapes: `N` samples, `C` classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .by_batch import decompose_batches
from .by_sample import shift, split_samples, surprises
from .codes import Features
from .decompose import Parts
from .pid import (
    FEWEST,
    Fold,
    Limits,
    Pair,
    Setup,
    Sources,
    is_usable,
    joined,
    make_pair,
    pairs_of,
    pid,
    usable_rows,
)
from .probes import Probabilities, Probe

CLEARLY = 0.005  # bits by which a part was clipped, from which on it is said


def decompose_data(
    setup: Setup, mode: str, ids: Sequence[str], *, may_take_minutes: bool = True
) -> list[Pair]:
    """Decompose each pair of modalities by a mode (`cvx`: clusters), within what probes allow.

    Probes of each source, read out of fold, bound what the other can add (`Limits`): parts and
    intervals are clipped to that, and `notes` say so. Where a probe knows more than the chosen
    clusters (`clusters` None) tell of its source, the pair is decomposed by the mode `batch`
    instead, if that may take minutes. The mode `sample` is not clipped: its table is the mean of
    its samples.
    """
    if mode == "sample":
        return pid_by_probes(setup, mode, ids)
    found = pid(setup) if mode == "cvx" else pid_by_probes(setup, mode, ids)
    pairs = []
    for sources, pair in zip(pairs_of(list(setup.folds[0].features)), found, strict=True):
        limits = limits_of(setup, *sources)
        if limits is not None and mode == "cvx" and setup.clusters is None:
            pair = _without_clusters(
                setup, ids, sources, pair, limits, may_take_minutes=may_take_minutes
            )
        pairs.append(pair if limits is None else _clipped(pair, limits))
    return pairs


def _without_clusters(
    setup: Setup,
    ids: Sequence[str],
    sources: Sources,
    pair: Pair,
    limits: Limits,
    *,
    may_take_minutes: bool,
) -> Pair:
    """Decompose a pair by the mode `batch` if clusters tell less of a source than a probe."""
    number = limits.lost(pair.parts)
    if number is None:
        return pair
    told, known = (
        pair.parts.redundancy + pair.parts[1 + number],
        limits.entropy - limits[1 + number],
    )
    name = (pair.first, pair.second)[number]
    said = f"Clusters tell {told:.2f} bits of {name}, a probe {known:.2f}"
    names = (*sources[0], *sources[1])
    counts = [
        is_usable(fold, part, names).sum()
        for fold in setup.folds
        for part in (fold.train, fold.test)
    ]
    if min(counts) < FEWEST:
        note = f"{said}; a fold has too few rows for --pid_mode batch."
        return replace(pair, notes=(note,))
    if not may_take_minutes:
        note = f"{said}: `fusionzoo analyse` decomposes them by probes instead, in minutes."
        return replace(pair, notes=(note,))
    by_probes = _pair(setup, "batch", ids, *sources)
    note = f"{said}: {pair.first} and {pair.second} are decomposed by probes (--pid_mode batch)."
    return replace(by_probes, notes=(note,))


def _clipped(pair: Pair, limits: Limits) -> Pair:
    """Clip parts and intervals, and note what a part was before."""
    clipped = limits.clip(pair.parts)
    names = (f"only {pair.first}", f"only {pair.second}")
    others = ((pair.second, limits.left_2), (pair.first, limits.left_1))
    changes = zip(names, others, pair.parts[1:3], clipped[1:3], strict=True)
    notes = [
        f"{name} is at most {left:.3f} bits, all that {other} alone leaves open (a probe on rows"
        f" left out); it was {before:.3f} before that limit."
        for name, (other, left), before, after in changes
        if before - after > CLEARLY
    ]
    return replace(
        pair,
        parts=clipped,
        low=limits.clip(pair.low),
        high=limits.clip(pair.high),
        limits=limits,
        notes=(*pair.notes, *notes),
    )


def limits_of(setup: Setup, first: tuple[str, ...], second: tuple[str, ...]) -> Limits | None:
    """Return what probes of both sources allow; None with fewer than `FEWEST` held-out rows.

    H(Y | X) is at most a probe's cross-entropy on rows that it was not fitted to, and by Fano's
    inequality at most h(e) + e log2(C - 1), e the share of its errors there.
    """
    names = (*first, *second)
    targets: list[NDArray[np.int64]] = []
    chosen: tuple[list[Probabilities], list[Probabilities]] = ([], [])
    for fold in setup.folds:
        train, test = (part[is_usable(fold, part, names)] for part in (fold.train, fold.test))
        if len(train) < FEWEST or not len(test):
            continue
        targets.append(fold.target[test])
        for answers, source in zip(chosen, (first, second), strict=True):
            x = joined(fold, source)
            answers.append(Probe(x[train], fold.target[train], setup.classes, setup.seed)(x[test]))
    target = np.concatenate([np.zeros(0, np.int64), *targets])
    if len(target) < FEWEST:
        return None
    shares = np.bincount(target) / len(target)
    return Limits(_entropy(shares), *(_left(np.concatenate(p), target) for p in chosen))


def _left(probabilities: Probabilities, target: NDArray[np.int64]) -> float:
    """Return the most that H(Y | X) may be: (N, C), (N,) -> bits."""
    crossed = -np.log2(probabilities[np.arange(len(target)), target]).mean()
    wrong = float((probabilities.argmax(1) != target).mean())
    others = max(1, probabilities.shape[1] - 1)
    return min(float(crossed), _entropy(np.array([wrong, 1 - wrong])) + wrong * np.log2(others))


def _entropy(shares: NDArray[np.float64]) -> float:
    """Return the entropy of shares in bits."""
    positive = shares[shares > 0]
    return float(-(positive * np.log2(positive)).sum()) + 0.0


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
