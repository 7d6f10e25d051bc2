"""Uni-modal teachers: encoders that were trained alone keep each modality's features in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fusionzoo.encoders import Encoder
from fusionzoo.errors import FusionZooError
from fusionzoo.model import encode_rows, load
from fusionzoo.structures import StepContext

from .base import BALANCE, Balance, LossTerm, StrategyInputs, at_least_float32, pooled_of


@BALANCE.register(family="loss", paper="Du et al. 2023, ICML, arXiv:2305.01233")
class UMT(Balance):
    """Pull each encoder's features towards those of a frozen teacher of that modality.

    L = L_fusion + sum_m lambda_m mean over rows with m of |x_m - teacher_m|^2 / D_m. `teachers`
    maps a modality to a run or a model folder that holds an encoder of it; a modality without a
    teacher learns as it would. Teachers see what the student sees, in evaluation mode, and are
    part of neither checkpoint nor optimiser. Differs from the paper: mean over D, so that the
    weight does not depend on the width; any fusion.

    Missing: such rows do not count.
    Pitfall: the teacher's width must be the student's; squares summed over D drown the task.
    Use when: a modality alone learns better features than it does in company.

    Shapes: features[name].pooled (B, D) -> a loss per row and teacher (B,)
    """

    def __init__(
        self,
        inputs: StrategyInputs,
        *,
        teachers: Mapping[str, str] | None = None,
        weight: float | Mapping[str, float] = 1.0,
        start: float = 0.0,
        end: float | None = None,
    ) -> None:
        super().__init__(inputs, start=start, end=end)
        self.weights = self.per_modality("weight", weight)
        some = next(iter(self.widths))
        trains = "train one by `python train.py ... --data.modalities {0} --out runs/{0}`"
        self.require(
            bool(teachers),
            f"it needs teachers, --balance_settings.umt.teachers.{some} runs/{some};"
            f" {trains.format(some)}",
        )
        self.per_modality("teachers", dict.fromkeys(teachers or {}, 1.0))
        self.teachers: dict[str, Encoder] = {}  # in a plain dict: no state, no parameters
        for name, folder in (teachers or {}).items():
            self.teachers[name] = self._teacher(name, str(folder), trains.format(name))

    def _teacher(self, name: str, folder: str, trains: str) -> Encoder:
        try:
            model = load(folder)
        except FusionZooError as error:
            raise FusionZooError(f"umt: teacher of {name!r}: {error}; {trains}") from error
        has = ", ".join(model.encoders)
        self.require(name in model.encoders, f"{folder} has no {name!r}, only {has}; {trains}")
        teacher = model.encoders[name]
        assert isinstance(teacher, Encoder)
        self.require(
            teacher.dim == self.widths[name],
            f"the teacher {folder} makes features of width {teacher.dim}, the encoder of {name!r}"
            f" of width {self.widths[name]}: give both the same settings",
        )
        return teacher.requires_grad_(False).eval()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> UMT:
        """Take the teachers along to another device or precision."""
        for teacher in self.teachers.values():
            teacher._apply(fn)
        return super()._apply(fn, recurse)

    def active(self, context: StepContext) -> bool:
        return any(self.weights[name] for name in self.teachers) and super().active(context)

    def extra_losses(self, context: StepContext) -> dict[str, LossTerm]:
        names, found = list(context.features), {}
        inputs: Mapping[str, Any] = context.batch.inputs
        for name, teacher in self.teachers.items():
            x, present = pooled_of(context.features, name)
            column = context.batch.present[:, names.index(name)]
            with torch.no_grad():
                taught = encode_rows(teacher, inputs[name], column).pooled
            taught = at_least_float32(torch.where(present[:, None], taught, 0))
            values = (at_least_float32(x) - taught).square().mean(1)
            found[f"umt/{name}"] = LossTerm(values, present, self.weights[name])
        return found
