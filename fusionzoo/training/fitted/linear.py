"""Logistic or ridge regression, of one modality or of all side by side."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fusionzoo.targets import Number

from ..multitask import Tasks
from .method import Fitted, Inputs, Matrix, Method, Setting

PENALTIES = (0.1, 1.0, 10.0, 100.0, 1000.0)  # C of scikit-learn: the inverse of the penalty
FARTHEST = 1e-5, 1e7  # where the search ends if the best penalty lies at the end of those


class LinearMap(NamedTuple):
    """Logits of a linear model, `x @ weight + bias`, in double precision."""

    weight: Tensor  # (D, K)
    bias: Tensor  # (K,)

    def __call__(self, inputs: Inputs) -> Tensor:
        """Return the logits of samples, (N, K)."""
        return torch.from_numpy(inputs.side_by_side) @ self.weight + self.bias

    def of_raw(self, inputs: Inputs) -> LinearMap:
        """Return the map of columns as they are, of one that reads them standardised by these."""
        moments = zip(*(inputs.moments(place) for place in range(len(inputs.parts))), strict=True)
        mean, deviation = (torch.from_numpy(np.concatenate(x)) for x in moments)
        weight = self.weight / deviation[:, None]
        return LinearMap(weight, self.bias - mean @ weight)


class Linear(Method):
    """A linear model of each sample's vectors.

    Each penalty is fitted from zero, which takes 0.05 s (540 rows of 1,280 numbers, 12 classes):
    started from its neighbour's weights, scikit-learn stops before it has moved.
    """

    def choose(self, fit: Callable[[Setting], Fitted]) -> tuple[Setting, Fitted]:
        penalty, fitted = best_penalty(lambda penalty: fit({"penalty": penalty}))
        return {"penalty": penalty}, fitted

    def shares(
        self, learned: Inputs, labels: NDArray[np.int64], asked: Inputs, setting: Setting
    ) -> tuple[NDArray[np.int64], Matrix]:
        model = _classifier(learned, labels, setting)
        return model.classes_, model.predict_proba(asked.side_by_side)

    def numbers(self, learned: Inputs, y: Matrix, asked: Inputs, setting: Setting) -> Matrix:
        model = _ridge(learned, y, setting)
        return np.asarray(model.predict(asked.side_by_side)).reshape(len(asked.present), -1)

    def linear_map(
        self, tasks: Tasks, learned: Inputs, labels: Tensor, setting: Setting
    ) -> LinearMap | None:
        """Return the map that `answer` computes; None where that is no linear one: of several
        targets, labels, levels, or classes that the labels lack."""
        if tasks.plain:
            model = _classifier(learned, labels.numpy(), setting)
            weight, bias = model.coef_, model.intercept_
            if len(weight) == 1:  # of two classes, the log-odds of the second
                weight, bias = np.concatenate([-weight, weight]) / 2, np.append(-bias, bias) / 2
            if len(weight) != tasks.first.target.width:
                return None
        elif len(tasks.tasks) == 1 and type(tasks.first.target) is Number:
            labelled = np.asarray(~labels.isnan().any(1), np.bool_)
            model = _ridge(learned.of(labelled), labels.numpy()[labelled], setting)
            weight, bias = np.atleast_2d(model.coef_), np.atleast_1d(model.intercept_)
        else:
            return None
        return LinearMap(torch.tensor(weight.T).double(), torch.tensor(bias).double())


def _classifier(learned: Inputs, labels: NDArray[np.int64], setting: Setting) -> Any:
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(C=setting["penalty"], max_iter=500, tol=1e-3)
    with warnings.catch_warnings():  # weights that still grow are judged by the validation loss
        warnings.simplefilter("ignore", ConvergenceWarning)
        return model.fit(learned.side_by_side, labels, sample_weight=learned.weights)


def _ridge(learned: Inputs, y: Matrix, setting: Setting) -> Any:
    from sklearn.linear_model import Ridge

    model = Ridge(alpha=len(y) / setting["penalty"] / 100)
    return model.fit(learned.side_by_side, y, sample_weight=learned.weights)


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
