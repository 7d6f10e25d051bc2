"""Mean rule: average the modalities' logits or probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from fusionzoo.errors import check_choice
from fusionzoo.structures import Features, FusionOutput

from ..base import FUSIONS, equal_weights, present_mean
from ._base import LateFusion


@FUSIONS.register(
    family="late", paper="Kittler et al. 1998, TPAMI 20(3)", reads="pooled", synergy=False
)
class LateMean(LateFusion):
    """Average the logits or the probabilities of the present modalities.

    `space="logit"`: mean_m z_m; its softmax is the normalised geometric mean of the modalities'
    probabilities. `space="prob"`: log mean_m softmax(z_m); its cross-entropy is never above the
    mean of the modalities' cross-entropies.

    Missing: left out of the average.
    Pitfall: a weak modality counts as much as a strong one.
    Use when: you want a fixed-rule baseline for learned late fusions.

    Settings:
        space: average "logit" values or probabilities ("prob")

    Shapes:
        features[name].pooled: (B, dims[name])
        returns: embedding (B, dim), logits (B, K), unimodal {modality: (B, K)}, weights (B, M)
        equal
    """

    symmetric = True

    def __init__(
        self,
        dims: Mapping[str, int],
        dim: int,
        num_outputs: int,
        *,
        project: bool = True,
        space: Literal["logit", "prob"] = "logit",
    ) -> None:
        super().__init__(dims, dim, num_outputs, project=project)
        check_choice("space", space, ("logit", "prob"))
        self.space = space
        self.classes_only = space == "prob"

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        embedding, unimodal, present = self.unimodal_logits(features)
        if self.space == "logit":
            logits = present_mean(unimodal, present)
        else:
            floor = 1e-30  # keeps the logarithm finite for samples without any modality
            logits = present_mean(unimodal.softmax(-1), present).clamp(min=floor).log()
        return self.output(embedding, logits, unimodal, present, equal_weights(present, unimodal))
