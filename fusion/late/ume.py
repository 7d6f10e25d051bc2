"""Unimodal ensemble: separately trained unimodal models, averaged."""

from __future__ import annotations

from collections.abc import Mapping

from fusionzoo.structures import Features, FusionOutput

from ..base import FUSIONS, equal_weights, present_mean
from ._base import IndependentHeads


@FUSIONS.register(
    family="late", paper="Du et al. 2023, arXiv:2305.01233", reads="pooled", synergy=False
)
class UME(IndependentHeads):
    """Train each modality's encoder and classifier on its own loss; average their logits.

    logits = mean_m z_m over present m; loss = sum_m p_m CE(z_m), p_m = 1 if m is present, else 0.
    No gradient passes between modalities, so the result is that of separate training runs. Only
    gradient clipping couples them, through the norm of the whole gradient; `--optim.clip null`
    removes that coupling.

    Missing: left out of the mean and of the loss.
    Pitfall: nothing is learned across modalities; joint training should at least match it.
    Use when: in joint training one modality keeps the others from learning (modality laziness).

    Shapes:
        features[name].pooled: (B, dims[name])
        returns: embedding (B, dim), logits (B, K), unimodal {modality: (B, K)}, weights (B, M)
        equal
    """

    symmetric = True

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        embedding, unimodal, present = self.unimodal_logits(features)
        logits = present_mean(unimodal, present)
        return self.output(embedding, logits, unimodal, present, equal_weights(present, unimodal))
