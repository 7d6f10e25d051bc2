"""Confidence-weighted votes: whoever is surer of this sample counts more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import Tensor

from fusionzoo.structures import Features, FusionOutput

from ..base import FUSIONS, check_choice, masked_softmax
from ._base import VotersAlone


@FUSIONS.register(
    family="late", paper="Zhang et al. 2024, arXiv:2311.10707", reads="pooled", synergy=False
)
class LateConfidence(VotersAlone):
    """Weigh each modality's vote by how sure it is of this sample.

    w = softmax over present m of kappa c_m, c_m = -entropy, largest probability, or the margin
    between the two largest; logits = sum_m w_m z_m, or log sum_m w_m softmax(z_m) for
    `space="prob"`. The test-time rule of MLA; each classifier is trained on its own cross-entropy.

    Missing: weight 0.
    Pitfall: entropies grow with the number of classes, and a badly calibrated modality shouts.
    Use when: which modality is reliable changes from sample to sample.

    Shapes:
        features[name].pooled: (B, dims[name])
        returns: embedding (B, dim), logits (B, K), unimodal {modality: (B, K)}, weights (B, M)
    """

    classes_only = True
    symmetric = True

    def __init__(
        self,
        dims: Mapping[str, int],
        dim: int,
        num_outputs: int,
        *,
        kappa: float = 1.0,
        measure: Literal["entropy", "max", "margin"] = "entropy",
        space: Literal["logit", "prob"] = "logit",
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        check_choice("measure", measure, ("entropy", "max", "margin"))
        check_choice("space", space, ("logit", "prob"))
        self.kappa, self.measure, self.space = kappa, measure, space

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        embedding, votes, present = self.votes(features)
        weights = masked_softmax(self.kappa * self.confidence(votes), present)
        if self.space == "logit":
            logits = (weights[..., None] * votes).sum(1)
        else:
            shares = (weights[..., None] * votes.softmax(-1)).sum(1)
            logits = shares.clamp(min=1e-30).log()
        return self.output(embedding, logits, votes, present, weights)

    def confidence(self, votes: Tensor) -> Tensor:
        """Return how sure each vote is: (B, M, K) -> (B, M)."""
        shares = votes.softmax(-1)
        if self.measure == "entropy":
            return (shares * votes.log_softmax(-1)).sum(-1)
        top = shares.topk(min(2, self.num_outputs), dim=-1).values
        return top[..., 0] if self.measure == "max" else top[..., 0] - top[..., -1]
