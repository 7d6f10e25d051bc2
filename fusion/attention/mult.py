"""MulT: one crossmodal transformer for every ordered pair of modalities."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from fusionzoo.errors import FusionZooError
from fusionzoo.structures import Features, FusionOutput

from ..base import FUSIONS, Fusion
from ._stacks import Stacks, split_weights, stack_weights


@FUSIONS.register(family="attention", paper="Tsai et al. 2019, arXiv:1906.00295", reads="tokens")
class MulT(Fusion):
    """Attend from every modality to every other, then take the last step of each sequence.

    x_m = sqrt(w) E_m X_m + positions, w wide. For each source n and target m, `num_layers` pre-norm
    blocks (attention, ReLU MLP) have the running m-stream as queries and the fixed x_n, normalised
    by the block's first norm, as keys. H_m = [the streams of m] is W wide; h_m = last step of a
    self-attention stack over sqrt(W) H_m + positions; h = [h_1; ...; h_M; p], p one presence bit
    per modality; embedding = V (h + MLP(h)). Differs from the authors' code: padding is masked, no
    mask of future time steps, dropout on residuals only, and positions count from 0 with sine and
    cosine interleaved. Stacks with equal numbers of tokens run as one batch.

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
    """Return the indices of equal sizes, grouped.

    >>> group_by_size([5, 3, 5])
    [[0, 2], [1]]
    """
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
    is_last = F.one_hot((mask * (steps + 1)).argmax(1), mask.shape[1]).bool() & mask
    return x.masked_fill(~is_last[..., None], 0).sum(1)
