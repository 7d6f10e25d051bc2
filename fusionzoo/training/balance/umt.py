"""Uni-modal teachers: distil encoders that were trained on one modality only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fusionzoo.encoders import Encoder
from fusionzoo.errors import FusionZooError
from fusionzoo.model.fusion_model import encode_rows
from fusionzoo.model.loading import load
from fusionzoo.structures import StepContext

from .base import BALANCE, Balance, LossTerm, StrategyInputs, at_least_float32, pooled_of


@BALANCE.register(family="loss", paper="Du et al. 2023, ICML, arXiv:2305.01233")
class UMT(Balance):
    """Pull each encoder's features towards those of a frozen teacher of that modality.

    L = L_fusion + sum_m lambda_m mean over rows with m of |x_m - teacher_m|^2 / D_m. Teachers get
    the same inputs as the students, run in evaluation mode, and are neither in checkpoints nor in
    the optimiser. Differs from the paper: any fusion, and the mean over D_m, so that the weight
    does not depend on the width.

    Missing: such rows do not count.
    Pitfall: teacher and student must have the same width.
    Use when: an encoder learns better features when its modality is trained alone.

    Settings:
        teachers: modality -> run or model folder with an encoder of it, at least one; a modality
            without a teacher is trained as usual
        weight: weight lambda of the loss; one number, or one per modality (those not named: 0)

    Shapes: features[name].pooled (B, D) -> a loss per row and teacher (B,)
    """

    encoders_only = True

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
        example = next(iter(self.widths))
        advice = "train one by `python train.py ... --data.modalities {0} --out runs/{0}`"
        self.require(
            bool(teachers),
            f"it needs teachers, --balance_settings.umt.teachers.{example} runs/{example};"
            f" {advice.format(example)}",
        )
        self.per_modality("teachers", dict.fromkeys(teachers or {}, 1.0))
        self.teachers: dict[str, Encoder] = {}  # a plain dict keeps them out of state and optimiser
        for name, folder in (teachers or {}).items():
            self.teachers[name] = self._load_teacher(name, str(folder), advice.format(name))

    def _load_teacher(self, name: str, folder: str, advice: str) -> Encoder:
        """Load the frozen encoder of a modality from a run or model folder."""
        try:
            model = load(folder)
        except FusionZooError as error:
            raise FusionZooError(f"umt: teacher of {name!r}: {error}; {advice}") from error
        available = ", ".join(model.encoders)
        self.require(
            name in model.encoders, f"{folder} has no {name!r}, only {available}; {advice}"
        )
        teacher = model.encoders[name]
        assert isinstance(teacher, Encoder)
        self.require(
            teacher.dim == self.widths[name],
            f"the teacher {folder} makes features of width {teacher.dim}, the encoder of {name!r}"
            f" of width {self.widths[name]}: give both the same settings",
        )
        return teacher.requires_grad_(False).eval()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> UMT:
        """Move the teachers along to another device or precision."""
        for teacher in self.teachers.values():
            teacher._apply(fn)
        return super()._apply(fn, recurse)

    def active(self, context: StepContext) -> bool:
        return any(self.weights[name] for name in self.teachers) and super().active(context)

    def extra_losses(self, context: StepContext) -> dict[str, LossTerm]:
        names, terms = list(context.features), {}
        inputs: Mapping[str, Any] = context.batch.inputs
        for name, teacher in self.teachers.items():
            x, present = pooled_of(context.features, name)
            column = context.batch.presence()[:, names.index(name)]
            with torch.no_grad():
                goal = encode_rows(teacher, inputs[name], column).pooled
            goal = at_least_float32(torch.where(present[:, None], goal, 0))
            values = (at_least_float32(x) - goal).square().mean(1)
            terms[f"umt/{name}"] = LossTerm(values, present, self.weights[name])
        return terms
