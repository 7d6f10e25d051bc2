"""Perceiver: a few latents attend to all tokens, at a cost linear in their number."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fusionzoo.structures import Features, FusionOutput

from ..base import FUSIONS
from ._blocks import TokenFusion, TokenResampler, TransformerBlock, join, transformer


@FUSIONS.register(
    family="attention",
    paper="Jaegle et al. 2021, arXiv:2103.03206; Alayrac et al. 2022, arXiv:2204.14198",
    reads="tokens",
)
class Perceiver(TokenFusion):
    """Let learned latents attend to the tokens of all modalities, then to one another.

    `depth` times: z += CA(z, tokens), z += MLP(z), then a self-attention block over z; embedding =
    mean of LN(z). With `resampler`, Flamingo's form (Alayrac et al.): the keys are [tokens; z] and
    there are no self-attention blocks. With `io_decoder`, one learned query attends to the latents
    (Perceiver IO) and replaces their mean.

    Missing: its tokens are masked as keys.
    Pitfall: latents with equal initial values stay equal; they are initialised at random. With a
    few hundred samples a linear classifier of pooled features does better (docs/which.md).
    Use when: token sequences are very long or very many.

    Settings:
        num_latents: number of latents z, at least 1 (Flamingo: 64)
        depth: number of times the latents attend to the tokens, at least 1 (Flamingo: 6)
        num_heads: attention heads per layer; must divide `dim` (Flamingo: 8)
        resampler: whether to use Flamingo's form
        io_decoder: whether a learned query reads the embedding from the latents
        dropout: dropout rate on the output of each attention and MLP, 0 to below 1; not in the
            resampler

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
        self.resampler = TokenResampler(dim, num_latents, depth, num_heads) if resampler else None
        if self.resampler is None:
            self.latents = nn.Parameter(torch.randn(num_latents, dim) * 0.02)
            self.read = transformer(depth, dim, num_heads, dropout, across=True)
            self.think = transformer(depth, dim, num_heads, dropout)
        self.decoder = (
            TransformerBlock(dim, num_heads, dropout, across=True) if io_decoder else None
        )
        if io_decoder:
            self.query = nn.Parameter(torch.randn(dim) * 0.02)

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        embedded, masks = self.embedded(features)
        tokens, mask = join(embedded, masks, next(iter(embedded.values())))
        x = self._latents(tokens, mask) if self.resampler is None else self.resampler(tokens, mask)
        if self.decoder is not None:
            query = self.query.to(x.dtype).expand(x.shape[0], 1, -1)
            x = self.decoder(query, mask.new_ones(x.shape[:2]), x)
        embedding = self.or_null(self.norm(x).mean(1), self.present(features))
        return FusionOutput(embedding, self.head(embedding), {}, None)

    def _latents(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Run the latents through all layers: tokens (B, S, D), mask (B, S) -> (B, R, D)."""
        x = self.latents.to(tokens.dtype).expand(tokens.shape[0], -1, -1)
        latent_mask = mask.new_ones(x.shape[:2])
        for cross_block, self_block in zip(self.read, self.think, strict=True):
            x = self_block(cross_block(x, mask, tokens), latent_mask)
        return x
