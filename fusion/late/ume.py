"""Unimodal ensemble: models trained apart, averaged at the end."""

from __future__ import annotations

from collections.abc import Mapping

from fusionzoo.structures import Features, FusionOutput

from ..base import FUSIONS, equal_weights, present_mean
from ._base import VotersAlone


@FUSIONS.register(
    family="late", paper="Du et al. 2023, arXiv:2305.01233", reads="pooled", synergy=False
)
class UME(VotersAlone):
    """Train each modality's encoder and classifier on its own loss; average their logits.

    logits = mean_m z_m over what is present; loss = sum_m p_m CE(z_m), so no gradient passes from
    one modality to another and the result is that of separate training runs. Only clipping couples
    them, through the norm of the whole gradient: `--optim.clip null` cuts that too.

    Missing: left out of the mean and of the loss.
    Pitfall: nothing is learnt across modalities; it is the bar that joint training has to pass.
    Use when: joint training lets one modality starve the others (modality laziness).

    Shapes:
        features[name].pooled: (B, dims[name])
        returns: embedding (B, dim), logits (B, K), unimodal {modality: (B, K)}, weights (B, M)
        equal
    """

    symmetric = True

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        embedding, votes, present = self.votes(features)
        logits = present_mean(votes, present)
        return self.output(embedding, logits, votes, present, equal_weights(present, votes))
