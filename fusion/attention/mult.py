"""MulT: one crossmodal transformer for every ordered pair of modalities."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from fusionzoo.errors import FusionZooError, check_heads
from fusionzoo.structures import Features, FusionOutput

from ..base import FUSIONS, Fusion

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
        attended = rearrange(attended, "(p b) h t d -> p b t (h d)", p=x.shape[0])
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
    if torch.compiler.is_exporting() or q.shape[2] * k.shape[2] > FEW_SCORES:
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


@FUSIONS.register(family="attention", paper="Tsai et al. 2019, arXiv:1906.00295", reads="tokens")
class MulT(Fusion):
    """Attend from every modality to every other, then take the last step of each sequence.

    x_m = sqrt(w) E_m X_m + positions, w wide. For each source n and target m, `num_layers` pre-norm
    blocks (attention, ReLU MLP) have the running m-stream as queries and the fixed x_n, normalised
    by the block's first norm, as keys. H_m = [the streams of m] is W wide; h_m = last step of a
    self-attention stack over sqrt(W) H_m + positions; h = [h_1; ...; h_M; p], p one presence bit
    per modality; embedding = V (h + MLP(h)). Differs from the authors' code: padding is masked, no
    mask of future time steps, dropout on residuals only, and positions count from 0 with sine and
    cosine interleaved. Theirs starts the stacks from Xavier's uniform distribution and biases of 0
    (matrices 1.4 times as large), does not map a modality that is w wide, has at least 3 layers of
    self-attention and no p. Stacks with equal numbers of tokens run as one batch.

    Missing: an absent source adds nothing to the target's stream; an absent target is 0 in the
    final concatenation.
    Pitfall: the last step of a padded sequence is padding; here it is the last unmasked token. With
    a few hundred samples a linear classifier of pooled features does better (docs/which.md).
    Use when: sequences are unaligned (speech, video, text) and order matters.

    Settings:
        width: width w of each stream; even, and `num_heads` must divide it
        num_layers: layers of each crossmodal stack, at least 1 (paper: 5)
        memory_layers: layers of each modality's self-attention stack, at least 1 (paper: 5)
        num_heads: attention heads per layer
        dropout: dropout rate on the residual branches and in the final MLP, 0 to below 1

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
        width: int = 30,
        num_layers: int = 2,
        memory_layers: int = 2,
        num_heads: int = 5,
        dropout: float = 0.1,
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        if width % 2:
            raise FusionZooError(f"width={width} is odd: positions are pairs of sine and cosine")
        self.embed = nn.ModuleDict({m: nn.Linear(w, width, bias=False) for m, w in dims.items()})
        self.pairs = [(source, target) for target in dims for source in dims if source != target]
        self.crossmodal = (
            Stacks(len(self.pairs), width, num_layers, num_heads, dropout) if self.pairs else None
        )
        wide = width * max(1, len(dims) - 1)
        self.memory = nn.ModuleDict(
            {m: Stacks(1, wide, memory_layers, num_heads, dropout) for m in dims}
        )
        total = len(dims) * wide
        self.mlp = nn.Sequential(
            nn.Linear(total, total), nn.ReLU(), nn.Dropout(dropout), nn.Linear(total, total)
        )
        self.join = nn.Linear(total + len(dims), dim)
        self.head = nn.Linear(dim, num_outputs)

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        present = self.present(features)
        masks = {name: features[name].mask for name in self.dims}
        tokens = {
            name: with_positions(self.embed[name](x), masks[name])
            for name, x in self.tokens(features).items()
        }
        streams = self._self_attention(self._cross_attention(tokens, masks), masks)
        last_steps = [last_step(streams[name], mask) for name, mask in masks.items()]
        joined = torch.cat(last_steps, dim=-1)
        bits = present.to(joined.dtype)
        embedding = self.join(torch.cat([joined + self.mlp(joined), bits], dim=-1))
        embedding = self.or_null(embedding, present)
        return FusionOutput(embedding, self.head(embedding), {}, None)

    def _cross_attention(
        self, tokens: Mapping[str, Tensor], masks: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the concatenated streams of each target modality, one per source: (B, T, W)."""
        if self.crossmodal is None:
            return dict(tokens)
        groups = group_by_size([(masks[n].shape[1], masks[m].shape[1]) for n, m in self.pairs])
        weights = self.crossmodal.weights()
        streams: dict[int, Tensor] = {}
        weights_by_pair = split_weights(weights) if len(groups) > 1 else []
        for rows in groups:
            sources, targets = zip(*(self.pairs[row] for row in rows), strict=True)
            keys = torch.stack([masks[name] for name in sources])
            x = self.crossmodal(
                stack_weights([weights_by_pair[r] for r in rows]) if weights_by_pair else weights,
                torch.stack([tokens[name] for name in targets]),
                keys,
                torch.stack([tokens[name] for name in sources]),
            )
            streams |= zip(rows, x.unbind(0), strict=True)
        return {
            name: torch.cat([streams[r] for r, (_, m) in enumerate(self.pairs) if m == name], -1)
            for name in tokens
        }

    def _self_attention(
        self, streams: Mapping[str, Tensor], masks: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Run each modality's self-attention stack: (B, T, W) -> (B, T, W)."""
        names = list(streams)
        outputs: dict[str, Tensor] = {}
        for rows in group_by_size([x.shape[1] for x in streams.values()]):
            group = [names[row] for row in rows]
            x = self.memory[group[0]](
                stack_weights([self.memory[name].weights() for name in group]),  # type: ignore[operator]
                torch.stack([with_positions(streams[name], masks[name]) for name in group]),
                torch.stack([masks[name] for name in group]),
            )
            outputs |= zip(group, x.unbind(0), strict=True)
        return outputs


def group_by_size(sizes: Sequence[Hashable]) -> list[list[int]]:
    """Return the indices of equal sizes, grouped; each alone where a graph is exported.

    >>> group_by_size([5, 3, 5])
    [[0, 2], [1]]
    """
    if torch.compiler.is_exporting():  # a graph for any sizes
        return [[index] for index in range(len(sizes))]
    groups: dict[Hashable, list[int]] = {}
    for index, size in enumerate(sizes):
        groups.setdefault(size, []).append(index)
    return list(groups.values())


def with_positions(x: Tensor, mask: Tensor) -> Tensor:
    """Return sqrt(D) x + positions: (B, T, D), (B, T) -> (B, T, D)."""
    return math.sqrt(x.shape[-1]) * x + positions(mask, x.shape[-1], x)


def positions(mask: Tensor, width: int, like: Tensor) -> Tensor:
    """Return sinusoids of each token's index, not counting masked tokens: (B, T) -> (B, T, width).

    Dtype and device are those of `like`.
    """
    index = (mask.cumsum(1) - 1).clamp(min=0).to(like.dtype)
    rate = torch.arange(0, width, 2, device=mask.device, dtype=like.dtype)
    angle = index[..., None] * (-math.log(10000.0) / width * rate).exp()
    return rearrange([angle.sin(), angle.cos()], "n b t d -> b t (d n)")


def last_step(x: Tensor, mask: Tensor) -> Tensor:
    """Return the last unmasked token, (B, T, D), (B, T) -> (B, D); zeros if all are masked."""
    steps = torch.arange(mask.shape[1], device=mask.device)
    is_last = (steps == (mask * (steps + 1)).argmax(1, keepdim=True)) & mask
    return x.masked_fill(~is_last[..., None], 0).sum(1)
