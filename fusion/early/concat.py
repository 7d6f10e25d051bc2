"""Concatenation: the baseline that every other fusion has to beat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import nn

from fusionzoo.structures import Features, FusionOutput

from ..base import FUSIONS, Fusion


@FUSIONS.register(family="early", paper=None, reads="pooled")
class Concat(Fusion):
    """Concatenate the modalities' vectors and pass them through a perceptron.

    embedding = MLP([x_1; ...; x_M; p]); p is one bit per modality that says whether it is there,
    without which "absent" and "all features are 0" would look alike. With `hidden=()` it is linear.

    Missing: a zero block, and its bit is 0.
    Pitfall: cutting the first layer's weight in equal parts for unimodal logits assumes equal D_m.
    Use when: you need the baseline that every other fusion has to beat; often it is not beaten.

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
        hidden: Sequence[int] = (500, 500),
        dropout: float = 0.1,
        presence_bits: bool = True,
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        self.presence_bits = presence_bits
        widths = [sum(dims.values()) + presence_bits * len(dims), *hidden]
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU(), nn.Dropout(dropout)]
        self.mlp = nn.Sequential(*layers, nn.Linear(widths[-1], dim))
        self.head = nn.Linear(dim, num_outputs)

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        pooled = list(self.pooled(features).values())
        present = self.present(features)
        bits = [present.to(pooled[0].dtype)] if self.presence_bits else []
        embedding = self.or_null(self.mlp(torch.cat([*pooled, *bits], dim=-1)), present)
        return FusionOutput(embedding, self.head(embedding), {}, None)
