"""Majority vote: each modality names one class."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F

from fusionzoo.structures import Features, FusionOutput

from ..base import FUSIONS, equal_weights, present_mean
from ._base import VotersAlone


@FUSIONS.register(
    family="late", paper="Kittler et al. 1998, TPAMI 20(3)", reads="pooled", synergy=False
)
class LateVote(VotersAlone):
    """Count which class each modality puts first; the mean probability breaks ties.

    logits_k = log((n_k + eps q_k) / (P + eps)), n_k the votes for class k among P present
    modalities and q their mean probability. A count has no gradient, so each modality's classifier
    is trained on its own cross-entropy. Differs from the catalogue's smoothing by eps: here the
    tie-break is the smoothing.

    Missing: does not vote.
    Pitfall: with two modalities every disagreement is a tie; the rule needs three or more.
    Use when: modalities are of similar quality and their probabilities cannot be trusted.

    Shapes:
        features[name].pooled: (B, dims[name])
        returns: embedding (B, dim), logits (B, K), unimodal {modality: (B, K)}, weights (B, M)
        equal
    """

    classes_only = True
    symmetric = True

    EPS = 1e-2

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        embedding, votes, present = self.votes(features)
        first = F.one_hot(votes.argmax(-1), self.num_outputs).masked_fill(~present[..., None], 0)
        tie_break = present_mean(votes.softmax(-1), present)
        counted = first.sum(1).to(votes.dtype) + self.EPS * tie_break
        share = counted / (present.sum(1, keepdim=True).to(votes.dtype) + self.EPS)
        logits = share.clamp(min=1e-30).log()
        return self.output(embedding, logits, votes, present, equal_weights(present, votes))
