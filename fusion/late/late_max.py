"""Max rule: the largest probability of each class over the modalities."""

from __future__ import annotations

from collections.abc import Mapping

from fusionzoo.structures import Features, FusionOutput

from ..base import FUSIONS
from ._base import IndependentHeads


@FUSIONS.register(
    family="late", paper="Kittler et al. 1998, TPAMI 20(3)", reads="pooled", synergy=False
)
class LateMax(IndependentHeads):
    """Take each class's largest probability over the modalities and renormalise.

    logits = log(max_m softmax(z_m) / sum_k max_m softmax(z_m)_k). Each modality's classifier is
    trained on its own cross-entropy, as the rule assumes.

    Missing: its probabilities are 0, so it is never the maximum.
    Pitfall: an overconfident modality wins too often; calibrate. (The maximum of raw logits would
    be worse: it depends on constants added to a modality's logits.)
    Use when: usually a single modality is decisive.

    Shapes:
        features[name].pooled: (B, dims[name])
        returns: embedding (B, dim), logits (B, K), unimodal {modality: (B, K)}
    """

    classes_only = True
    symmetric = True

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        embedding, unimodal, present = self.unimodal_logits(features)
        probabilities = unimodal.softmax(-1).masked_fill(~present[..., None], 0)
        largest = probabilities.max(1).values.clamp(min=1e-30)  # all zeros without any modality
        logits = (largest / largest.sum(-1, keepdim=True)).log()
        return self.output(embedding, logits, unimodal, present, None)
