"""ReconBoost: modalities learn in stages, each what the others still get wrong."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusionzoo.model import quiet
from fusionzoo.structures import StepContext

from .base import BALANCE, Balance, LossTerm, StrategyInputs, at_least_float32, keep_only, pooled_of


@BALANCE.register(family="schedule", paper="Hua et al. 2024, ICML, arXiv:2405.09321")
class ReconBoost(Balance):
    """Boost: train one modality for some epochs against the frozen rest, then all together.

    Stage s trains modality m = s mod M for `epochs`; with z_n = f(only n), p = softmax(z) and
    Phi = sum of the other z_n that are present, its loss is
    -(1/K) sum_c y_c (lambda1 - lambda2 softmax(Phi)_c) log p_mc, and from the second stage on
    + agreement mean_c (p_mc - p_prev,c)^2, prev the modality of the stage before. Then `rectify`
    epochs of the fusion's own loss on everything. The fusion's own answer takes the place of
    boost_rate sum_m z_m in rectification and at test time, so evaluation is as without it.
    Differs from the reference: it detaches both sides of the agreement, whose gradient is then
    zero; here only the other modality's.

    Missing: a row takes part in the stages of the modalities it has, and has no vote in Phi else.
    Pitfall: parameters that all modalities share in the fusion move in every stage.
    Use when: joint training is won by one modality, and there are epochs to spend (8 per stage).

    Shapes: z_m (B, K), Phi (B, K) -> a loss per row (B,)
    """

    surgery = True

    def __init__(
        self,
        inputs: StrategyInputs,
        *,
        epochs: int = 4,
        rectify: int = 4,
        lambda1: float = 5.0,
        lambda2: float = 1.0,
        agreement: float = 0.5,
        start: float = 0.0,
        end: float | None = None,
    ) -> None:
        super().__init__(inputs, start=start, end=end)
        self.require(epochs >= 1, f"epochs={epochs}; a stage takes at least 1")
        self.require(rectify >= 0, f"rectify={rectify}; it must be at least 0")
        self.require_classes(inputs.targets)
        self.epochs, self.rectify = epochs, rectify
        self.lambda1, self.lambda2, self.agreement = lambda1, lambda2, agreement

    def stage(self, context: StepContext) -> tuple[int, bool]:
        """Return the number of the stage, and whether everything is being rectified."""
        stage, place = divmod(context.epoch - self.start, self.epochs + self.rectify)
        return int(stage), place >= self.epochs

    def turns(self, context: StepContext) -> Sequence[str | None]:
        stage, rectifying = self.stage(context)
        return (None,) if rectifying else (list(self.widths)[stage % len(self.widths)],)

    def main_loss(self, context: StepContext, loss: LossTerm) -> LossTerm:
        name, target = context.turn, context.batch.target
        if name is None:
            return loss
        assert target is not None
        own = at_least_float32(self.fusion(keep_only(context.features, name)).logits)
        present = pooled_of(context.features, name)[1]
        others = {n: self._frozen(context, n) for n in self.widths if n != name}
        rest = torch.zeros_like(own) + sum(others.values())
        sure = rest.softmax(-1).gather(1, target[:, None])[:, 0]
        values = (
            (self.lambda1 - self.lambda2 * sure) * context.criterion(own, target) / own.shape[1]
        )
        stage = self.stage(context)[0]
        if stage and others:
            before = list(self.widths)[(stage - 1) % len(self.widths)]
            gap = (own.softmax(-1) - others[before].softmax(-1)).square().mean(1)
            values = values + self.agreement * gap.where(pooled_of(context.features, before)[1], 0)
        # The fused loss with weight 0: under DDP every parameter must have a gradient.
        return loss._replace(values=values + 0.0 * loss.values, mask=loss.mask & present)

    @torch.no_grad()
    def _frozen(self, context: StepContext, name: str) -> Tensor:
        """Return z of a modality that does not learn now, 0 where it is absent: (B, K)."""
        with quiet(self.fusion):
            logits = at_least_float32(self.fusion(keep_only(context.features, name)).logits)
        return logits.where(pooled_of(context.features, name)[1][:, None], 0)
