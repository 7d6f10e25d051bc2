"""Cross-attention: one modality asks, the others answer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from fusionzoo.structures import Features, FusionOutput, masked_mean

from ..base import FUSIONS, check_modality
from ._blocks import Block, TokenFusion, join, with_stand_in


@FUSIONS.register(family="attention", paper="Tsai et al. 2019, arXiv:1906.00295", reads="tokens")
class CrossAttention(TokenFusion):
    """Let the tokens of one modality attend to those of all others, layer after layer.

    x_q <- x_q + CA(x_q, [X_n]_{n != q}); x_q <- x_q + MLP(x_q); embedding = mean of LN(x_q).
    `query` names the asking modality (default: the first). A sample that lacks it asks with one
    learned token; a sample that has nothing else keeps its own stream. The one-directional form of
    the crossmodal block of the paper, without its future mask.

    Missing: no key; an absent `query` modality asks with one learned token.
    Pitfall: padded queries must be dropped when pooling, padded keys masked: two different things.
    Use when: one modality carries the question and the others the evidence.

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
        self.blocks = nn.ModuleList(
            Block(dim, num_heads, dropout, across=True) for _ in range(num_layers)
        )
        self.asking = nn.Parameter(torch.randn(dim) * 0.02)

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        tokens, masks = self.embedded(features)
        x, mask = with_stand_in(tokens.pop(self.query), masks.pop(self.query), self.asking)
        context, keys = join(tokens, masks, x)
        for block in self.blocks:
            x = block(x, keys, context)
        embedding = self.or_null(masked_mean(self.norm(x), mask), self.present(features))
        return FusionOutput(embedding, self.head(embedding), {}, None)
