"""Single-stream transformer over the tokens of all modalities."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

from fusionzoo.structures import Features, FusionOutput

from ..base import FUSIONS
from ._blocks import TokenFusion, transformer


@FUSIONS.register(family="attention", paper="Dou et al. 2022, arXiv:2111.02387", reads="tokens")
class ConcatTransformer(TokenFusion):
    """Apply one transformer to the tokens of all modalities; the embedding is its [CLS] token.

    x = [cls; E_1 X_1 + t_1; ...; E_M X_M + t_M] through L pre-norm blocks; embedding = LN(x)_cls.
    Padding is masked. This is the merged attention of METER. No positional embeddings are added:
    the encoders' tokens already contain them. Rheude et al. (2025, arXiv:2512.22991) take the same
    design, a projection of each modality and one Transformer, as their baseline SimBaMM, also with
    one token of each modality (`max_tokens` of benchmark.py); width, depth and rates there were
    tuned for each data set, so none of them is the default here.

    Missing: its tokens are masked as keys.
    Pitfall: cost grows with the square of the total number of tokens; that of `mbt` and `perceiver`
    grows more slowly. With a few hundred samples a linear classifier of pooled features does better
    (docs/which.md).
    Use when: tokens should interact across modalities and sequences are short.

    Settings:
        num_layers: number L of transformer blocks, at least 1 (METER: 12; few are enough on
            features of pre-trained encoders)
        num_heads: attention heads per block; must divide `dim`
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
        num_layers: int = 2,
        num_heads: int = 4,
        dropout: float = 0.1,
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        self.cls = nn.Parameter(torch.randn(dim) * 0.02)
        self.blocks = transformer(num_layers, dim, num_heads, dropout)

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        tokens, masks = self.embedded(features)
        present = self.present(features)
        cls = self.cls.to(next(iter(tokens.values())).dtype).expand(present.shape[0], 1, -1)
        x = torch.cat([cls, *tokens.values()], dim=1)
        mask = F.pad(torch.cat(list(masks.values()), dim=1), (1, 0), value=True)
        for block in self.blocks:
            x = block(x, mask)
        embedding = self.or_null(self.norm(x[:, 0]), present)
        return FusionOutput(embedding, self.head(embedding), {}, None)
