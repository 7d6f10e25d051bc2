"""Concatenation: the standard baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import nn

from fusionzoo.structures import Features, FusionOutput

from ..base import FUSIONS, Fusion


@FUSIONS.register(family="early", paper=None, reads="pooled")
class Concat(Fusion):
    """Concatenate the pooled vectors of all modalities and apply an MLP.

    embedding = MLP([x_1; ...; x_M; p]). p has one bit per modality, 1 if it is present; without
    it an absent modality would look like features that are all 0. With `hidden=()` the MLP is a
    single linear layer.

    Missing: a block of zeros, and its presence bit is 0.
    Pitfall: splitting the first weight into equal parts for unimodal logits assumes equal D_m. With
    a few hundred samples its hidden layer overfits: logistic regression does better
    (docs/which.md).
    Use when: you need a baseline for other fusions; it is often hard to beat.

    Settings:
        hidden: widths of the hidden layers, each at least 1; empty for a linear map
        dropout: dropout rate after each hidden layer, 0 to below 1
        presence_bits: whether the presence bits are part of the input

    Shapes:
        features[name].pooled: (B, dims[name])
        returns: embedding (B, dim), logits (B, K)
    """

    def __init__(
        self,
        dims: Mapping[str, int],
        dim: int,
        num_outputs: int,
        *,
        hidden: Sequence[int] = (128,),
        dropout: float = 0.1,
        presence_bits: bool = True,
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        self.presence_bits = presence_bits
        widths = [sum(dims.values()) + presence_bits * len(dims), *hidden]
        layers: list[nn.Module] = []
        for width_in, width_out in pairwise(widths):
            layers += [nn.Linear(width_in, width_out), nn.ReLU(), nn.Dropout(dropout)]
        self.mlp = nn.Sequential(*layers, nn.Linear(widths[-1], dim))
        self.head = nn.Linear(dim, num_outputs)

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        pooled = list(self.pooled(features).values())
        present = self.present(features)
        bits = [present.to(pooled[0].dtype)] if self.presence_bits else []
        embedding = self.or_null(self.mlp(torch.cat([*pooled, *bits], dim=-1)), present)
        return FusionOutput(embedding, self.head(embedding), {}, None)
