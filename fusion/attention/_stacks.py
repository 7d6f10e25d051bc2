"""Several transformer stacks of equal shape, each with its own weights, run as one batch.

Shapes: `P` stacks, `B` batch, `T` queries, `S` keys, `D` width, `H` heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from fusionzoo.checks import check_heads

# Up to this many scores per head, two matrix products replace torch's attention, which on the CPU
# takes 5 times as long for a single score.
FEW_SCORES = 16
Weights = list[dict[str, Tensor]]  # per layer, then of the final norm: name -> (P, ...)


class Stacks(nn.Module):
    """P stacks of pre-norm blocks with a final norm: P (L (12 D^2 + 13 D) + 2 D) parameters.

    Stacks with the same numbers of tokens share every kernel call: their matrices (P, in, out) are
    multiplied in one batched product. Vectors are stored concatenated, (P D,), because training
    exempts one-dimensional parameters from weight decay.
    """

    def __init__(
        self, count: int, dim: int, num_layers: int, num_heads: int, dropout: float
    ) -> None:
        super().__init__()
        check_heads(dim, num_heads)
        self.count, self.num_heads = count, num_heads
        self.layers = nn.ModuleList(self._layer(dim) for _ in range(num_layers))
        self.norm = nn.ParameterDict(self._norm("norm", dim))
        self.dropout = nn.Dropout(dropout)

    def _layer(self, dim: int) -> nn.ParameterDict:
        sizes = {"query": (dim, dim), "key_value": (dim, 2 * dim), "out": (dim, dim)}
        sizes |= {"wide": (dim, 4 * dim), "narrow": (4 * dim, dim)}
        parameters = {**self._norm("norm", dim), **self._norm("mlp_norm", dim)}
        for name, (width_in, width_out) in sizes.items():  # initialised like nn.Linear
            bound = width_in**-0.5
            parameters[name] = torch.empty(self.count, width_in, width_out).uniform_(-bound, bound)
            parameters[f"{name}_bias"] = torch.empty(self.count * width_out).uniform_(-bound, bound)
        return nn.ParameterDict(parameters)

    def _norm(self, name: str, dim: int) -> dict[str, Tensor]:
        ones, zeros = torch.ones(self.count * dim), torch.zeros(self.count * dim)
        return {name: ones, f"{name}_bias": zeros}

    def weights(self) -> Weights:
        """Return all weights with the stack as first dimension; vectors are (P, 1, D)."""
        return [
            {
                name: rearrange(x, "(p d) -> p 1 d", p=self.count) if x.ndim == 1 else x
                for name, x in part.items()
            }
            for part in cast("list[nn.ParameterDict]", [*self.layers, self.norm])
        ]

    def forward(
        self, weights: Weights, x: Tensor, mask: Tensor, context: Tensor | None = None
    ) -> Tensor:
        """Run x (P, B, T, D) through stacks with these `weights`; mask (P, B, S) of the keys.

        The keys are `context` (P, B, S, D), the same at every layer, or the stream x itself. Both
        are normalised by the layer's first norm.
        """
        any_key = rearrange(mask.any(2), "p b -> p b 1 1")
        # Without any key softmax is NaN: such rows attend to all tokens, and are zeroed afterwards.
        visible = rearrange(mask[:, :, None] | ~any_key, "p b 1 s -> (p b) 1 1 s")
        *layers, final_norm = weights
        for layer in layers:
            queries = _norm(layer, "norm", x)
            keys = queries if context is None else _norm(layer, "norm", context)
            x = x + self.dropout(self._attend(layer, queries, keys, visible).where(any_key, 0))
            hidden = _linear(layer, "wide", _norm(layer, "mlp_norm", x)).relu()
            x = x + self.dropout(_linear(layer, "narrow", hidden))
        return _norm(final_norm, "norm", x)

    def _attend(
        self, layer: dict[str, Tensor], x: Tensor, context: Tensor, visible: Tensor
    ) -> Tensor:
        """Attend from x (P, B, T, D) to context (P, B, S, D); mask visible (P B, 1, 1, S)."""
        heads = self.num_heads
        q = rearrange(_linear(layer, "query", x), "p b t (h d) -> (p b) h t d", h=heads)
        keys_values = _linear(layer, "key_value", context)
        k, v = rearrange(keys_values, "p b s (n h d) -> n (p b) h s d", n=2, h=heads)
        attended = _attention(q, k, v, visible)
        attended = rearrange(attended, "(p b) h t d -> p b t (h d)", p=len(x))
        return _linear(layer, "out", attended)


def split_weights(weights: Weights) -> list[Weights]:
    """Return the weights of each stack as those of a single one; the inverse of `stack_weights`."""
    # split instead of indexing: the gradient of an index is as large as all stacks together
    layers = [{name: x.split(1) for name, x in layer.items()} for layer in weights]
    count = len(weights[-1]["norm"])
    return [
        [{name: x[row] for name, x in layer.items()} for layer in layers] for row in range(count)
    ]


def stack_weights(weights_by_stack: Sequence[Weights]) -> Weights:
    """Concatenate the weights of several stacks."""
    if len(weights_by_stack) == 1:
        return weights_by_stack[0]
    return [
        {name: torch.cat([layer[name] for layer in layers]) for name in layers[0]}
        for layers in zip(*weights_by_stack, strict=True)
    ]


def _attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Average v by softmax(q k' / sqrt d): (N, H, T, d), (N, H, S, d) x 2, (N, 1, 1, S)."""
    if q.shape[2] * k.shape[2] > FEW_SCORES:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
    scores = (q * q.shape[-1] ** -0.5) @ k.mT
    return scores.masked_fill(~visible, torch.finfo(scores.dtype).min).softmax(-1) @ v


def _norm(layer: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    scale, shift = layer[name], layer[f"{name}_bias"]
    if len(scale) == 1:  # a single stack: one kernel instead of two
        return F.layer_norm(x, x.shape[-1:], scale[0, 0], shift[0, 0])
    return torch.addcmul(shift[:, None], F.layer_norm(x, x.shape[-1:]), scale[:, None])


def _linear(layer: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    """Apply each stack's linear layer: (P, B, T, in) -> (P, B, T, out)."""
    weight, bias = layer[name], layer[f"{name}_bias"]
    if len(weight) == 1:  # a plain product is faster than a batched one with one entry
        return F.linear(x, weight[0].mT, bias[0, 0])
    return torch.baddbmm(bias, x.flatten(1, 2), weight).unflatten(1, x.shape[1:3])
