"""Confidence weighting: modalities that are more certain about a sample count more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import Tensor

from fusionzoo.errors import check_choice
from fusionzoo.structures import Features, FusionOutput

from ..base import FUSIONS, masked_softmax
from ._base import IndependentHeads


@FUSIONS.register(
    family="late", paper="Zhang et al. 2024, arXiv:2311.10707", reads="pooled", synergy=False
)
class LateConfidence(IndependentHeads):
    """Weight each modality's logits by its confidence in the sample.

    w = softmax over present m of kappa c_m, where c_m is the confidence of softmax(z_m); logits =
    sum_m w_m z_m, or log sum_m w_m softmax(z_m) with `space="prob"`. This is the test-time rule of
    MLA; each classifier is trained on its own cross-entropy.

    Missing: weight 0.
    Pitfall: entropies grow with the number of classes, and an overconfident modality dominates.
    Use when: which modality is reliable changes from sample to sample.

    Settings:
        kappa: inverse temperature of the weights; 0 weights all present modalities equally
        measure: confidence c_m: "entropy" (negative entropy), "max" (largest probability) or
            "margin" (difference of the two largest probabilities)
        space: average "logit" values or probabilities ("prob")

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
        project: bool = True,
        kappa: float = 1.0,
        measure: Literal["entropy", "max", "margin"] = "entropy",
        space: Literal["logit", "prob"] = "logit",
    ) -> None:
        super().__init__(dims, dim, num_outputs, project=project)
        check_choice("measure", measure, ("entropy", "max", "margin"))
        check_choice("space", space, ("logit", "prob"))
        self.kappa, self.measure, self.space = kappa, measure, space

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        embedding, unimodal, present = self.unimodal_logits(features)
        weights = masked_softmax(self.kappa * self.confidence(unimodal), present)
        if self.space == "logit":
            logits = (weights[..., None] * unimodal).sum(1)
        else:
            probabilities = (weights[..., None] * unimodal.softmax(-1)).sum(1)
            logits = probabilities.clamp(min=1e-30).log()
        return self.output(embedding, logits, unimodal, present, weights)

    def confidence(self, unimodal: Tensor) -> Tensor:
        """Return the confidence of each modality's logits: (B, M, K) -> (B, M)."""
        probabilities = unimodal.softmax(-1)
        if self.measure == "entropy":
            return (probabilities * unimodal.log_softmax(-1)).sum(-1)
        top = probabilities.topk(min(2, self.num_outputs), dim=-1).values
        return top[..., 0] if self.measure == "max" else top[..., 0] - top[..., -1]
