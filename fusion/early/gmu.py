"""Gated multimodal unit: weight the modalities of each sample by learned gates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from einops import rearrange, reduce
from torch import Tensor, nn

from fusionzoo.errors import check_choice
from fusionzoo.structures import Features, FusionOutput

from ..base import FUSIONS, Fusion, masked_softmax


@FUSIONS.register(family="early", paper="Arevalo et al. 2017, arXiv:1702.01992", reads="pooled")
class GMU(Fusion):
    """Sum tanh features of the modalities, weighted by gates that read all modalities.

    With u_m = V_m x_m, s = [u_1; ...; u_M] and g_m = W_m s, the embedding is
    sum_m softmax_m(g)_m * tanh(u_m), with one gate per dimension. Differs from the paper: with
    `gate="softmax"` the gates of a dimension sum to 1 for any number of modalities, which for two
    equals the paper's tied gate; `gate="sigmoid"` is the paper's form for more than two.

    Missing: its gate is 0, and it does not influence the gates of the others.
    Pitfall: the sum of sigmoid gates grows with the number of modalities.
    Use when: you want a strong default at low cost; the gates also show which modality was used.

    Settings:
        gate: normalisation of the gates over modalities, "softmax" or "sigmoid" (paper, for more
            than two modalities: "sigmoid")
        dropout: dropout rate on the embedding, 0 to below 1

    Shapes:
        features[name].pooled: (B, dims[name])
        returns: embedding (B, dim), logits (B, K), weights (B, M) for softmax: gates averaged over
        dim
    """

    def __init__(
        self,
        dims: Mapping[str, int],
        dim: int,
        num_outputs: int,
        *,
        gate: Literal["softmax", "sigmoid"] = "softmax",
        dropout: float = 0.0,
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        check_choice("gate", gate, ("softmax", "sigmoid"))
        self.softmax = gate == "softmax"
        self.project = nn.ModuleDict({m: nn.Linear(w, dim, bias=False) for m, w in dims.items()})
        self.gate = nn.Linear(len(dims) * dim, len(dims) * dim, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(dim, num_outputs)

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        present = self.present(features)
        projected = [self.project[name](x) for name, x in self.pooled(features).items()]
        scores = rearrange(
            self.gate(torch.cat(projected, -1)), "b (m d) -> b m d", m=len(self.dims)
        )
        gates = self._gates(scores, present[..., None])
        hidden = torch.stack(projected, dim=1).tanh()
        embedding = self.or_null(self.dropout((gates * hidden).sum(1)), present)
        weights = reduce(gates, "b m d -> b m", "mean") if self.softmax else None
        return FusionOutput(embedding, self.head(embedding), {}, weights)

    def _gates(self, scores: Tensor, present: Tensor) -> Tensor:
        if self.softmax:
            return masked_softmax(scores, present)
        return scores.sigmoid().masked_fill(~present, 0)
