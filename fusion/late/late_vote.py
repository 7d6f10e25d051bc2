"""Majority vote: each modality votes for its most probable class."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F

from fusionzoo.structures import Features, FusionOutput

from ..base import FUSIONS, equal_weights, present_mean
from ._base import IndependentHeads


@FUSIONS.register(
    family="late", paper="Kittler et al. 1998, TPAMI 20(3)", reads="pooled", synergy=False
)
class LateVote(IndependentHeads):
    """Count the modalities that vote for each class; the mean probability breaks ties.

    logits_k = log((n_k + eps q_k) / (P + eps)), with n_k the number of votes for class k among the
    P present modalities, q their mean probability and eps = 0.01. Counts have no gradient, so each
    modality's classifier is trained on its own cross-entropy.

    Missing: does not vote.
    Pitfall: with two modalities every disagreement is a tie; the rule needs three or more.
    Use when: modalities are of similar quality and their probabilities are poorly calibrated.

    Shapes:
        features[name].pooled: (B, dims[name])
        returns: embedding (B, dim), logits (B, K), unimodal {modality: (B, K)}, weights (B, M)
        equal
    """

    classes_only = True
    symmetric = True

    EPS = 1e-2

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        embedding, unimodal, present = self.unimodal_logits(features)
        votes = F.one_hot(unimodal.argmax(-1), self.num_outputs)
        votes = votes.masked_fill(~present[..., None], 0)
        tie_break = present_mean(unimodal.softmax(-1), present)
        counts = votes.sum(1).to(unimodal.dtype) + self.EPS * tie_break
        probabilities = counts / (present.sum(1, keepdim=True).to(unimodal.dtype) + self.EPS)
        logits = probabilities.clamp(min=1e-30).log()
        return self.output(embedding, logits, unimodal, present, equal_weights(present, unimodal))
