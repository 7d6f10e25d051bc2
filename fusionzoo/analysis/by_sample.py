"""Redundancy, uniqueness and synergy of every sample (mode `sample` of `pid`).

Shapes: `N` samples, `D` width.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .codes import MOST_ROWS, Features

Values = NDArray[np.float64]
COMPONENTS = 5  # of the Gaussian mixture
WIDEST = 16  # principal components of which a density is estimated
ROWS_PER_COMPONENT = 50  # training rows for each of them, at least
DIRECTION = np.array([1.0, -1.0, -1.0, 1.0])  # of the shift of (r, u_1, u_2, s)


def split_samples(information: Values, surprise: Values) -> Values:
    """Split each sample's information: (N, 3) of x_1, x_2 and both, (N, 2) -> (N, 4).

    i_m = log2 p(y | x_m) / p(y) and h_m = -log2 p(x_m), of the sample's class and features.
    r = min(h_1, h_2) - min(h_1 - i_1, h_2 - i_2), u_m = i_m - r, s = i_12 - i_1 - i_2 + r, so that
    r + u_1 + u_2 + s = i_12 (Yang, Wang, Hu 2025, ICML, arXiv:2506.17248). Not shifted: `shift`.

    >>> split_samples(np.array([[1.0, 0.0, 1.0]]), np.array([[1.0, 1.0]]))
    array([[ 1.,  0., -1.,  1.]])
    """
    single, joint = information[:, :2], information[:, 2]
    r = surprise.min(1) - (surprise - single).min(1)
    return np.stack([r, single[:, 0] - r, single[:, 1] - r, joint - single.sum(1) + r], axis=1)


def shift(values: Values) -> Values:
    """Move all samples alike until no mean is negative, if one number can: (N, 4) -> (N, 4).

    (r + t, u_1 - t, u_2 - t, s + t), with t = -min(mean r, mean s) where that is above 0, else the
    least mean of u_1 and u_2 where that is below 0. Sums stay. A mean may remain negative where
    both would need another t.
    """
    r, u_1, u_2, s = values.mean(0)
    t = 0.0
    if min(r, s) < 0:
        t = -min(r, s)
    elif min(u_1, u_2) < 0:
        t = min(u_1, u_2)
    return np.asarray(values + t * DIRECTION)


class Density:
    """A Gaussian mixture over the first principal components of features, whitened."""

    def __init__(self, train: Features, seed: int) -> None:
        from sklearn.decomposition import PCA
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        self.train, self.seed, self.rank = train[:MOST_ROWS], seed, 0
        if not np.ptp(self.train, axis=0).any():  # constant: no density
            return
        most = min(WIDEST, max(1, len(self.train) // ROWS_PER_COMPONENT), train.shape[1])
        pca = PCA(most, whiten=True, random_state=seed)
        self.whiten = make_pipeline(StandardScaler(), pca).fit(self.train)
        # Standardised columns have variance 1, or 0 where they are constant.
        self.rank = int((pca.explained_variance_ > 1e-9).sum())

    def fit(self, width: int) -> None:
        """Fit the mixture to so many components, at most `rank`."""
        from sklearn.mixture import GaussianMixture

        self.width = width
        if width:
            count = min(COMPONENTS, len(self.train))
            self.mixture = GaussianMixture(count, reg_covar=1e-3, random_state=self.seed)
            self.mixture.fit(self.whiten.transform(self.train)[:, :width])

    def surprise(self, x: Features) -> Values:
        """Return -log2 p(x) of each row: (N, D) -> (N,)."""
        if not self.width:
            return np.zeros(len(x))
        log_density = self.mixture.score_samples(self.whiten.transform(x)[:, : self.width])
        return np.asarray(-log_density / np.log(2))


def surprises(train: Sequence[Features], test: Sequence[Features], seed: int) -> Values:
    """Return -log2 p(x_m) of the test rows, both sources in as many dimensions: (N, 2).

    A density's unit is that of its features: were x_1 scaled to 0, r would tend to i_1, and were it
    scaled to infinity, to i_2. So both are whitened, to the same number of components.
    """
    densities = [Density(x, seed) for x in train]
    width = min(density.rank for density in densities)
    for density in densities:
        density.fit(width)
    return np.stack([d.surprise(x) for d, x in zip(densities, test, strict=True)], axis=1)
