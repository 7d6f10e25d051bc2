"""HEALNet: one set of latents reads the modalities one after the other, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusionzoo.errors import check_number
from fusionzoo.structures import Features, FusionOutput

from ..base import FUSIONS, Fusion
from ._blocks import attend


@FUSIONS.register(family="attention", paper="Hemker et al. 2024, arXiv:2311.09115", reads="tokens")
class HEALNet(Fusion):
    """Let learned latents attend to the tokens of one modality after the other, layer by layer.

    In each of L layers, for each modality m in the order of `dims`: z += CA_m(z, X_m), z +=
    FF_m(z), both after a layer norm and with weights for each layer and modality; with
    `self_attention` also z += SA(z), z += FF(z), with one SA per layer. CA reads tokens of the
    modality's own width, without biases, by a softmax at temperature 1/2 and a leaky ReLU behind
    the output; FF gates by SELU. embedding = LN(mean of z). The encoders' tokens contain positions;
    none are added. Differs from the authors' code: dropout is on what an attention gives, not on
    its weights.

    Missing: its steps are skipped, for each sample (in the public code only those of CA, unless it
    is verbose).
    Pitfall: later modalities see what earlier ones wrote, so their order matters. Complete training
    samples never show a skipped step: train with `modality_dropout` if modalities will be missing.
    Tokens are layer-normed as they are, so what only shifts all features of a token alike is lost.
    With a few hundred samples a linear classifier of pooled features does better (docs/which.md).
    Use when: modalities differ much in width and number of tokens (whole slides beside a table).

    Settings:
        num_layers: number L of layers, at least 1 (paper: 2 to 5, public code: 3)
        num_latents: number of latents z, at least 1 (paper: 16 to 25; public code: 128)
        num_heads: attention heads, at least 1 (public code: 8)
        head_dim: width of a head, at least 1
        self_attention: whether self-attention follows each step (public code: yes, but no in the
            paper's tuned settings)
        dropout: dropout rate on the output of each attention and MLP, 0 to below 1

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
        num_layers: int = 2,
        num_latents: int = 16,
        num_heads: int = 4,
        head_dim: int = 64,
        self_attention: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        sizes = {"num_layers": num_layers, "num_latents": num_latents}
        for name, size in {**sizes, "num_heads": num_heads, "head_dim": head_dim}.items():
            check_number(name, size, 1)

        def step(context_dim: int | None) -> Step:
            return Step(dim, context_dim, num_heads, head_dim, dropout)

        self.latents = nn.Parameter(torch.randn(num_latents, dim))
        self.read = nn.ModuleList(
            nn.ModuleDict({name: step(width) for name, width in dims.items()})
            for _ in range(num_layers)
        )
        self.think = nn.ModuleList(step(None) for _ in range(num_layers * self_attention))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_outputs)

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        tokens, present = self.tokens(features), self.present(features)
        z = self.latents.to(next(iter(tokens.values())).dtype).expand(present.shape[0], -1, -1)
        for layer, steps in enumerate(self.read):
            for column, name in enumerate(self.dims):
                updated = steps[name](z, tokens[name], features[name].mask)  # type: ignore[index]
                if self.think:
                    updated = self.think[layer](updated)
                z = torch.where(present[:, column, None, None], updated, z)
        embedding = self.or_null(self.norm(z.mean(1)), present)
        return FusionOutput(embedding, self.head(embedding), {}, None)


class Step(nn.Module):
    """Let latents attend to a context, or to themselves, then pass through an MLP; both residual.

    The attention's inner width is i = heads x head width; with a context of width C it has
    D i + 2 C i + i D + D + 2 D + 2 C parameters. The MLP has 12 D^2 + 11 D.
    """

    def __init__(
        self, dim: int, context_dim: int | None, num_heads: int, head_dim: int, dropout: float
    ) -> None:
        super().__init__()
        inner = num_heads * head_dim
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(dim)
        self.context_norm = None if context_dim is None else nn.LayerNorm(context_dim)
        self.query = nn.Linear(dim, inner, bias=False)
        self.key_value = nn.Linear(context_dim or dim, 2 * inner, bias=False)
        self.out = nn.Linear(inner, dim)
        self.mlp_norm = nn.LayerNorm(dim)
        self.wide = nn.Linear(dim, 8 * dim)
        self.narrow = nn.Linear(4 * dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, z: Tensor, context: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Update z (B, R, D) by context (B, S, C) where mask (B, S) is True, or by z itself."""
        normed = self.norm(z)
        keys = normed
        if self.context_norm is not None:
            assert context is not None
            keys = self.context_norm(context)
        visible = keys.new_ones(keys.shape[:2], dtype=torch.bool) if mask is None else mask
        query = 2 * self.query(normed)  # softmax at temperature 1/2
        attended = attend(query, self.key_value(keys), visible[:, None], self.num_heads)
        z = z + self.dropout(F.leaky_relu(self.out(attended), 0.01))
        values, gates = self.wide(self.mlp_norm(z)).chunk(2, dim=-1)
        return z + self.dropout(self.narrow(values * F.selu(gates)))
