"""Gated cross-attention: one modality's stream, into which the others are let gradually."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fusionzoo.structures import Features, FusionOutput, masked_mean

from ..base import FUSIONS, check_modality
from ._blocks import Attention, TokenFusion, join, perceptron, with_stand_in
from ._resampler import Resampler


class GatedLayer(nn.Module):
    """y += tanh(a) CA(y, media); y += tanh(b) MLP(y); gates a and b start at 0."""

    def __init__(self, dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attention = Attention(dim, num_heads, bias=False)
        self.mlp = perceptron(dim, bias=False)
        self.attention_gate = nn.Parameter(torch.zeros(()))
        self.mlp_gate = nn.Parameter(torch.zeros(()))
        self.dropout = nn.Dropout(dropout)

    def forward(self, y: Tensor, media: Tensor, keys: Tensor) -> Tensor:
        """Update y (B, T, D) from media (B, R, D) where keys (B, R) holds."""
        seen = self.dropout(self.attention(self.norm(y), media, keys))
        y = y + self.attention_gate.tanh() * seen
        return y + self.mlp_gate.tanh() * self.dropout(self.mlp(y))


@FUSIONS.register(family="attention", paper="Alayrac et al. 2022, arXiv:2204.14198", reads="tokens")
class GatedXAttn(TokenFusion):
    """Let one modality's tokens attend to a summary of the others through gates that open slowly.

    The others' tokens are resampled to `num_latents` latents; per layer y += tanh(a) CA(y, latents)
    and y += tanh(b) MLP(y), a = b = 0 at the start, where the output is the base stream bit for
    bit; embedding = mean of LN(y). `base` names the modality of the stream (default: the first).

    Missing: without any other modality the attention branch is 0 and the perceptron stays; an
    absent base is one learned token.
    Pitfall: at the start only the gates get a gradient, so the first steps look idle; weight decay
    must not act on gates (vectors and scalars are not decayed here).
    Use when: the base encoder is strong or frozen and must not be disturbed.

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
        base: str | None = None,
        num_latents: int = 16,
        resampler_depth: int = 1,
        num_layers: int = 2,
        num_heads: int = 4,
        dropout: float = 0.1,
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        self.base = check_modality("base", base, dims)
        self.stand_in = nn.Parameter(torch.randn(dim) * 0.02)
        self.resampler = (
            Resampler(dim, num_latents, resampler_depth, num_heads) if len(dims) > 1 else None
        )
        self.layers = nn.ModuleList(GatedLayer(dim, num_heads, dropout) for _ in range(num_layers))

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        tokens, masks = self.embedded(features)
        y, mask = with_stand_in(tokens.pop(self.base), masks.pop(self.base), self.stand_in)
        media, keys = join(tokens, masks, y)
        if self.resampler is not None:
            media = self.resampler(media, keys)
            keys = keys.any(1, keepdim=True).expand(media.shape[:2])
        for layer in self.layers:
            y = layer(y, media, keys)
        embedding = self.or_null(masked_mean(self.norm(y), mask), self.present(features))
        return FusionOutput(embedding, self.head(embedding), {}, None)
