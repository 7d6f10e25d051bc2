"""Transformer blocks with masked keys; a row without any key passes through unchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from torch import Tensor, nn

from fusionzoo.errors import check_heads, check_number
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


class TransformerBlock(nn.Module):
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


def transformer(
    num_layers: int, dim: int, num_heads: int, dropout: float, *, across: bool = False
) -> nn.ModuleList:
    """Return a list of `TransformerBlock`."""
    blocks = (TransformerBlock(dim, num_heads, dropout, across=across) for _ in range(num_layers))
    return nn.ModuleList(blocks)


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
        return like[:, :1], torch.zeros(like.shape[0], 1, dtype=torch.bool, device=like.device)
    return torch.cat(list(tokens.values()), dim=1), torch.cat(list(masks.values()), dim=1)


def with_stand_in(x: Tensor, mask: Tensor, stand_in: Tensor) -> tuple[Tensor, Tensor]:
    """Replace the tokens of rows without any by one learned token (D,): x (B, T, D), mask (B, T).

    Every position of such a row holds the learned token; only the first is unmasked.
    """
    absent = ~mask.any(1, keepdim=True)
    is_first = torch.arange(mask.shape[1], device=mask.device) == 0
    return torch.where(absent[..., None], stand_in.to(x.dtype), x), mask | (absent & is_first)


class Streams(TokenFusion):
    """Run the tokens of all modalities and learned fusion tokens through one masked transformer.

    A token of modality m attends to the tokens of m only. The fusion tokens form `channels`, each a
    group of modalities (columns): those of a channel attend to its modalities' tokens and to one
    another. After the last block, a learned query for each modality and channel pools its tokens.
    """

    def __init__(
        self,
        dims: Mapping[str, int],
        dim: int,
        num_outputs: int,
        channels: Sequence[Sequence[int]],
        channel_tokens: int,
        num_layers: int,
        num_heads: int,
        dropout: float,
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        self.channels = [tuple(channel) for channel in channels]
        self.fusion_tokens = nn.Parameter(torch.randn(len(channels), channel_tokens, dim) * 0.02)
        self.blocks = transformer(num_layers, dim, num_heads, dropout)
        self.queries = nn.ParameterDict({name: torch.randn(dim) * 0.02 for name in dims})
        self.channel_queries = nn.Parameter(torch.randn(len(channels), dim) * 0.02)
        self.pool = Attention(dim, num_heads)

    def pooled_streams(self, features: Mapping[str, Features]) -> Tensor:
        """Return a vector for each modality, then for each channel: (B, M + Q, D).

        That of a modality or channel without any token is its query.
        """
        embedded, masks = self.embedded(features)
        x, mask = torch.cat([*embedded.values()], dim=1), torch.cat([*masks.values()], dim=1)
        fusion_tokens = self.fusion_tokens.flatten(0, 1).to(x.dtype)
        x = torch.cat([x, fusion_tokens.expand(x.shape[0], -1, -1)], dim=1)
        mask = F.pad(mask, (0, fusion_tokens.shape[0]), value=True)
        stream = self._stream_of_tokens(masks)
        reads = self._reads(mask.device)
        visible = mask[:, None] & reads[stream][:, stream]
        x = self.norm(self.transform(x, visible))
        queries = torch.cat(
            [torch.stack([self.queries[name] for name in self.dims]), self.channel_queries]
        )
        queries = queries.to(x.dtype).expand(x.shape[0], -1, -1)
        own_tokens = torch.arange(queries.shape[1], device=mask.device)[:, None] == stream
        return queries + self.pool(queries, x, mask[:, None] & own_tokens)

    def transform(self, x: Tensor, visible: Tensor) -> Tensor:
        """Run x (B, S, D) through all blocks; t attends to s where visible (B, t, s) is True."""
        for block in self.blocks:
            x = block(x, visible)
        return x

    def _stream_of_tokens(self, masks: Mapping[str, Tensor]) -> Tensor:
        """Return the number of the modality, or M + that of the channel, of each token: (S,)."""
        lengths = [mask.shape[1] for mask in masks.values()]
        lengths += [self.fusion_tokens.shape[1]] * len(self.channels)
        device = self.fusion_tokens.device
        pieces = [torch.full((n,), number, device=device) for number, n in enumerate(lengths)]
        return torch.cat(pieces)

    def _reads(self, device: torch.device) -> Tensor:
        """Return which streams attend to which others: (M + Q, M + Q)."""
        count = len(self.dims) + len(self.channels)
        rows = [
            [column in ({row} | self._members(row)) for column in range(count)]
            for row in range(count)
        ]
        return torch.tensor(rows, device=device)

    def _members(self, stream: int) -> set[int]:
        """Return the modalities that a stream reads."""
        count = len(self.dims)
        return {stream} if stream < count else set(self.channels[stream - count])


class TokenResampler(nn.Module):
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
        x = self.latents.to(tokens.dtype).expand(tokens.shape[0], -1, -1)
        keys = F.pad(mask, (0, x.shape[1]), value=True)
        for layer in self.layers:
            normed = layer["norm"](x)  # type: ignore[index]
            context = torch.cat([layer["token_norm"](tokens), normed], dim=1)  # type: ignore[index]
            x = x + layer["attention"](normed, context, keys)  # type: ignore[index]
            x = x + layer["mlp"](x)  # type: ignore[index]
        return x


class Experts(nn.Module):
    """E expert MLPs of 8 D^2 + 5 D parameters each; a token uses those with a non-zero gate."""

    def __init__(self, dim: int, num_experts: int) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(num_experts, dim, 4 * dim) * dim**-0.5)
        self.wide_bias = nn.Parameter(torch.zeros(num_experts, 4 * dim))
        self.narrow = nn.Parameter(torch.randn(num_experts, 4 * dim, dim) * (4 * dim) ** -0.5)
        self.narrow_bias = nn.Parameter(torch.zeros(num_experts, dim))

    def forward(self, x: Tensor, gates: Tensor) -> Tensor:
        """Return sum_e gates_e E_e(x): x (N, D), gates (N, E), zero for experts not selected.

        Compiled and exported graphs need static shapes: there every expert processes every token,
        which gives the same sum.
        """
        if torch.compiler.is_compiling():
            hidden = F.gelu(einsum(x, self.wide, "n d, e d h -> e n h") + self.wide_bias[:, None])
            outputs = einsum(hidden, self.narrow, "e n h, e h d -> e n d")
            outputs = outputs + self.narrow_bias[:, None]
            return einsum(outputs, gates, "e n d, n e -> n d")
        rows_by_expert = [column.nonzero()[:, 0] for column in gates.unbind(1)]
        # unbind instead of indexing: the gradient of an index is as large as all experts together
        weights = (self.wide, self.wide_bias, self.narrow, self.narrow_bias)
        experts = zip(rows_by_expert, gates.unbind(1), *(w.unbind(0) for w in weights), strict=True)
        outputs_by_expert = [
            gate[rows, None] * (F.gelu(x[rows] @ wide + wide_bias) @ narrow + narrow_bias)
            for rows, gate, wide, wide_bias, narrow, narrow_bias in experts
        ]
        values = torch.cat(outputs_by_expert)
        out = torch.zeros_like(x, dtype=values.dtype)
        return out.index_add(0, torch.cat(rows_by_expert), values).to(x.dtype)


class Routing(NamedTuple):
    """Router output for N tokens; each field has shape (N, E)."""

    scores: Tensor
    gates: Tensor  # rows sum to 1 over the selected experts
    load: Tensor  # training: probability that the expert is selected; else 1 if it is, 0 if not


class Router(nn.Module):
    """Score the experts for each token, by x W or by -|x - w_e| (Laplace), and select the `top_k`.

    In training, normal noise of standard deviation `noise` is added to the scores. The probability
    of being selected under this noise has a gradient for every expert (Shazeer et al. 2017,
    arXiv:1701.06538, appendix A), the gates only for the selected ones.
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int,
        gate: Literal["softmax", "laplace"],
        noise: float,
    ) -> None:
        super().__init__()
        check_number("top_k", top_k, 1, num_experts + 1)
        self.top_k, self.gate, self.noise = top_k, gate, noise
        self.centres = nn.Parameter(torch.randn(num_experts, dim) * dim**-0.5)

    def forward(self, x: Tensor, routed: Tensor) -> Routing:
        """Route tokens (N, D); those with `routed` (N,) False get no expert."""
        scores = self.scores(x)
        noisy = scores + self.noise * torch.randn_like(scores) if self.training else scores
        highest = noisy.topk(min(self.top_k + 1, len(self.centres)), dim=-1)
        values, indices = highest.values[:, : self.top_k], highest.indices[:, : self.top_k]
        shares = values.softmax(-1)  # float32 under CUDA's autocast, whatever the scores are
        gates = torch.zeros_like(noisy, dtype=shares.dtype).scatter(1, indices, shares)
        if self.training and self.noise > 0 and self.top_k < len(self.centres):
            load = self._selection_probability(scores, noisy, highest.values)
        else:
            load = (gates > 0).to(gates.dtype)
        unrouted = ~routed[:, None]
        return Routing(scores, gates.masked_fill(unrouted, 0), load.masked_fill(unrouted, 0))

    def _selection_probability(self, scores: Tensor, noisy: Tensor, highest: Tensor) -> Tensor:
        """Return P(score + new noise is among the `top_k`), the others' noise as drawn: (N, E).

        highest (N, top_k + 1): the highest noisy scores. To be selected, an expert must exceed the
        k-th highest of the others: number k + 1 of all if it is selected itself, else number k.
        """
        selected = noisy > highest[:, -1:]
        threshold = torch.where(selected, highest[:, -1:], highest[:, -2:-1])
        return torch.special.ndtr((scores - threshold) / self.noise)

    def scores(self, x: Tensor) -> Tensor:
        """Return the score of each expert for each token: (N, D) -> (N, E)."""
        if self.gate == "softmax":
            return x @ self.centres.T
        # |x|^2 - 2 x c + |c|^2 avoids (N, E, D) differences. The terms cancel: not in bfloat16.
        with torch.autocast(x.device.type, enabled=False):
            x = x.to(self.centres.dtype)
            squared_norms = x.square().sum(-1, keepdim=True) + self.centres.square().sum(-1)
            squared_distances = squared_norms - 2 * x @ self.centres.T
            return -squared_distances.clamp(min=1e-12).sqrt()


def imbalance(gates: Tensor, load: Tensor) -> Tensor:
    """Return CV^2 of the experts' importance plus CV^2 of their load: (N, E) x 2 -> ().

    Importance is the sum of an expert's gates, load its expected number of tokens; CV is the
    coefficient of variation over the experts.
    """
    return _squared_variation(gates.sum(0)) + _squared_variation(load.sum(0))


def _squared_variation(x: Tensor) -> Tensor:
    return x.var(unbiased=False) / (x.mean().square() + 1e-10)
