"""Cluster features, so that information can be counted in a table.

Shapes: `N` samples, `D` width, `C` classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Features = NDArray[np.float64]
Codes = NDArray[np.int64]
CLUSTERS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 50)  # tried; the literature uses up to 50
MOST_ROWS = 20_000  # that clusters are fitted to


class Coder:
    """K-means on standardised features of the training rows."""

    def __init__(self, train: Features, clusters: int, seed: int) -> None:
        from sklearn.cluster import KMeans

        self.centre = train.mean(0)
        deviation = train.std(0)
        self.scale = np.where(deviation > 0, deviation, 1.0)
        distinct = len(np.unique(train[:MOST_ROWS], axis=0))
        self.means = KMeans(min(clusters, distinct), n_init=4, random_state=seed)
        self.means.fit(self._standardise(train[:MOST_ROWS]))

    def _standardise(self, x: Features) -> Features:
        return (x - self.centre) / self.scale

    def __call__(self, x: Features) -> Codes:
        """Return the cluster of each row: (N, D) -> (N,)."""
        return np.asarray(self.means.predict(self._standardise(x)), dtype=np.int64)


def count_table(first: Codes, second: Codes, target: Codes, classes: int) -> NDArray[np.float64]:
    """Return the share of the samples with each pair of codes and class."""
    shape = (int(first.max()) + 1, int(second.max()) + 1, classes)
    table = np.zeros(shape)
    np.add.at(table, (first, second, target), 1.0)
    return table / len(target)


def choose_clusters(
    sources: Sequence[Features], target: Codes, classes: int, seed: int
) -> tuple[int, list[Coder]]:
    """Choose how many clusters tell most about the class on training rows left out.

    At least as many as there are classes, if an eighth of the rows is no less: fewer cannot tell
    the classes apart. The fewest whose held-out log loss, of the class given both codes, is within
    one standard error of the least. Returns the number and the coder of each source.
    """
    order = np.random.default_rng(seed).permutation(len(target))
    third = len(order) // 3
    left_out, used = order[:third], order[third:]
    best: tuple[float, float] | None = None
    tried: list[tuple[int, list[Coder], NDArray[np.float64]]] = []
    most = max(2, len(used) // 8)
    fewest = min(classes, most)
    for clusters in sorted({fewest, *(k for k in CLUSTERS if fewest < k <= most)}):
        coders = [Coder(x[used], clusters, seed) for x in sources]
        codes = [coder(x) for coder, x in zip(coders, sources, strict=True)]
        losses = _log_losses(codes, target, classes, used, left_out)
        tried.append((clusters, coders, losses))
        if best is None or losses.mean() < best[0]:
            best = float(losses.mean()), float(losses.std() / np.sqrt(len(losses)))
    assert best is not None
    return next((k, coders) for k, coders, losses in tried if losses.mean() <= sum(best))


def _log_losses(
    codes: Sequence[Codes], target: Codes, classes: int, used: Codes, left_out: Codes
) -> NDArray[np.float64]:
    """Return each left-out row's log loss under the smoothed table of the used rows."""
    first, second = codes
    counts = np.zeros((int(first.max()) + 1, int(second.max()) + 1, classes))
    np.add.at(counts, (first[used], second[used], target[used]), 1.0)
    prior = counts.sum((0, 1)) + 1
    smoothed = counts + prior / prior.sum()  # one further sample in each cell, spread as the prior
    probability = smoothed / smoothed.sum(2, keepdims=True)
    rows = first[left_out], second[left_out], target[left_out]
    return np.asarray(-np.log(probability[rows]))
