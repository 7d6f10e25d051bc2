"""A support vector machine on the sum of the modalities' kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .linear import best_penalty
from .method import EDGE, Fitted, Inputs, Matrix, Method, Setting

if TYPE_CHECKING:
    from sklearn.svm import SVC

GAMMAS = (0.25, 1.0, 4.0)  # in units of one over the mean squared distance of two samples
PARTS = 5  # of the training samples, to calibrate the margins on


class KernelSum(Method):
    """An SVM with k(x, y) = mean over modalities of exp(-gamma |x_m - y_m|^2 / d_m).

    d_m is the mean squared distance of two training samples. Where one of two samples lacks a
    modality, that modality's kernel is 0. Validation chooses gamma, one for all modalities, and C.
    The margins become probabilities by a softmax, whose scale is learnt from margins of training
    samples that their model has not seen (temperature scaling: Guo et al., ICML 2017).
    """

    most_rows = 5000  # the kernel of as many is 200 MB, and fitting grows faster than the square

    def choose(self, fit: Callable[[Setting], Fitted]) -> tuple[Setting, Fitted]:
        best = []
        for gamma in GAMMAS:
            penalty, fitted = best_penalty(partial(_fit_one, fit, gamma))
            best.append(({"gamma": gamma, "penalty": penalty}, fitted))
        return min(best, key=lambda pair: pair[1][0])

    def shares(
        self, learned: Inputs, labels: NDArray[np.int64], asked: Inputs, setting: Setting
    ) -> tuple[NDArray[np.int64], Matrix]:
        from scipy.special import log_softmax

        gram, others = _kernels(learned, asked, setting["gamma"])
        classes, places = np.unique(labels, return_inverse=True)
        penalty, weights = setting["penalty"], learned.weights
        margins = _margins(_fitted(gram, places, penalty, weights), others, len(classes))
        scale = _scale(_unseen_margins(gram, places, penalty, weights), places, weights)
        return classes, np.exp(log_softmax(scale * margins, axis=1))

    def numbers(self, learned: Inputs, y: Matrix, asked: Inputs, setting: Setting) -> Matrix:
        from sklearn.svm import SVR

        gram, others = _kernels(learned, asked, setting["gamma"])
        mean, spread = y.mean(0), y.std(0)
        spread[spread == 0] = 1.0
        columns = []
        for column in ((y - mean) / spread).T:
            model = SVR(kernel="precomputed", C=setting["penalty"])
            columns.append(model.fit(gram, column, learned.weights).predict(others))
        return np.stack(columns, 1) * spread + mean


def _fit_one(fit: Callable[[Setting], Fitted], gamma: float, penalty: float) -> Fitted:
    return fit({"gamma": gamma, "penalty": penalty})


def _kernels(learned: Inputs, asked: Inputs, gamma: float) -> tuple[Matrix, Matrix]:
    """Return the kernel of the samples to learn from with themselves and with others."""
    from sklearn.metrics.pairwise import rbf_kernel

    grams = []
    for others in (learned, asked):
        gram = np.zeros((len(others.present), len(learned.present)))
        for column, (x, y) in enumerate(zip(learned.parts, others.parts, strict=True)):
            there = learned.present[:, column]
            distance = 2 * x[there].var(0).sum() if there.any() else 0.0  # of two, on average
            both = others.present[:, column, None] & there
            gram += np.where(both, rbf_kernel(y, x, gamma / (distance or 1.0)), 0.0)
        grams.append(gram / len(learned.parts))
    return grams[0], grams[1]


def _fitted(gram: Matrix, labels: NDArray[np.int64], penalty: float, weights: Matrix | None) -> SVC:
    from sklearn.svm import SVC

    return SVC(kernel="precomputed", C=penalty).fit(gram, labels, weights)


def _margins(model: SVC, others: Matrix, classes: int) -> Matrix:
    """Return how far each sample lies on the side of each class, (n, K); never seen ones last."""
    margins = np.asarray(model.decision_function(others))
    if margins.ndim == 1:  # two classes
        margins = np.stack([-margins, margins], 1)
    result = np.repeat(margins.min(1, keepdims=True), classes, 1)
    result[:, model.classes_] = margins
    return result


def _unseen_margins(
    gram: Matrix, labels: NDArray[np.int64], penalty: float, weights: Matrix | None
) -> Matrix:
    """Return the margins (N, K) of each training sample by a model that has not seen it."""
    from sklearn.model_selection import KFold

    classes = int(labels.max()) + 1
    result = np.zeros((len(labels), classes))
    if len(labels) < 2 * PARTS:
        return result
    for rest, part in KFold(PARTS, shuffle=True, random_state=0).split(gram):
        if len(np.unique(labels[rest])) > 1:
            of_rest = None if weights is None else weights[rest]
            model = _fitted(gram[np.ix_(rest, rest)], labels[rest], penalty, of_rest)
            result[part] = _margins(model, gram[np.ix_(part, rest)], classes)
    return result


def _scale(margins: Matrix, labels: NDArray[np.int64], weights: Matrix | None) -> float:
    """Return the factor of the margins with the least cross-entropy."""
    from scipy.optimize import minimize_scalar
    from scipy.special import log_softmax

    def loss(log_scale: float) -> float:
        logs = log_softmax(np.exp(log_scale) * margins, axis=1)
        right = logs[np.arange(len(labels)), labels].clip(np.log(EDGE))
        return -float(right.mean() if weights is None else np.average(right, weights=weights))

    return float(np.exp(minimize_scalar(loss, bounds=(-4.0, 4.0), method="bounded").x))
