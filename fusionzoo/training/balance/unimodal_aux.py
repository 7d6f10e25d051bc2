"""Unimodal auxiliary losses: each modality must also predict the target alone."""

from __future__ import annotations

from collections.abc import Mapping

from fusionzoo.structures import StepContext

from ._shared import ModalityHeads
from .base import BALANCE, Balance, LossTerm, StrategyInputs


@BALANCE.register(family="loss", paper="Du et al. 2023, ICML, arXiv:2305.01233")
class UnimodalAux(Balance):
    """Add the loss of a linear head on each modality's features.

    L = L_fusion + sum_m lambda_m mean over rows with m of CE(head_m(x_m), y), x_m the pooled
    features. The gradients reach the encoders, unlike those of the heads by which training always
    monitors the modalities. The heads are separate from the classifiers of a late fusion.

    Missing: a row counts for the modalities it has.
    Pitfall: a large lambda trains good unimodal classifiers instead of features that complement
    each other.
    Use when: the fusion relies on one modality and the other encoders stop learning.

    Settings:
        weight: weight lambda of the losses, at least 0; one number, or one per modality (those not
            named: 0)

    Shapes: features[name].pooled (B, D) -> a loss per row and modality (B,)
    """

    encoders_only = True
    raw_inputs = False
    off_at_zero = ("weights",)

    def __init__(
        self,
        inputs: StrategyInputs,
        *,
        weight: float | Mapping[str, float] = 1.0,
        start: float = 0.0,
        end: float | None = None,
    ) -> None:
        super().__init__(inputs, start=start, end=end)
        weights = self.per_modality("weight", weight)
        self.weights = {name: x for name, x in weights.items() if x}
        self.heads = ModalityHeads(self.widths, self.fusion.num_outputs)

    def extra_losses(self, context: StepContext) -> dict[str, LossTerm]:
        return self.heads.losses(context, self.name, self.weights)
