"""Multiway transformer: attention over all tokens, a feed-forward expert for each modality."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from fusionzoo.errors import check_choice, check_number
from fusionzoo.structures import Features, FusionOutput, masked_mean

from ..base import FUSIONS, present_mean
from ._blocks import Attention, TokenFusion, TransformerBlock, attend, join, perceptron, transformer


@FUSIONS.register(
    family="attention",
    paper="Bao et al. 2022, arXiv:2111.02358; Wang et al. 2023, arXiv:2208.10442",
    reads="tokens",
)
class Multiway(TokenFusion):
    """Let all tokens attend to one another, then pass each through the MLP of its modality.

    x <- x + SA(LN x) over the tokens of all modalities; then x <- x + MLP_m(LN_m x) for tokens of
    modality m. In the last `fused_layers` (VLMo) one MLP serves all. embedding = mean over present
    m of the mean of LN(X_m). With `share="none"` (the BEiT-3 library) norms, queries, keys, values
    and outputs are also separate for each modality; the papers describe them as shared. Differs
    from the papers: a mean instead of a [CLS] token, and a few layers on top of the encoders.

    Missing: its tokens are masked as keys, and its MLPs do not run for the sample.
    Pitfall: trained on complete samples it has never seen a modality alone: train with
    `modality_dropout`. With a few hundred samples a linear classifier of pooled features does
    better (docs/which.md).
    Use when: the statistics of the modalities differ so much that one MLP fits them badly.

    Settings:
        num_layers: number of layers, at least 1 (papers: 12 to 40)
        fused_layers: number of last layers with one MLP for all modalities, 0 to `num_layers`
        share: "attention" for one attention per layer, "none" for separate weights per modality
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
        num_layers: int = 4,
        fused_layers: int = 2,
        share: Literal["attention", "none"] = "attention",
        num_heads: int = 4,
        dropout: float = 0.1,
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        check_choice("share", share, ("attention", "none"))
        check_number("num_layers", num_layers, 1)
        check_number("fused_layers", fused_layers, 0, num_layers + 1)
        layer = SharedAttention if share == "attention" else SeparateAttention
        self.layers = nn.ModuleList(
            layer([*dims], dim, num_heads, dropout) for _ in range(num_layers - fused_layers)
        )
        self.fused = transformer(fused_layers, dim, num_heads, dropout)

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        tokens, masks = self.embedded(features)
        present = self.present(features)
        for layer in self.layers:
            tokens = layer(tokens, masks)
        x, mask = join(tokens, masks, next(iter(tokens.values())))
        for block in self.fused:
            x = block(x, mask)
        parts = x.split([part.shape[1] for part in tokens.values()], dim=1)
        pairs = zip(parts, masks.values(), strict=True)
        means = torch.stack([masked_mean(self.norm(part), mask) for part, mask in pairs], dim=1)
        embedding = self.or_null(present_mean(means, present), present)
        return FusionOutput(embedding, self.head(embedding), {}, None)


class SharedAttention(nn.Module):
    """A layer with one attention; 4 D^2 + 6 D + M (8 D^2 + 7 D) parameters."""

    def __init__(self, names: list[str], dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attention = Attention(dim, num_heads)
        self.experts = nn.ModuleDict({name: perceptron(dim) for name in names})
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: dict[str, Tensor], masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Update the tokens of all modalities, {modality: (B, T, D)}."""
        x, mask = join(tokens, masks, next(iter(tokens.values())))
        normed = self.norm(x)
        x = x + self.dropout(self.attention(normed, normed, mask))
        parts = x.split([part.shape[1] for part in tokens.values()], dim=1)
        pairs = zip(tokens, parts, strict=True)
        return {name: y + self.dropout(self.experts[name](y)) for name, y in pairs}


class SeparateAttention(nn.Module):
    """A layer whose attention has queries, keys, values and outputs of each modality; M TB."""

    def __init__(self, names: list[str], dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.blocks = nn.ModuleDict(
            {name: TransformerBlock(dim, num_heads, dropout) for name in names}
        )

    def forward(self, tokens: dict[str, Tensor], masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Update the tokens of all modalities, {modality: (B, T, D)}."""
        blocks = {name: self.blocks[name] for name in tokens}
        normed = {name: block.norm(tokens[name]) for name, block in blocks.items()}  # type: ignore[operator]
        query = [block.attention.query(normed[name]) for name, block in blocks.items()]  # type: ignore[union-attr, operator]
        keys = [block.attention.key_value(normed[name]) for name, block in blocks.items()]  # type: ignore[union-attr, operator]
        mask = torch.cat([*masks.values()], dim=1)[:, None]
        attended = attend(torch.cat(query, dim=1), torch.cat(keys, dim=1), mask, self.num_heads)
        parts = attended.split([x.shape[1] for x in tokens.values()], dim=1)
        updated = {}
        for (name, block), part in zip(blocks.items(), parts, strict=True):
            out = torch.where(mask.any(-1, keepdim=True), block.attention.out(part), 0)  # type: ignore[union-attr, operator]
            x = tokens[name] + block.dropout(out)  # type: ignore[operator]
            updated[name] = x + block.dropout(block.mlp(x))  # type: ignore[operator]
        return updated
