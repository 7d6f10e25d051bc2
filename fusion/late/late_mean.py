"""Mean of the modalities' votes: the fixed rule that learned fusions have to beat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from fusionzoo.structures import Features, FusionOutput

from ..base import FUSIONS, check_choice, equal_weights, present_mean
from ._base import LateFusion


@FUSIONS.register(
    family="late", paper="Kittler et al. 1998, TPAMI 20(3)", reads="pooled", synergy=False
)
class LateMean(LateFusion):
    """Average each modality's logits, or its probabilities, over what is present.

    `space="logit"`: mean_m z_m, whose softmax is the normalised geometric mean of the modalities'.
    `space="prob"`: log mean_m softmax(z_m), never worse than the mean of their cross-entropies.

    Missing: left out of the average.
    Pitfall: a weak modality counts as much as a strong one.
    Use when: you want the fixed rule that every learned fusion has to beat.

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
        space: Literal["logit", "prob"] = "logit",
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        check_choice("space", space, ("logit", "prob"))
        self.space = space
        self.classes_only = space == "prob"

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        embedding, votes, present = self.votes(features)
        if self.space == "logit":
            logits = present_mean(votes, present)
        else:
            floor = 1e-30  # keeps the logarithm finite where nothing is present
            logits = present_mean(votes.softmax(-1), present).clamp(min=floor).log()
        return self.output(embedding, logits, votes, present, equal_weights(present, votes))
