"""Weighted mean of the modalities' votes: one learned trust per modality, or per class."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from fusionzoo.structures import Features, FusionOutput

from ..base import FUSIONS, masked_softmax
from ._base import LateFusion


@FUSIONS.register(family="late", paper=None, reads="pooled", synergy=False)
class LateWeighted(LateFusion):
    """Average the modalities' logits with learned weights, renormalised over what is present.

    logits = sum_m w_m z_m with w = softmax(theta) over present modalities; theta starts at 0, where
    it is `late_mean`. `per_class=True` learns a theta for each class.

    Missing: weight 0; the others' weights are renormalised.
    Pitfall: the scale of z_m and its weight are confounded, and theta moves slowly.
    Use when: one modality is better than another on all samples alike.

    Shapes:
        features[name].pooled: (B, dims[name])
        returns: embedding (B, dim), logits (B, K), unimodal {modality: (B, K)},
            weights (B, M): mean over the classes
    """

    def __init__(
        self, dims: Mapping[str, int], dim: int, num_outputs: int, *, per_class: bool = False
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        self.theta = nn.Parameter(torch.zeros(len(dims), num_outputs if per_class else 1))

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        embedding, votes, present = self.votes(features)
        scores = self.theta.to(votes.dtype).expand(len(present), -1, -1)
        weights = masked_softmax(scores, present[..., None].expand_as(scores))
        logits = (weights * votes).sum(1)
        return self.output(embedding, logits, votes, present, weights.mean(-1))
