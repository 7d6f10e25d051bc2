"""Co-attention: every modality keeps its stream, and asks all others at every layer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fusionzoo.structures import Features, FusionOutput, masked_mean

from ..base import FUSIONS
from ._blocks import Attention, TokenFusion, join, perceptron


class Stream(nn.Module):
    """One layer of one modality's stream: itself, the others, a perceptron; 16 D^2 + 19 D."""

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
        """Update x (B, T, D); `normed` is its own norm, `others` (B, S, D) those of the others."""
        x = x + self.dropout(self.own(normed, normed, mask))
        x = x + self.dropout(self.across(self.question_norm(x), others, keys))
        return x + self.dropout(self.mlp(x))


@FUSIONS.register(
    family="attention",
    paper="Lu et al. 2019, arXiv:1908.02265; Dou et al. 2022, arXiv:2111.02387",
    reads="tokens",
)
class CoAttention(TokenFusion):
    """Run a transformer per modality whose layers also attend to all other modalities.

    Per layer and stream: x_m += SA(x_m); x_m += CA(x_m, [x_n]_{n != m}); x_m += MLP(x_m), where all
    streams read the states of the layer before (synchronous). embedding = W [mean LN(x_1); ...;
    mean LN(x_M); p] + c. Layers are METER's (Dou et al.): each attends to itself, then
    across; ViLBERT (Lu et al.) alternates blocks of both kinds. Differs from both: pre-norm, keys
    normed once by their own stream, any number of modalities, 2 layers by default (both: 6).

    Missing: never a key; its slot of the concatenation is 0. Without any other, the stream runs on.
    Pitfall: updating one stream after the other instead of at once makes their order matter.
    Use when: modalities of equal rank with rich tokens, and compute is no concern.

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
            new = {}
            for name, x in tokens.items():
                others = {n: y for n, y in normed.items() if n != name}
                context, keys = join(others, {n: masks[n] for n in others}, x)
                new[name] = layer[name](x, masks[name], normed[name], context, keys)  # type: ignore[index]
            tokens = new
        means = [masked_mean(self.norm(x), masks[name]) for name, x in tokens.items()]
        bits = present.to(means[0].dtype)
        embedding = self.or_null(self.join(torch.cat([*means, bits], dim=-1)), present)
        return FusionOutput(embedding, self.head(embedding), {}, None)
