"""Teach the fusion's answers from subsets of the modalities by its answer from all of them."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusionzoo.errors import check_choice
from fusionzoo.machine.distributed import gathered
from fusionzoo.model.fusion_model import FusionModel
from fusionzoo.model.loading import load
from fusionzoo.structures import FusionOutput, StepContext

from ._shared import SubsetDraws, fuse_quietly, fuse_subset
from .base import BALANCE, Balance, LossTerm, StrategyInputs, at_least_float32, presence


@BALANCE.register(
    family="loss",
    paper="Hinton et al. 2015, arXiv:1503.02531; Wei et al. 2023, CVPR, arXiv:2304.08028",
)
class SubsetDistill(Balance):
    """Distil the fusion's answer from all modalities into its answers from subsets.

    For each row a proper, non-empty subset S of its modalities is drawn uniformly; z_S = f(S), and
    z_T is the teacher's answer from all the row has, without a gradient. L = L_fusion + mu CE(z_S,
    y) + lambda tau^2 KL(softmax(z_T / tau) | softmax(z_S / tau)); several yes-or-no labels: the KL
    of each label's probability, summed; numbers: (z_T - z_S)^2, averaged. relation "mad": lambda
    sum_i w_i sum_j (G^S_ij - G^T_ij)^2 instead, G = X X' of the embeddings X of a batch, each row
    of G divided by its length, w_i the teacher's entropy over the sum of all. Subset passes are
    without dropout and cost the fusion, not the encoders. Differs from MMANet: the student is the
    same model; w_i weighs row i of G, in its code column i; no regulariser of weak combinations.

    Missing: the teacher has what the row has; a row with a single modality is left out.
    Pitfall: a bad teacher teaches its errors (`right_only`); "mad" sums over pairs of rows, so its
    size depends on the batch.
    Use when: modality dropout costs accuracy on complete samples, or labels are few.

    Settings:
        weight: weight lambda of the distillation, at least 0
        label_weight: weight mu of the subsets' own loss against the labels, at least 0
        temperature: temperature tau, above 0
        teacher: "self", the model as it is; "ema", the moving average of its fusion's weights; or
            the folder of a trained model whose encoders have the same widths
        decay: of the moving average per step, 0 to below 1
        relation: "logits", or "mad" to match similarities between rows (MMANet)
        right_only: whether only rows count in which the teacher is right (one class only)

    Shapes: logits (B, K), embeddings (B, D) -> losses (B,)
    """

    off_at_zero = ("weight", "label_weight")

    def __init__(
        self,
        inputs: StrategyInputs,
        *,
        weight: float = 1.0,
        label_weight: float = 1.0,
        temperature: float = 2.0,
        teacher: str = "self",
        decay: float = 0.99,
        relation: Literal["logits", "mad"] = "logits",
        right_only: bool = False,
        start: float = 0.0,
        end: float | None = None,
    ) -> None:
        super().__init__(inputs, start=start, end=end)
        self.require(weight >= 0, f"weight={weight:g}; it must be at least 0")
        self.require(label_weight >= 0, f"label_weight={label_weight:g}; it must be at least 0")
        self.require(temperature > 0, f"temperature={temperature:g}; it must be positive")
        self.require(0 <= decay < 1, f"decay={decay:g}; it must be in [0, 1)")
        self.require(len(self.widths) > 1, "it hides modalities, and the model has only one")
        check_choice("relation", relation, ("logits", "mad"))
        self.weight, self.label_weight, self.temperature = weight, label_weight, temperature
        self.decay, self.relation, self.right_only = decay, relation, right_only
        self.weighs_rows = relation == "logits"  # the other compares samples with each other
        self.require(
            relation == "logits" or inputs.model.targets is None,
            "relation=mad weighs rows by the entropy over classes, so the target must be one class",
        )
        if right_only:
            self.require_classes(inputs.targets)
        self.draws = SubsetDraws(len(inputs.targets), len(self.widths), inputs.seed)
        targets = inputs.model.targets
        self.tasks = (
            [("classification", self.fusion.num_outputs)]
            if targets is None
            else [(target.standard_kind(), max(1, target.width)) for target in targets]
        )
        self.average: nn.Module | None = None
        self._loaded: tuple[FusionModel, ...] = ()  # in a tuple, so that it is no submodule
        if teacher == "ema":
            self.average = deepcopy(inputs.model.fusion).requires_grad_(False)
        elif teacher != "self":
            self._loaded = (self._load_teacher(teacher),)
        self.shards = self.average is None
        self.raw_inputs = bool(self._loaded)

    def _load_teacher(self, folder: str) -> FusionModel:
        model = load(folder)
        for what, here, theirs in (
            ("modalities", list(self.widths), list(model.encoders)),
            ("outputs", self.fusion.num_outputs, model.fusion.num_outputs),
            ("embedding dimensions", self.fusion.dim, model.fusion.dim),
        ):
            needed = self.relation == "mad" or what != "embedding dimensions"
            self.require(
                here == theirs or not needed,
                f"the teacher {folder} has {what} {theirs}, the model {here}",
            )
        return model.requires_grad_(False).eval()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SubsetDistill:
        """Move a loaded teacher along to another device or precision."""
        for model in self._loaded:
            model._apply(fn)
        return super()._apply(fn, recurse)

    def extra_losses(self, context: StepContext) -> dict[str, LossTerm]:
        target, present = context.batch.target, presence(context.features)
        assert target is not None
        keep, mask = self.draws.proper(present, context.rows, int(context.epoch))
        student = fuse_subset(self.fusion, context.features, keep)
        terms = {}
        if self.label_weight:
            values = context.criterion(student.logits, target)
            terms[f"{self.name}/labels"] = LossTerm(values, mask, self.label_weight)
        if self.weight:
            teacher = self.teach(context)
            if self.right_only:
                mask = mask & (teacher.logits.argmax(-1) == target)
            terms[f"{self.name}/teacher"] = self.distil(student, teacher, mask)
        return terms

    @torch.no_grad()
    def teach(self, context: StepContext) -> FusionOutput:
        """Return the teacher's output from all that each row has."""
        if self._loaded:
            return self._loaded[0](context.batch)
        return fuse_quietly(self.average or self.fusion, context.features)

    def distil(self, student: FusionOutput, teacher: FusionOutput, mask: Tensor) -> LossTerm:
        """Return the loss between student and teacher."""
        z_student, z_teacher = (at_least_float32(x.logits) for x in (student, teacher))
        if self.relation == "logits":
            widths = [width for _, width in self.tasks]
            pairs = zip(z_student.split(widths, 1), z_teacher.split(widths, 1), strict=True)
            values = torch.stack(
                [
                    divergence(kind, z, goal, self.temperature)
                    for (kind, _), (z, goal) in zip(self.tasks, pairs, strict=True)
                ]
            )
            return LossTerm(values.sum(0), mask, self.weight)
        left, right, z, rows = (
            gathered(x, self.world)
            for x in (student.embedding, teacher.embedding, z_teacher, mask.to(z_teacher))
        )
        chosen = rows > 0.5
        values = margin_aware(*(at_least_float32(x[chosen]) for x in (left, right, z)))
        if not len(values):
            values = 0.0 * left.sum()[None]
        # A term is a mean over rows, and this one a sum.
        return LossTerm.everywhere(values * len(values), self.weight)

    @torch.no_grad()
    def after_step(self) -> None:
        if self.average is None:
            return
        pairs = zip(self.average.parameters(), self.fusion.parameters(), strict=True)
        for mean, parameter in pairs:
            mean.lerp_(parameter.to(mean), 1 - self.decay)
        for averaged, buffer in zip(self.average.buffers(), self.fusion.buffers(), strict=True):
            averaged.copy_(buffer)


