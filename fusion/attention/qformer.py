"""Q-Former: learned queries with self-attention and cross-attention to the modalities."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fusionzoo.errors import check_modality
from fusionzoo.structures import Features, FusionOutput

from ..base import FUSIONS
from ._blocks import Attention, TokenFusion, join, perceptron


class Layer(nn.Module):
    """Self-attention over queries and text, cross-attention of the queries, an MLP for each."""

    def __init__(
        self, dim: int, num_heads: int, dropout: float, *, across: bool, text: bool
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.own = Attention(dim, num_heads)
        self.question_norm = nn.LayerNorm(dim) if across else None
        self.context_norm = nn.LayerNorm(dim) if across else None
        self.across = Attention(dim, num_heads) if across else None
        self.mlp = perceptron(dim)
        self.text_mlp = perceptron(dim) if text else None
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, mask: Tensor, context: Tensor, keys: Tensor, queries: int
    ) -> Tensor:
        """Update x (B, R + T, D): R queries, then T text tokens; mask (B, R + T).

        Queries attend to context (B, S, D) where keys (B, S) is True. Without a text MLP, only the
        updated queries are returned.
        """
        normed = self.norm(x)
        x = x + self.dropout(self.own(normed, normed, mask))
        q, text = x[:, :queries], x[:, queries:]
        if self.across is not None:
            assert self.question_norm is not None
            assert self.context_norm is not None
            q = q + self.dropout(
                self.across(self.question_norm(q), self.context_norm(context), keys)
            )
        q = q + self.dropout(self.mlp(q))
        if self.text_mlp is None:
            return q
        return torch.cat([q, text + self.dropout(self.text_mlp(text))], dim=1)


@FUSIONS.register(family="attention", paper="Li et al. 2023, arXiv:2301.12597", reads="tokens")
class QFormer(TokenFusion):
    """Let learned queries attend to one another and, in every second layer, to the modalities.

    x = [queries; text]; per layer x += SA(x); in layers 0, 2, ... queries += CA(queries, other
    modalities); then an MLP, one for queries and one for text. embedding = mean of LN(queries).
    Differs from BLIP-2, whose Q-Former has 12 layers of width 768: a few layers on top of the
    encoders' tokens.

    Missing: masked as keys; if all modalities are missing, cross-attention adds 0.
    Pitfall: for contrastive training the queries must not attend to the text, or the target leaks.
    Use when: you need a few tokens from long inputs, for example in front of a language model.

    Settings:
        num_queries: number of learned queries, at least 1
        text: name of the modality that shares self-attention with the queries; None for no such
            modality
        num_layers: number of layers, at least 1 (paper: 12)
        num_heads: attention heads per layer; must divide `dim`
        dropout: dropout rate on the output of each attention and MLP, 0 to below 1

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
        num_queries: int = 32,
        text: str | None = None,
        num_layers: int = 2,
        num_heads: int = 4,
        dropout: float = 0.1,
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        self.text = None if text is None else check_modality("text", text, dims)
        self.queries = nn.Parameter(torch.randn(num_queries, dim) * 0.02)
        others = len(dims) > (text is not None)
        self.layers = nn.ModuleList(
            Layer(
                dim,
                num_heads,
                dropout,
                across=others and number % 2 == 0,
                text=self.text is not None and number < num_layers - 1,
            )
            for number in range(num_layers)
        )

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        tokens, masks = self.embedded(features)
        present, count = self.present(features), len(self.queries)
        x = self.queries.to(next(iter(tokens.values())).dtype).expand(present.shape[0], -1, -1)
        mask = present.new_ones(x.shape[:2])
        if self.text is not None:
            text, text_mask = tokens.pop(self.text), masks.pop(self.text)
            x, mask = torch.cat([x, text], dim=1), torch.cat([mask, text_mask], dim=1)
        context, keys = join(tokens, masks, x)
        for layer in self.layers:
            x = layer(x, mask, context, keys, count)
        embedding = self.or_null(self.norm(x[:, :count]).mean(1), present)
        return FusionOutput(embedding, self.head(embedding), {}, None)
