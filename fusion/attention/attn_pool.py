"""Attention pooling: average the modalities with weights that depend on the sample."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from fusionzoo.structures import Features, FusionOutput

from ..base import FUSIONS, Fusion, masked_softmax


@FUSIONS.register(
    family="attention", paper="Ilse et al. 2018, arXiv:1802.04712", reads="pooled", synergy=False
)
class AttnPool(Fusion):
    """Average the modalities' aligned vectors with gated-attention weights.

    s_m = v (tanh(V a_m) * sigmoid(U a_m)), with parameters shared by all modalities; w = softmax of
    s over the present modalities; embedding = sum_m w_m a_m. This is gated attention for
    multiple-instance learning, with the modalities of a sample as the bag.

    Missing: weight 0.
    Pitfall: each score depends on its own modality only, so the sign of a logit remains a sum of
    unimodal terms and cannot express an exclusive or (see docs/which.md). An uninformative modality
    may receive a constant weight, which the others take over when it is absent: train with missing
    data.
    Use when: the reliability of modalities varies by sample and you want to inspect the weights.

    Settings:
        hidden: width of the attention's hidden layer, at least 1

    Shapes:
        features[name].pooled: (B, dims[name])
        returns: embedding (B, dim), logits (B, K), weights (B, M)
    """

    symmetric = True
    learns_absence = True

    def __init__(
        self, dims: Mapping[str, int], dim: int, num_outputs: int, *, hidden: int = 128
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        self.project = self.align()
        self.content = nn.Linear(dim, hidden)
        self.gate = nn.Linear(dim, hidden)
        self.score = nn.Linear(hidden, 1, bias=False)
        self.head = nn.Linear(dim, num_outputs)

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        aligned, present = self.aligned(features)
        scores = self.score(self.content(aligned).tanh() * self.gate(aligned).sigmoid())
        weights = masked_softmax(scores[..., 0], present)
        embedding = self.or_null((weights[..., None] * aligned).sum(1), present)
        return FusionOutput(embedding, self.head(embedding), {}, weights)
