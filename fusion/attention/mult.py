"""MulT: a crossmodal transformer for every ordered pair of modalities."""

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
from ._stacks import Stacks, separate, together


@FUSIONS.register(family="attention", paper="Tsai et al. 2019, arXiv:1906.00295", reads="tokens")
class MulT(Fusion):
    """Translate every modality into every other by crossmodal attention, then read the last step.

    x_m = sqrt(w) E_m X_m + positions; for each source n and target m, `num_layers` pre-norm blocks
    (attention, ReLU perceptron) whose queries are the running m-stream and whose keys are the fixed
    x_n, normed by the block's first norm; H_m = [the streams of m], W wide; h_m = last step of a
    self-attention stack over sqrt(W) H_m + positions; h = [h_1; ...; h_M; p]; embedding = V (h +
    MLP(h)). Differs from the reference: 2 layers (5), no mask of the future, dropout on residuals
    only, positions counted from 0 with sine and cosine in turn; it has no padding mask, and here
    padding changes nothing. Stacks that read equally many tokens run as one.

    Missing: where the source is absent attention adds nothing, and the stream is the target's own;
    an absent target leaves zeros in the last join.
    Pitfall: "the last step" of a padded batch is a pad: here it is the last real token.
    Use when: unaligned sequences (speech, video, text) where order matters.

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
            name: placed(self.embed[name](x), masks[name])
            for name, x in self.tokens(features).items()
        }
        streams = self._remembered(self._translated(tokens, masks), masks)
        last = [last_step(streams[name], mask) for name, mask in masks.items()]
        joined = torch.cat(last, dim=-1)
        bits = present.to(joined.dtype)
        embedding = self.join(torch.cat([joined + self.mlp(joined), bits], dim=-1))
        embedding = self.or_null(embedding, present)
        return FusionOutput(embedding, self.head(embedding), {}, None)

    def _translated(
        self, tokens: Mapping[str, Tensor], masks: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return [the streams of m, each fed by one source]: (B, T, W) for each modality m."""
        if self.crossmodal is None:
            return dict(tokens)
        groups = alike([(masks[n].shape[1], masks[m].shape[1]) for n, m in self.pairs])
        weights = self.crossmodal.weights()
        streams: dict[int, Tensor] = {}
        each = separate(weights) if len(groups) > 1 else []
        for rows in groups:
            sources, targets = zip(*(self.pairs[row] for row in rows), strict=True)
            keys = torch.stack([masks[name] for name in sources])
            x = self.crossmodal(
                together([each[row] for row in rows]) if each else weights,
                torch.stack([tokens[name] for name in targets]),
                keys,
                torch.stack([tokens[name] for name in sources]),
            )
            streams |= zip(rows, x.unbind(0), strict=True)
        return {
            name: torch.cat([streams[r] for r, (_, m) in enumerate(self.pairs) if m == name], -1)
            for name in tokens
        }

    def _remembered(
        self, streams: Mapping[str, Tensor], masks: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Run each modality's self-attention stack: (B, T, W) -> (B, T, W)."""
        names = list(streams)
        answers: dict[str, Tensor] = {}
        for rows in alike([x.shape[1] for x in streams.values()]):
            some = [names[row] for row in rows]
            x = self.memory[some[0]](
                together([self.memory[name].weights() for name in some]),  # type: ignore[operator]
                torch.stack([placed(streams[name], masks[name]) for name in some]),
                torch.stack([masks[name] for name in some]),
            )
            answers |= zip(some, x.unbind(0), strict=True)
        return answers


def alike(sizes: Sequence[Hashable]) -> list[list[int]]:
    """Return the places of equal sizes, together.

    >>> alike([5, 3, 5])
    [[0, 2], [1]]
    """
    places: dict[Hashable, list[int]] = {}
    for place, size in enumerate(sizes):
        places.setdefault(size, []).append(place)
    return list(places.values())


def placed(x: Tensor, mask: Tensor) -> Tensor:
    """Return sqrt(D) x + positions: (B, T, D), (B, T) -> (B, T, D)."""
    return math.sqrt(x.shape[-1]) * x + positions(mask, x.shape[-1], x)


def positions(mask: Tensor, width: int, like: Tensor) -> Tensor:
    """Return sinusoids of each real token's index among the real ones: (B, T) -> (B, T, width)."""
    index = (mask.cumsum(1) - 1).clamp(min=0).to(like.dtype)
    rate = torch.arange(0, width, 2, device=mask.device, dtype=like.dtype)
    angle = index[..., None] * (-math.log(10000.0) / width * rate).exp()
    return rearrange([angle.sin(), angle.cos()], "n b t d -> b t (d n)")


def last_step(x: Tensor, mask: Tensor) -> Tensor:
    """Return the last real token, (B, T, D), (B, T) -> (B, D); zeros where there is none."""
    steps = torch.arange(mask.shape[1], device=mask.device)
    last = F.one_hot((mask * (steps + 1)).argmax(1), mask.shape[1]).bool() & mask
    return x.masked_fill(~last[..., None], 0).sum(1)
