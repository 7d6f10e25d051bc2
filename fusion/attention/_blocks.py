"""Transformer blocks with masked keys; a row without any key passes through attention unchanged.

Shapes: `B` batch, `T` queries, `S` keys, `D` width, `H` heads.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from fusionzoo.checks import check_heads
from fusionzoo.structures import Features

from ..base import Fusion


class Attention(nn.Module):
    """Multi-head attention; queries without any unmasked key get exact zeros, without the bias."""

    def __init__(self, dim: int, num_heads: int, *, bias: bool = True) -> None:
        super().__init__()
        check_heads(dim, num_heads)
        self.num_heads = num_heads
        self.query = nn.Linear(dim, dim, bias=bias)
        self.key_value = nn.Linear(dim, 2 * dim, bias=bias)
        self.out = nn.Linear(dim, dim, bias=bias)

    def forward(self, x: Tensor, context: Tensor, mask: Tensor) -> Tensor:
        """Attend from x (B, T, D) to context (B, S, D) where mask, (B, S) or (B, T, S), is True."""
        mask = mask if mask.ndim == 3 else mask[:, None]
        attended = attend(self.query(x), self.key_value(context), mask, self.num_heads)
        return torch.where(mask.any(-1, keepdim=True), self.out(attended), 0)


def attend(query: Tensor, key_value: Tensor, mask: Tensor, num_heads: int) -> Tensor:
    """Average values by softmax(q k' / sqrt d): query (B, T, D), keys and values (B, S, 2 D).

    mask (B, 1 or T, S) is True where a query may attend. Queries without any key attend to all
    tokens, and the caller zeroes the result: softmax over an empty set is NaN, and NaN x 0 is NaN
    in the backward pass too.
    """
    q = rearrange(query, "b t (h d) -> b h t d", h=num_heads)
    k, v = rearrange(key_value, "b s (n h d) -> n b h s d", n=2, h=num_heads)
    visible = (mask | ~mask.any(-1, keepdim=True))[:, None]
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
    return rearrange(attended, "b h t d -> b t (h d)")


def perceptron(dim: int, *, bias: bool = True) -> nn.Sequential:
    """Return the feed-forward sublayer of a pre-norm block: 8 D^2 + 7 D parameters."""
    layers = [nn.Linear(dim, 4 * dim, bias=bias), nn.GELU(), nn.Linear(4 * dim, dim, bias=bias)]
    return nn.Sequential(nn.LayerNorm(dim), *layers)


class Block(nn.Module):
    """Pre-norm transformer block: attention, then a feed-forward sublayer.

    Has 12 D^2 + 13 D parameters. With `across`, for cross-attention, the context has a norm of its
    own: 12 D^2 + 15 D.
    """

    def __init__(self, dim: int, num_heads: int, dropout: float, *, across: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.context_norm = nn.LayerNorm(dim) if across else None
        self.attention = Attention(dim, num_heads)
        self.mlp = perceptron(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor, context: Tensor | None = None) -> Tensor:
        """Attend from x (B, T, D) to context (B, S, D), None for x itself.

        The mask of the keys is (B, S), or (B, T, S) for each query. The context is normalised by
        `context_norm` if there is one, else by `norm`.
        """
        normed = self.norm(x)
        keys = normed if context is None else (self.context_norm or self.norm)(context)
        x = x + self.dropout(self.attention(normed, keys, mask))
        return x + self.dropout(self.mlp(x))


class TokenFusion(Fusion):
    """Project each modality's tokens to a common width and add a learned modality embedding."""

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
    """Concatenate the tokens and masks of all modalities; one masked token if there are none."""
    if not tokens:
        return like[:, :1], torch.zeros(len(like), 1, dtype=torch.bool, device=like.device)
    return torch.cat(list(tokens.values()), dim=1), torch.cat(list(masks.values()), dim=1)


def with_stand_in(x: Tensor, mask: Tensor, stand_in: Tensor) -> tuple[Tensor, Tensor]:
    """Replace the tokens of rows without any by one learned token (D,): x (B, T, D), mask (B, T).

    Every position of such a row holds the learned token; only the first is unmasked.
    """
    absent = ~mask.any(1, keepdim=True)
    is_first = torch.arange(mask.shape[1], device=mask.device) == 0
    return torch.where(absent[..., None], stand_in.to(x.dtype), x), mask | (absent & is_first)
