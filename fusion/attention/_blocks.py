"""Transformer blocks that know what is missing: keys are masked, and no key means no change.

Shapes: `B` batch, `T` queries, `S` keys, `D` width, `H` heads.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from fusionzoo.structures import Features

from ..base import Fusion, check_heads


class Attention(nn.Module):
    """Multi-head attention; a row without a single key gets exact zeros, bias included."""

    def __init__(self, dim: int, num_heads: int, *, bias: bool = True) -> None:
        super().__init__()
        check_heads(dim, num_heads)
        self.num_heads = num_heads
        self.query = nn.Linear(dim, dim, bias=bias)
        self.key_value = nn.Linear(dim, 2 * dim, bias=bias)
        self.out = nn.Linear(dim, dim, bias=bias)

    def forward(self, x: Tensor, context: Tensor, mask: Tensor) -> Tensor:
        """Attend from x (B, T, D) to context (B, S, D) where mask (B, S) holds."""
        q = rearrange(self.query(x), "b t (h d) -> b h t d", h=self.num_heads)
        k, v = rearrange(self.key_value(context), "b s (n h d) -> n b h s d", n=2, h=self.num_heads)
        any_key = mask.any(1)
        # A row that may see nothing sees everything instead, and is then zeroed: softmax over an
        # empty set is NaN, and NaN x 0 is NaN in the backward pass too.
        keys = rearrange(mask | ~any_key[:, None], "b s -> b 1 1 s")
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=keys)
        out = self.out(rearrange(mixed, "b h t d -> b t (h d)"))
        return torch.where(any_key[:, None, None], out, 0)


def perceptron(dim: int, *, bias: bool = True) -> nn.Sequential:
    """Return the feed-forward half of a pre-norm block: 8 D^2 + 7 D parameters."""
    wide = [nn.Linear(dim, 4 * dim, bias=bias), nn.GELU(), nn.Linear(4 * dim, dim, bias=bias)]
    return nn.Sequential(nn.LayerNorm(dim), *wide)


class Block(nn.Module):
    """Pre-norm block: attention, then a perceptron; 12 D^2 + 13 D parameters (15 D across)."""

    def __init__(self, dim: int, num_heads: int, dropout: float, *, across: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.context_norm = nn.LayerNorm(dim) if across else None
        self.attention = Attention(dim, num_heads)
        self.mlp = perceptron(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor, context: Tensor | None = None) -> Tensor:
        """Attend to x itself, or to context, normed by `context_norm` where there is one.

        mask (B, S) says which keys are real.
        """
        normed = self.norm(x)
        keys = normed if context is None else (self.context_norm or self.norm)(context)
        x = x + self.dropout(self.attention(normed, keys, mask))
        return x + self.dropout(self.mlp(x))


class TokenFusion(Fusion):
    """Bring each modality's tokens to one width, each marked with its modality's embedding."""

    def __init__(self, dims: Mapping[str, int], dim: int, num_outputs: int) -> None:
        super().__init__(dims, dim, num_outputs)
        self.project = self.align()
        self.modality = nn.ParameterDict({name: torch.randn(dim) * 0.02 for name in dims})
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_outputs)

    def embedded(
        self, features: Mapping[str, Features]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return tokens {modality: (B, T, dim)} and masks {modality: (B, T)}."""
        tokens = self.tokens(features)
        embedded = {name: self.project[name](x) + self.modality[name] for name, x in tokens.items()}
        return embedded, {name: features[name].mask for name in self.dims}


def join(
    tokens: Mapping[str, Tensor], masks: Mapping[str, Tensor], like: Tensor
) -> tuple[Tensor, Tensor]:
    """Put all modalities' tokens and masks in one row; no modality is one token that is masked."""
    if not tokens:
        return like[:, :1], torch.zeros(len(like), 1, dtype=torch.bool, device=like.device)
    return torch.cat(list(tokens.values()), dim=1), torch.cat(list(masks.values()), dim=1)


def with_stand_in(x: Tensor, mask: Tensor, stand_in: Tensor) -> tuple[Tensor, Tensor]:
    """Put a learned token (D,) first in the rows that have none."""
    absent = ~mask.any(1, keepdim=True)
    first = torch.arange(mask.shape[1], device=mask.device) == 0
    return torch.where(absent[..., None], stand_in.to(x.dtype), x), mask | (absent & first)
