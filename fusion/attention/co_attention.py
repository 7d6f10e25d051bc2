"""Co-attention: one stream per modality, each attending to all others at every layer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fusionzoo.structures import Features, FusionOutput, masked_mean

from ..base import FUSIONS
from ._blocks import Attention, TokenFusion, join, perceptron


class Stream(nn.Module):
    """A layer of one modality's stream: self-attention, cross-attention, MLP.

    Has 16 D^2 + 19 D parameters.
    """

    def __init__(self, dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.own = Attention(dim, num_heads)
        self.question_norm = nn.LayerNorm(dim)
        self.across = Attention(dim, num_heads)
        self.mlp = perceptron(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, mask: Tensor, normed: Tensor, others: Tensor, keys: Tensor
    ) -> Tensor:
        """Update x (B, T, D).

        `normed` is x after this stream's norm, `others` (B, S, D) are the other streams' tokens
        after theirs, `keys` (B, S) is the mask of the latter.
        """
        x = x + self.dropout(self.own(normed, normed, mask))
        x = x + self.dropout(self.across(self.question_norm(x), others, keys))
        return x + self.dropout(self.mlp(x))


@FUSIONS.register(
    family="attention",
    paper="Lu et al. 2019, arXiv:1908.02265; Dou et al. 2022, arXiv:2111.02387",
    reads="tokens",
)
class CoAttention(TokenFusion):
    """Run one transformer per modality whose layers also attend to all other modalities.

    Per layer and stream: x_m += SA(x_m); x_m += CA(x_m, [x_n]_{n != m}); x_m += MLP(x_m), where all
    streams read the states of the previous layer. embedding = W [mean LN(x_1); ...; mean LN(x_M);
    p] + c, p one presence bit per modality. The layers are METER's (Dou et al.), with
    self-attention followed by cross-attention; ViLBERT (Lu et al.) alternates blocks of both
    kinds. Differs from both: pre-norm, keys normalised once by their own stream, any number of
    modalities.

    Missing: never a key, and 0 in the concatenation. If all other modalities are missing,
    cross-attention adds 0.
    Pitfall: updating the streams one after the other would make their order matter. With a few
    hundred samples a linear classifier of pooled features does better (docs/which.md).
    Use when: all modalities matter equally, have rich tokens, and compute is not a concern.

    Settings:
        num_layers: number of layers per stream, at least 1 (both papers: 6)
        num_heads: attention heads per layer; must divide `dim` (papers: 12 at width 768)
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
        num_heads: int = 4,
        dropout: float = 0.1,
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        self.layers = nn.ModuleList(
            nn.ModuleDict({name: Stream(dim, num_heads, dropout) for name in dims})
            for _ in range(num_layers)
        )
        self.join = nn.Linear(len(dims) * (dim + 1), dim)

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        tokens, masks = self.embedded(features)
        present = self.present(features)
        for layer in self.layers:
            normed = {name: layer[name].norm(x) for name, x in tokens.items()}  # type: ignore[index]
            updated = {}
            for name, x in tokens.items():
                others = {n: y for n, y in normed.items() if n != name}
                context, keys = join(others, {n: masks[n] for n in others}, x)
                updated[name] = layer[name](x, masks[name], normed[name], context, keys)  # type: ignore[index]
            tokens = updated
        means = [masked_mean(self.norm(x), masks[name]) for name, x in tokens.items()]
        bits = present.to(means[0].dtype)
        embedding = self.or_null(self.join(torch.cat([*means, bits], dim=-1)), present)
        return FusionOutput(embedding, self.head(embedding), {}, None)
