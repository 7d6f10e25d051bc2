"""Gated cross-attention: one modality attends to the others through gates that start closed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fusionzoo.errors import check_modality
from fusionzoo.structures import Features, FusionOutput, masked_mean

from ..base import FUSIONS
from ._blocks import Attention, TokenFusion, TokenResampler, join, perceptron, with_stand_in


class GatedLayer(nn.Module):
    """y += tanh(a) CA(y, media); y += tanh(b) MLP(y); the gates a and b are initialised to 0."""

    def __init__(self, dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attention = Attention(dim, num_heads, bias=False)
        self.mlp = perceptron(dim, bias=False)
        self.attention_gate = nn.Parameter(torch.zeros(()))
        self.mlp_gate = nn.Parameter(torch.zeros(()))
        self.dropout = nn.Dropout(dropout)

    def forward(self, y: Tensor, media: Tensor, keys: Tensor) -> Tensor:
        """Update y (B, T, D) from media (B, R, D) where keys (B, R) is True."""
        attended = self.dropout(self.attention(self.norm(y), media, keys))
        y = y + self.attention_gate.tanh() * attended
        return y + self.mlp_gate.tanh() * self.dropout(self.mlp(y))


@FUSIONS.register(family="attention", paper="Alayrac et al. 2022, arXiv:2204.14198", reads="tokens")
class GatedXAttn(TokenFusion):
    """Let the base modality's tokens attend to a summary of the others through learned gates.

    A perceiver resampler reduces the other modalities' tokens to `num_latents` latents. Per layer
    y += tanh(a) CA(y, latents), y += tanh(b) MLP(y), where y are the base modality's tokens and
    a = b = 0 initially, so that y is first unchanged bit for bit; embedding = mean of LN(y).

    Missing: an absent base becomes one learned token; if all other modalities are missing,
    attention adds 0 and the MLP remains.
    Pitfall: at the start only the gates get a gradient, so the first steps change little; weight
    decay must not act on gates (scalars and vectors are exempt here). With a few hundred samples a
    linear classifier of pooled features does better (docs/which.md).
    Use when: the base encoder is strong or frozen and its features must not be disturbed.

    Settings:
        base: name of the base modality; None for the first
        num_latents: latents that summarise the other modalities, at least 1 (paper: 64)
        resampler_depth: layers of the resampler, at least 1 (paper: 6)
        num_layers: number of gated layers, at least 1
        num_heads: attention heads of every layer; must divide `dim`
        dropout: dropout rate on the output of each gated attention and MLP, 0 to below 1

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
            TokenResampler(dim, num_latents, resampler_depth, num_heads) if len(dims) > 1 else None
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
