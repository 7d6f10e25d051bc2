"""Latents that read tokens: any number in, a fixed number out.

Shapes: `B` batch, `R` latents, `S` tokens, `D` width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._blocks import Attention, perceptron


class Resampler(nn.Module):
    """Flamingo's perceiver resampler: keys are the tokens and the latents, in one attention.

    The latents are keys too, so no row is ever without a key. No biases but in the norms.
    """

    def __init__(self, dim: int, num_latents: int, depth: int, num_heads: int) -> None:
        super().__init__()
        # Latents must differ at the start: equal ones would stay equal.
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
        """Read tokens (B, S, D) where mask (B, S) holds; return (B, R, D)."""
        x = self.latents.to(tokens.dtype).expand(len(tokens), -1, -1)
        keys = F.pad(mask, (0, x.shape[1]), value=True)
        for layer in self.layers:
            normed = layer["norm"](x)  # type: ignore[index]
            context = torch.cat([layer["token_norm"](tokens), normed], dim=1)  # type: ignore[index]
            x = x + layer["attention"](normed, context, keys)  # type: ignore[index]
            x = x + layer["mlp"](x)  # type: ignore[index]
        return x
