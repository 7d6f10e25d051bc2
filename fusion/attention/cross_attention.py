"""Cross-attention: the tokens of one modality attend to those of all others."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from fusionzoo.errors import check_modality
from fusionzoo.structures import Features, FusionOutput, masked_mean

from ..base import FUSIONS
from ._blocks import TokenFusion, join, transformer, with_stand_in


@FUSIONS.register(family="attention", paper="Tsai et al. 2019, arXiv:1906.00295", reads="tokens")
class CrossAttention(TokenFusion):
    """Let the tokens of one modality attend to those of all others, in several layers.

    x_q <- x_q + CA(x_q, [X_n]_{n != q}); x_q <- x_q + MLP(x_q); embedding = mean of LN(x_q), where
    q is the query modality. This is the one-directional form of the paper's crossmodal block.
    Differs from the paper: no mask of future time steps.

    Missing: masked as a key; an absent query modality is replaced by one learned token. If all
    other modalities are missing, cross-attention adds 0.
    Pitfall: padded keys must be masked, and padded queries must be left out of the pooling.
    Use when: one modality carries the question and the others the evidence.

    Settings:
        query: name of the modality whose tokens are the queries; None for the first
        num_layers: number of layers, at least 1
        num_heads: attention heads per layer; must divide `dim`
        dropout: dropout rate on the output of each attention and MLP, 0 to below 1

    Shapes:
        features[name].tokens: (B, T, dims[name]), any T for each
        returns: embedding (B, dim), logits (B, K)
    """

    def __init__(
        self,
        dims: Mapping[str, int],
        dim: int,
        num_outputs: int,
        *,
        query: str | None = None,
        num_layers: int = 2,
        num_heads: int = 4,
        dropout: float = 0.1,
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        self.query = check_modality("query", query, dims)
        self.blocks = transformer(num_layers, dim, num_heads, dropout, across=True)
        self.asking = nn.Parameter(torch.randn(dim) * 0.02)

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        tokens, masks = self.embedded(features)
        x, mask = with_stand_in(tokens.pop(self.query), masks.pop(self.query), self.asking)
        context, keys = join(tokens, masks, x)
        for block in self.blocks:
            x = block(x, keys, context)
        embedding = self.or_null(masked_mean(self.norm(x), mask), self.present(features))
        return FusionOutput(embedding, self.head(embedding), {}, None)
