"""A ranking loss: with more modalities the fusion must not do worse than with fewer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from fusionzoo.errors import check_choice
from fusionzoo.structures import StepContext

from ._shared import SubsetDraws, fuse_subset
from .base import BALANCE, Balance, LossTerm, StrategyInputs, at_least_float32, presence


@BALANCE.register(
    family="loss",
    paper="Li et al. 2025 (SimMLM), ICCV, arXiv:2507.19264; Ma et al. 2023 (CML), ICML,"
    " arXiv:2306.01265",
)
class MoreFewer(Balance):
    """Penalise rows on which the fusion does worse with more modalities than with fewer.

    For nested subsets S of A of a row's modalities, on "loss": R = max(0, l(A) - l(S)), l the loss
    against the labels; on "confidence": R = max(0, max_c p_S - max_c p_A), leaving out rows where S
    is right and A wrong. L = L_fusion + mean l(S) + alpha mean R. A is what the row has and S a
    subset drawn uniformly, or with `chain` S_1 in S_2 ... in S_P adds a modality at a time in
    random order, R and l(S) averaged over the P - 1 steps. All of these passes, that of A too, are
    without dropout and cost the fusion, not the encoders. Differs from CML's code, which sums R
    over rows and steps, and averages l over A and all S.

    Missing: a row with fewer than two modalities is left out.
    Pitfall: R also raises l(S), alpha > 1 would unlearn the subsets; `stop_subset` prevents it.
    Ordered confidences calibrate, and make no answer right.
    Use when: adding a weak or noisy modality makes predictions worse on some rows.

    Settings:
        on: "loss", or "confidence" for one class for each sample
        alpha: weight of R, at least 0
        subset_loss: weight of the loss l(S) of the subsets, at least 0 (SimMLM: 1, CML: 0)
        chain: whether to compare adjacent subsets of a random chain
        stop_subset: whether R leaves l(S), or the confidence in S, as it is (papers: False)

    Shapes: logits (B, K) of each subset -> R (B,)
    """

    raw_inputs = False
    off_at_zero = ("alpha", "subset_loss")

    def __init__(
        self,
        inputs: StrategyInputs,
        *,
        on: Literal["loss", "confidence"] = "loss",
        alpha: float = 0.1,
        subset_loss: float = 1.0,
        chain: bool = False,
        stop_subset: bool = True,
        start: float = 0.0,
        end: float | None = None,
    ) -> None:
        super().__init__(inputs, start=start, end=end)
        check_choice("on", on, ("loss", "confidence"))
        self.require(alpha >= 0, f"alpha={alpha:g}; it must be at least 0")
        self.require(subset_loss >= 0, f"subset_loss={subset_loss:g}; it must be at least 0")
        self.require(len(self.widths) > 1, "it hides modalities, and the model has only one")
        if on == "confidence":
            self.require_classes(inputs.targets)
        self.on, self.alpha, self.subset_loss = on, alpha, subset_loss
        self.chain, self.stop_subset = chain, stop_subset
        self.draws = SubsetDraws(len(inputs.targets), len(self.widths), inputs.seed)

    def extra_losses(self, context: StepContext) -> dict[str, LossTerm]:
        present = presence(context.features)
        drawable = present.sum(1) > 1
        nested, steps = self.nested(present, context)
        logits = [
            at_least_float32(fuse_subset(self.fusion, context.features, keep).logits)
            for keep in nested
        ]
        pairs = pairwise(logits)
        violations = [self.violation(fewer, more, context) for fewer, more in pairs]
        terms = {}
        if self.subset_loss:
            assert context.batch.target is not None
            losses = [context.criterion(x, context.batch.target) for x in logits[:-1]]
            values = average(losses, steps)
            terms[f"{self.name}/subsets"] = LossTerm(values, drawable, self.subset_loss)
        if self.alpha:
            values = average([value.where(mask, 0) for value, mask in violations], steps)
            counted = torch.stack([mask for _, mask in violations])
            mask = drawable & (counted & steps).any(0)
            terms[f"{self.name}/ranking"] = LossTerm(values, mask, self.alpha)
        return terms

    def nested(self, present: Tensor, context: StepContext) -> tuple[list[Tensor], Tensor]:
        """Return nested subsets, the last with all that a row has, and which steps between them
        each row has: masks (B, M), steps (number of subsets - 1, B) bool."""
        epoch = int(context.epoch)
        if not self.chain:
            keep, drawable = self.draws.proper(present, context.rows, epoch)
            return [keep, present], drawable[None]
        places, counts = self.draws.places(present, context.rows, epoch), present.sum(1)
        sizes = range(1, present.shape[1] + 1)
        steps = torch.stack([size < counts for size in sizes[:-1]])
        return [present & (places < size) for size in sizes], steps

    def violation(self, fewer: Tensor, more: Tensor, context: StepContext) -> tuple[Tensor, Tensor]:
        """Return R and the rows that count, from the logits of two subsets: (B,), (B,) bool."""
        target = context.batch.target
        assert target is not None
        if self.on == "loss":
            less, greater = context.criterion(fewer, target), context.criterion(more, target)
            mask = torch.ones_like(less, dtype=torch.bool)
        else:  # a lower confidence with more modalities
            less, greater = (-x.softmax(-1).amax(-1) for x in (fewer, more))
            mask = ~((fewer.argmax(-1) == target) & (more.argmax(-1) != target))
        if self.stop_subset:
            less = less.detach()
        return (greater - less).relu(), mask


def average(values: Sequence[Tensor], steps: Tensor) -> Tensor:
    """Average values (B,) over the steps that each row has, bool (S, B)."""
    return torch.stack(list(values)).where(steps, 0).sum(0) / steps.sum(0).clamp(min=1)
