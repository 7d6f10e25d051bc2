"""Boosted trees on principal components."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from .method import Fitted, Inputs, Matrix, Method, Setting, least, principal_components

RATES, LEAVES = (0.05, 0.2), (8, 31)
ROUNDS = 100


class Trees(Method):
    """Histogram-based gradient boosting (Ke et al., "LightGBM", NeurIPS 2017), scikit-learn's.

    Validation chooses the learning rate and the number of leaves; a modality that a sample lacks is
    a missing value, which trees send to the side that suits them.
    """

    def choose(self, fit: Callable[[Setting], Fitted]) -> tuple[Setting, Fitted]:
        pairs = itertools.product(RATES, LEAVES)
        return least([{"rate": rate, "leaves": leaves} for rate, leaves in pairs], fit)

    def shares(
        self, learned: Inputs, labels: NDArray[np.int64], asked: Inputs, setting: Setting
    ) -> tuple[NDArray[np.int64], Matrix]:
        from sklearn.ensemble import HistGradientBoostingClassifier

        x, others = principal_components(learned, asked)
        model = HistGradientBoostingClassifier(**_settings(setting)).fit(x, labels)
        return model.classes_, model.predict_proba(others)

    def numbers(self, learned: Inputs, y: Matrix, asked: Inputs, setting: Setting) -> Matrix:
        from sklearn.ensemble import HistGradientBoostingRegressor

        x, others = principal_components(learned, asked)
        models = [HistGradientBoostingRegressor(**_settings(setting)).fit(x, v) for v in y.T]
        return np.stack([model.predict(others) for model in models], 1)


def _settings(setting: Setting) -> dict[str, object]:
    return {
        "learning_rate": setting["rate"],
        "max_leaf_nodes": int(setting["leaves"]),
        "max_iter": ROUNDS,
        "early_stopping": False,
        "random_state": 0,
    }
