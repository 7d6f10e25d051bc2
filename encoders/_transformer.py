"""A small transformer, shared by the encoders that are trained from scratch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fusionzoo.errors import FusionZooError
from fusionzoo.structures import Features, masked_mean


class TokenTransformer(nn.Module):
    """Pre-norm transformer over embedded tokens, with learned positions; pooled is the mean.

    Shapes: x (B, T, D), mask (B, T) with at least one real token per row -> Features
    """

    def __init__(
        self, dim: int, num_layers: int, num_heads: int, dropout: float, max_length: int
    ) -> None:
        super().__init__()
        if dim % num_heads:
            raise FusionZooError(f"num_heads={num_heads} does not divide dim={dim}")
        self.positions = nn.Parameter(torch.randn(max_length, dim) * 0.02)
        layer = nn.TransformerEncoderLayer(
            dim, num_heads, 4 * dim, dropout, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(
            layer, num_layers, nn.LayerNorm(dim), enable_nested_tensor=False
        )

    def forward(self, x: Tensor, mask: Tensor) -> Features:
        x = x + self.positions[: x.shape[1]]
        x = self.layers(x, src_key_padding_mask=~mask)
        return Features(x, mask, masked_mean(x, mask))
