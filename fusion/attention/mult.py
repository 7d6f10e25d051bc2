"""MulT: a crossmodal transformer for every ordered pair of modalities."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ...errors import FusionZooError
from ...structures import Features, FusionOutput
from ..base import FUSIONS, Fusion
from ._blocks import Block


class Stack(nn.Module):
    """Pre-norm blocks and a final norm; keys are a fixed context, or the stream itself."""

    def __init__(self, dim: int, num_layers: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim, num_heads, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor, mask: Tensor, context: Tensor | None = None) -> Tensor:
        """Run x (B, T, D) through the blocks; mask (B, S) is that of the keys."""
        for block in self.blocks:
            x = block(x, mask, context)
        return self.norm(x)


@FUSIONS.register(family="attention", paper="Tsai et al. 2019, arXiv:1906.00295", reads="tokens")
class MulT(Fusion):
    """Translate every modality into every other by crossmodal attention, then read the last step.

    x_m = sqrt(w) E_m X_m + positions; for each source n and target m, `num_layers` blocks whose
    queries are the running m-stream and whose keys are the fixed x_n, normed by the block's first
    norm; h_m = last step of a self-attention stack over [the streams of m]; h = [h_1; ...; h_M; p];
    embedding = V (h + MLP(h)). Paper: 5 layers, and a mask of the future, left out here. The
    reference has no padding mask; here padding changes nothing.

    Missing: an absent source gives zeros in its slot; an absent target zeros in the last join.
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
        self.width = width
        self.embed = nn.ModuleDict({m: nn.Linear(w, width, bias=False) for m, w in dims.items()})
        self.pairs = nn.ModuleDict(
            {
                f"{source}->{target}": Stack(width, num_layers, num_heads, dropout)
                for target in dims
                for source in dims
                if source != target
            }
        )
        wide = width * max(1, len(dims) - 1)
        self.memory = nn.ModuleDict(
            {m: Stack(wide, memory_layers, num_heads, dropout) for m in dims}
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
            name: math.sqrt(self.width) * self.embed[name](x)
            + positions(masks[name], self.width, x)
            for name, x in self.tokens(features).items()
        }
        last = []
        for name in self.dims:
            stream = self.memory[name](self._translated(name, tokens, masks), masks[name])
            last.append(last_step(stream, masks[name]))
        joined = torch.cat(last, dim=-1)
        bits = present.to(joined.dtype)
        embedding = self.join(torch.cat([joined + self.mlp(joined), bits], dim=-1))
        embedding = self.or_null(embedding, present)
        return FusionOutput(embedding, self.head(embedding), {}, None)

    def _translated(
        self, target: str, tokens: Mapping[str, Tensor], masks: Mapping[str, Tensor]
    ) -> Tensor:
        """Return [the streams of `target`, each fed by one source], zeros for an absent source."""
        if len(tokens) == 1:
            return tokens[target]
        streams = []
        for source in tokens:
            if source != target:
                pair = self.pairs[f"{source}->{target}"]
                stream = pair(tokens[target], masks[source], tokens[source])
                streams.append(stream.masked_fill(~masks[source].any(1)[:, None, None], 0))
        return torch.cat(streams, dim=-1)


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
