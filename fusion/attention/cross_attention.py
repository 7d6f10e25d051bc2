"""Cross-attention: one modality asks, the others answer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ...errors import FusionZooError, did_you_mean
from ...structures import Features, FusionOutput, masked_mean
from ..base import FUSIONS
from ._blocks import Block, TokenFusion


@FUSIONS.register(family="attention", paper="Tsai et al. 2019, arXiv:1906.00295", reads="tokens")
class CrossAttention(TokenFusion):
    """Let the tokens of one modality attend to those of all others, layer after layer.

    x_q <- x_q + CA(x_q, [X_n]_{n != q}); x_q <- x_q + MLP(x_q); embedding = mean of LN(x_q).
    `query` names the asking modality (default: the first). A sample that lacks it asks with one
    learned token; a sample that has nothing else keeps its own stream. The one-directional form of
    the crossmodal block of the paper, without its future mask.

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
        query: str | None = None,
        num_layers: int = 2,
        num_heads: int = 4,
        dropout: float = 0.1,
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        self.query = next(iter(dims)) if query is None else query
        if self.query not in dims:
            raise FusionZooError(
                f"query={query!r} is no modality.{did_you_mean(self.query, dims)}"
                f" There are: {', '.join(dims)}."
            )
        self.blocks = nn.ModuleList(
            Block(dim, num_heads, dropout, across=True) for _ in range(num_layers)
        )
        self.asking = nn.Parameter(torch.randn(dim) * 0.02)

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        tokens, masks = self.embedded(features)
        x, mask = self._stream(tokens.pop(self.query), masks.pop(self.query))
        if tokens:
            context = torch.cat(list(tokens.values()), dim=1)
            keys = torch.cat(list(masks.values()), dim=1)
        else:
            context, keys = x, torch.zeros_like(mask)
        for block in self.blocks:
            x = block(x, keys, context)
        embedding = self.or_null(masked_mean(self.norm(x), mask), self.present(features))
        return FusionOutput(embedding, self.head(embedding), {}, None)

    def _stream(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Put the learned token first where a sample lacks the asking modality."""
        absent = ~mask.any(1, keepdim=True)
        asking = self.asking.to(x.dtype)
        first = torch.arange(mask.shape[1], device=mask.device) == 0
        return torch.where(absent[..., None], asking, x), mask | (absent & first)
