"""Perceiver: a few latents read all tokens, at a cost linear in their number."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fusionzoo.structures import Features, FusionOutput

from ..base import FUSIONS
from ._blocks import Block, TokenFusion, join
from ._resampler import Resampler


@FUSIONS.register(
    family="attention",
    paper="Jaegle et al. 2021, arXiv:2103.03206; Alayrac et al. 2022, arXiv:2204.14198",
    reads="tokens",
)
class Perceiver(TokenFusion):
    """Let learned latents attend to the tokens of all modalities, then to one another.

    `depth` times: z += CA(z, tokens), z += MLP(z), then a self-attention block over z; embedding =
    mean of LN(z). `resampler=True`: Flamingo's form, keys are [tokens; z] in one attention and no
    self blocks. `io_decoder=True`: one learned query reads the embedding off the latents
    (Perceiver IO) instead of their mean.

    Missing: its tokens are no keys.
    Pitfall: latents that start equal stay equal: they start at random.
    Use when: very long or very many token sequences.

    Shapes:
        features[name].tokens: (B, T, dims[name]), any T for each
        returns: embedding (B, dim), logits (B, K)
    """

    symmetric = True

    def __init__(
        self,
        dims: Mapping[str, int],
        dim: int,
        num_outputs: int,
        *,
        num_latents: int = 16,
        depth: int = 2,
        num_heads: int = 4,
        resampler: bool = False,
        io_decoder: bool = False,
        dropout: float = 0.1,
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        self.resampler = Resampler(dim, num_latents, depth, num_heads) if resampler else None
        if self.resampler is None:
            self.latents = nn.Parameter(torch.randn(num_latents, dim) * 0.02)
            self.read = nn.ModuleList(
                Block(dim, num_heads, dropout, across=True) for _ in range(depth)
            )
            self.think = nn.ModuleList(Block(dim, num_heads, dropout) for _ in range(depth))
        self.decoder = Block(dim, num_heads, dropout, across=True) if io_decoder else None
        if io_decoder:
            self.query = nn.Parameter(torch.randn(dim) * 0.02)

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        embedded, masks = self.embedded(features)
        tokens, mask = join(embedded, masks, next(iter(embedded.values())))
        x = self._latents(tokens, mask) if self.resampler is None else self.resampler(tokens, mask)
        if self.decoder is not None:
            query = self.query.to(x.dtype).expand(len(x), 1, -1)
            x = self.decoder(query, mask.new_ones(x.shape[:2]), x)
        embedding = self.or_null(self.norm(x).mean(1), self.present(features))
        return FusionOutput(embedding, self.head(embedding), {}, None)

    def _latents(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = self.latents.to(tokens.dtype).expand(len(tokens), -1, -1)
        among = mask.new_ones(x.shape[:2])
        for read, think in zip(self.read, self.think, strict=True):
            x = think(read(x, mask, tokens), among)
        return x
