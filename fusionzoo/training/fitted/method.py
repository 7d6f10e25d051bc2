"""What every fitted model does: choose its setting by validation, answer each kind of target."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fusionzoo.targets import Number, Target

from ..multitask import Tasks

EDGE = 1e-7  # probabilities are kept this far from 0 and 1
Matrix = NDArray[np.float64]
Setting = Mapping[str, float]  # what validation chooses; stored with the results
Fitted = TypeVar("Fitted", bound=tuple[Any, ...])  # the validation loss comes first


class Inputs(NamedTuple):
    """What a fitted model reads of N samples."""

    parts: tuple[Matrix, ...]  # (N, D_m) of each modality, zeros where a sample lacks it
    present: NDArray[np.bool_]  # (N, M) which modalities a sample has
    weights: Matrix | None = None  # (N,) how much each counts, above 0, mean 1; None: all alike

    def of(self, rows: NDArray[np.bool_]) -> Inputs:
        """Return some of the samples."""
        weights = None if self.weights is None else self.weights[rows]
        return Inputs(tuple(x[rows] for x in self.parts), self.present[rows], weights)

    def moments(self, place: int) -> tuple[Matrix, Matrix]:
        """Return mean and deviation, 1 where there is none, of the columns of a modality."""
        rows = self.parts[place][self.present[:, place]]
        if not len(rows):
            return np.zeros(1), np.ones(1)
        deviation = rows.std(0)
        return rows.mean(0), np.where(deviation > 0, deviation, 1)

    @property
    def side_by_side(self) -> Matrix:
        """All modalities' vectors, (N, sum of D_m)."""
        return np.concatenate(self.parts, 1)


class Method(ABC):
    """A kind of model; it has no seed and no state of its own."""

    most_rows: ClassVar[int | None] = None  # training samples beyond which it is not run
    weighs_rows: ClassVar[bool] = True  # whether it can weigh its samples

    @abstractmethod
    def choose(self, fit: Callable[[Setting], Fitted]) -> tuple[Setting, Fitted]:
        """Return the setting with the least validation loss, and what `fit` returned for it."""

    @abstractmethod
    def shares(
        self, learned: Inputs, labels: NDArray[np.int64], asked: Inputs, setting: Setting
    ) -> tuple[NDArray[np.int64], Matrix]:
        """Learn from labels (N,) of two classes or more; return them, and probabilities (n, K)."""

    @abstractmethod
    def numbers(self, learned: Inputs, y: Matrix, asked: Inputs, setting: Setting) -> Matrix:
        """Learn from numbers (N, C), in the data's units; return those of others, (n, C)."""

    def answer(
        self, tasks: Tasks, learned: Inputs, labels: Tensor, asked: Inputs, setting: Setting
    ) -> Tensor:
        """Fit each target on its labelled samples; return the logits (n, K) of others."""
        if tasks.plain:
            width = tasks.first.target.width
            parts = [self._classify(learned, labels.numpy(), width, asked, setting)]
        else:
            parts = [
                self._answer_one(task.target, learned, label.numpy(), asked, setting)  # type: ignore[arg-type]
                for task, label in zip(tasks.tasks, labels.split(tasks.columns, 1), strict=True)
            ]
        return torch.from_numpy(np.concatenate(parts, 1)).float()

    def _answer_one(
        self, target: Target, learned: Inputs, labels: Matrix, asked: Inputs, setting: Setting
    ) -> Matrix:
        labelled = np.asarray(~np.isnan(labels).any(1), np.bool_)
        learned, y = learned.of(labelled), labels[labelled]
        kind = target.standard_kind()
        if isinstance(target, Number):
            predicted = self.numbers(learned, y, asked, setting)
            return target.logits_of(torch.from_numpy(predicted)).numpy()
        if kind == "multilabel":
            pairs = [self._classify(learned, column, 2, asked, setting) for column in y.T]
            return np.stack([logits[:, 1] - logits[:, 0] for logits in pairs], 1)
        logits = self._classify(learned, y[:, 0], len(target.classes), asked, setting)
        return logits if kind == "classification" else _above(np.exp(logits))

    def _classify(
        self,
        learned: Inputs,
        labels: NDArray[np.generic],
        width: int,
        asked: Inputs,
        setting: Setting,
    ) -> Matrix:
        """Return log-probabilities (n, width); classes that the labels lack get the least."""
        result = np.full((len(asked.present), width), np.log(EDGE))
        whole = labels.astype(np.int64)
        classes = np.unique(whole)
        if len(classes) == 1:
            result[:, classes[0]] = 0.0
            return result
        classes, shares = self.shares(learned, whole, asked, setting)
        result[:, classes] = np.log(shares.clip(EDGE))
        return result


def least(settings: Sequence[Setting], fit: Callable[[Setting], Fitted]) -> tuple[Setting, Fitted]:
    """Return the setting with the least validation loss, and what `fit` returned for it."""
    fitted = [(setting, fit(setting)) for setting in settings]
    return min(fitted, key=lambda pair: pair[1][0])


def _above(shares: Matrix) -> Matrix:
    """Turn probabilities of levels into logits of P(level > k | level >= k): (N, K) -> (N, K-1)."""
    at_least = np.flip(np.flip(shares, 1).cumsum(1), 1)
    chance = (at_least[:, 1:] / at_least[:, :-1].clip(EDGE)).clip(EDGE, 1 - EDGE)
    return np.asarray(np.log(chance) - np.log1p(-chance), np.float64)
