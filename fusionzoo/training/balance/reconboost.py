"""ReconBoost: train modalities in stages, each on the errors of the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusionzoo.structures import StepContext, evaluating, keep_only

from .base import BALANCE, Balance, LossTerm, StrategyInputs, at_least_float32, pooled_of


@BALANCE.register(family="schedule", paper="Hua et al. 2024, ICML, arXiv:2405.09321")
class ReconBoost(Balance):
    """Train one modality for some epochs with the others frozen, then all of them together.

    Stage s trains modality m = s mod M for `epochs` epochs. With z_n = f(only n), p = softmax(z)
    and Phi = sum of the other present z_n, its loss is
    -(1/K) sum_c y_c (lambda1 - lambda2 softmax(Phi)_c) log p_mc, from the second stage on +
    agreement mean_c (p_mc - p_prev,c)^2, prev the modality of the previous stage. Then follow
    `rectify` epochs of the fusion's own loss on all modalities. Evaluation is unchanged. Differs
    from the paper: the fusion's logits replace boost_rate sum_m z_m in rectification and at test
    time. Differs from the authors' code: only the other modality's side of the agreement term is
    detached; the code detaches both, which makes its gradient zero. In the code, modalities that
    were not trained yet are not in Phi, and the first stage has the weight lambda1 - lambda2.

    Missing: a row takes part in the stages of the modalities it has; absent ones are not in Phi.
    Pitfall: parameters of the fusion that all modalities share change in every stage.
    Use when: one modality dominates joint training and there is time for many epochs.

    Settings:
        epochs: epochs per stage with one modality, at least 1
        rectify: epochs per stage with all modalities, at least 0
        lambda1: weight of the cross-entropy where the others are wrong, at least `lambda2`
        lambda2: decrease of that weight where the others predict the class with certainty, at
            least 0
        agreement: weight of the agreement term, at least 0

    Shapes: z_m (B, K), Phi (B, K) -> a loss per row (B,)
    """

    raw_inputs = False
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
        """Return the number of the stage, and whether it is in its rectification epochs."""
        stage, epoch_in_stage = divmod(context.epoch - self.start, self.epochs + self.rectify)
        return int(stage), epoch_in_stage >= self.epochs

    def turns(self, context: StepContext) -> Sequence[str | None]:
        stage, rectifying = self.stage(context)
        return (None,) if rectifying else (list(self.widths)[stage % len(self.widths)],)

    def main_loss(self, context: StepContext, loss: LossTerm) -> LossTerm:
        name, target = context.turn, context.batch.target
        if name is None:
            return loss
        assert target is not None
        logits = at_least_float32(self.fusion(keep_only(context.features, name)).logits)
        present = pooled_of(context.features, name)[1]
        others = {n: self._frozen_logits(context, n) for n in self.widths if n != name}
        phi = torch.zeros_like(logits) + sum(others.values())
        certainty = phi.softmax(-1).gather(1, target[:, None])[:, 0]
        row_weights = self.lambda1 - self.lambda2 * certainty
        values = row_weights * context.criterion(logits, target) / logits.shape[1]
        stage = self.stage(context)[0]
        if stage and others:
            previous = list(self.widths)[(stage - 1) % len(self.widths)]
            gap = (logits.softmax(-1) - others[previous].softmax(-1)).square().mean(1)
            values = values + self.agreement * gap.where(
                pooled_of(context.features, previous)[1], 0
            )
        # The fused loss with weight 0, because under DDP every parameter needs a gradient.
        return loss._replace(values=values + 0.0 * loss.values, mask=loss.mask & present)

    @torch.no_grad()
    def _frozen_logits(self, context: StepContext, name: str) -> Tensor:
        """Return z of a modality that is not trained now, 0 where it is absent: (B, K)."""
        with evaluating(self.fusion):
            logits = at_least_float32(self.fusion(keep_only(context.features, name)).logits)
        return logits.where(pooled_of(context.features, name)[1][:, None], 0)
