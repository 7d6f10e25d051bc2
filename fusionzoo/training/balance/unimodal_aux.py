"""Unimodal auxiliary losses: each modality also has to answer alone."""

from __future__ import annotations

from collections.abc import Mapping

from fusionzoo.structures import StepContext

from ._heads import ModalityHeads
from .base import BALANCE, Balance, LossTerm, StrategyInputs


@BALANCE.register(family="loss", paper="Du et al. 2023, ICML, arXiv:2305.01233")
class UnimodalAux(Balance):
    """Add the loss of a linear head on each modality's own features.

    L = L_fusion + sum_m lambda_m mean over rows with m of CE(head_m(x_m), y), x_m the pooled
    features. The gradient reaches the encoders, unlike that of the heads that training always
    watches the modalities with. A fusion that votes keeps its own classifiers: these are others.

    Missing: a row counts for the modalities that it has; none at all gives 0.
    Pitfall: a large lambda trains good single experts that the fusion no longer has to join.
    Use when: the fusion listens to one modality and the other encoders stop learning.

    Shapes: features[name].pooled (B, D) -> a loss per row and modality (B,)
    """

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

    def active(self, context: StepContext) -> bool:
        return bool(self.weights) and super().active(context)

    def extra_losses(self, context: StepContext) -> dict[str, LossTerm]:
        return self.heads.losses(context, self.name, self.weights)
