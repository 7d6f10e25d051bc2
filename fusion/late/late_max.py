"""Max rule: for each class, the modality that is surest of it."""

from __future__ import annotations

from collections.abc import Mapping

from fusionzoo.structures import Features, FusionOutput

from ..base import FUSIONS
from ._base import VotersAlone


@FUSIONS.register(
    family="late", paper="Kittler et al. 1998, TPAMI 20(3)", reads="pooled", synergy=False
)
class LateMax(VotersAlone):
    """Take each class's largest probability over the modalities, and renormalise.

    logits = log(max_m softmax(z_m) / sum_k max_m softmax(z_m)_k). Each modality's classifier is
    trained on its own cross-entropy, as the rule supposes.

    Missing: its probabilities are 0, never the largest.
    Pitfall: the max of raw logits would let a modality win by adding a constant; probabilities
    cannot. An overconfident modality still wins too often: calibrate.
    Use when: one modality at a time is usually decisive.

    Shapes:
        features[name].pooled: (B, dims[name])
        returns: embedding (B, dim), logits (B, K), unimodal {modality: (B, K)}
    """

    classes_only = True
    symmetric = True

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        embedding, votes, present = self.votes(features)
        shares = votes.softmax(-1).masked_fill(~present[..., None], 0)
        largest = shares.max(1).values.clamp(min=1e-30)  # all zeros where nothing is present
        logits = (largest / largest.sum(-1, keepdim=True)).log()
        return self.output(embedding, logits, votes, present, None)