def divergence(kind: str, z: Tensor, goal: Tensor, temperature: float) -> Tensor:
    """Return how far a student's logits are from a teacher's: (B, K), (B, K) -> (B,)."""
    if kind == "regression":
        return (z - goal).square().mean(1)
    z, goal = z / temperature, goal / temperature
    if kind == "classification":
        log_p = goal.log_softmax(-1)
        kl = log_p.exp() * (log_p - z.log_softmax(-1))
    else:  # labels or levels: a yes or no for each logit
        yes = goal.sigmoid() * (F.logsigmoid(goal) - F.logsigmoid(z))
        kl = yes + (-goal).sigmoid() * (F.logsigmoid(-goal) - F.logsigmoid(-z))
    return temperature**2 * kl.sum(1)


def margin_aware(student: Tensor, teacher: Tensor, logits: Tensor) -> Tensor:
    """Return w_i sum_j (G^S_ij - G^T_ij)^2: (n, D), (n, D), the teacher's logits (n, K) -> (n,)."""
    left, right = (F.normalize(x @ x.T, dim=1) for x in (student, teacher))
    log_p = logits.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(1)
    total = entropy.sum()
    uniform = torch.full_like(entropy, 1 / max(len(entropy), 1))
    weights = torch.where(total > 0, entropy / total.clamp(min=1e-30), uniform)
    return weights * (left - right).square().sum(1)
