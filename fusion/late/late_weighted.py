"""Weighted mean rule: average the modalities' logits with learned weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from fusionzoo.structures import Features, FusionOutput

from ..base import FUSIONS, masked_softmax
from ._base import LateFusion


@FUSIONS.register(family="late", paper=None, reads="pooled", synergy=False)
class LateWeighted(LateFusion):
    """Average the modalities' logits with learned weights, normalised over present modalities.

    logits = sum_m w_m z_m with w = softmax(theta) over the present modalities. theta is initialised
    to 0, which equals `late_mean`.

    Missing: weight 0; the weights of the others are renormalised.
    Pitfall: the scale of z_m and its weight are confounded, and theta changes slowly.
    Use when: one modality is better than another across all samples.

    Settings:
        per_class: whether to learn a separate weight for each class

    Shapes:
        features[name].pooled: (B, dims[name])
        returns: embedding (B, dim), logits (B, K), unimodal {modality: (B, K)},
            weights (B, M): mean over the classes
    """

    def __init__(
        self,
        dims: Mapping[str, int],
        dim: int,
        num_outputs: int,
        *,
        project: bool = True,
        per_class: bool = False,
    ) -> None:
        super().__init__(dims, dim, num_outputs, project=project)
        self.theta = nn.Parameter(torch.zeros(len(dims), num_outputs if per_class else 1))

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        embedding, unimodal, present = self.unimodal_logits(features)
        scores = self.theta.to(unimodal.dtype).expand(present.shape[0], -1, -1)
        weights = masked_softmax(scores, present[..., None].expand_as(scores))
        logits = (weights * unimodal).sum(1)
        return self.output(embedding, logits, unimodal, present, weights.mean(-1))
