"""Perceiver resampler: a fixed number of latents attends to any number of tokens.

Shapes: `B` batch, `R` latents, `S` tokens, `D` width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._blocks import Attention, perceptron


class Resampler(nn.Module):
    """Flamingo's perceiver resampler: the keys are the tokens and the latents together.

    Since the latents are keys too, no row is ever without a key. Linear layers have no bias.
    """

    def __init__(self, dim: int, num_latents: int, depth: int, num_heads: int) -> None:
        super().__init__()
        # Random: latents with equal initial values would stay equal.
        self.latents = nn.Parameter(torch.randn(num_latents, dim) * 0.02)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(dim),
                    "token_norm": nn.LayerNorm(dim),
                    "attention": Attention(dim, num_heads, bias=False),
                    "mlp": perceptron(dim, bias=False),
                }
            )
            for _ in range(depth)
        )

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Attend to tokens (B, S, D) where mask (B, S) is True; return the latents (B, R, D)."""
        x = self.latents.to(tokens.dtype).expand(len(tokens), -1, -1)
        keys = F.pad(mask, (0, x.shape[1]), value=True)
        for layer in self.layers:
            normed = layer["norm"](x)  # type: ignore[index]
            context = torch.cat([layer["token_norm"](tokens), normed], dim=1)  # type: ignore[index]
            x = x + layer["attention"](normed, context, keys)  # type: ignore[index]
            x = x + layer["mlp"](x)  # type: ignore[index]
        return x
