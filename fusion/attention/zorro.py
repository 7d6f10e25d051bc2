"""Zorro: fusion tokens read every modality, each modality reads only itself."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fusionzoo.errors import check_number
from fusionzoo.structures import Features, FusionOutput, StepContext

from ..base import FUSIONS, present_mean
from ._blocks import Streams


@FUSIONS.register(
    family="attention", paper="Recasens et al. 2023, arXiv:2301.09595", reads="tokens"
)
class Zorro(Streams):
    """Let fusion tokens attend to all modalities, and each modality's tokens to their own only.

    x = [X_1 + t_1; ...; X_M + t_M; F] through L pre-norm blocks that all tokens share; a token of
    modality m attends to tokens of m, a fusion token to all. A learned query for each modality, and
    for F, attends to its tokens: h_m and h; embedding = h, and one head classifies h and every
    h_m. Loss: CE(h) + mean over present m of CE(h_m). Differs from the paper, which trains h and
    h_m by contrastive losses, or by separate heads: this is a supervised form with one head.

    Missing: its tokens are masked as keys, so h reads what is present; its own logits are 0, and
    its CE is left out.
    Pitfall: the fusion tokens of a model trained on complete samples have seen no subset: train
    with `modality_dropout`, or take `mca`. With a few hundred samples a linear classifier of pooled
    features does better (docs/which.md).
    Use when: one model must answer for all modalities together and for each alone.

    Settings:
        num_fusion_tokens: number of fusion tokens F, at least 1
        num_layers: number L of transformer blocks, at least 1 (four need more steps to learn an
            exclusive or)
        num_heads: attention heads per block; must divide `dim` (public code: 8)
        dropout: dropout rate on the output of each attention and MLP, 0 to below 1

    Shapes:
        features[name].tokens: (B, T, dims[name]), any T for each
        returns: embedding (B, dim), logits (B, K), unimodal {modality: (B, K)}
    """

    symmetric = True

    def __init__(
        self,
        dims: Mapping[str, int],
        dim: int,
        num_outputs: int,
        *,
        num_fusion_tokens: int = 16,
        num_layers: int = 2,
        num_heads: int = 4,
        dropout: float = 0.1,
    ) -> None:
        check_number("num_fusion_tokens", num_fusion_tokens, 1)
        channels = [range(len(dims))]
        sizes = (num_fusion_tokens, num_layers, num_heads, dropout)
        super().__init__(dims, dim, num_outputs, channels, *sizes)

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        present = self.present(features)
        vectors = self.pooled_streams(features)
        embedding = self.or_null(vectors[:, -1], present)
        unimodal = self.head(vectors[:, :-1]).masked_fill(~present[..., None], 0)
        logits_by_modality = dict(zip(self.dims, unimodal.unbind(1), strict=True))
        extra = {"present": present}
        return FusionOutput(embedding, self.head(embedding), logits_by_modality, None, extra)

    def loss(self, output: FusionOutput, target: Tensor, context: StepContext) -> Tensor:
        losses = [context.criterion(logits, target) for logits in output.unimodal.values()]
        unimodal_loss = present_mean(torch.stack(losses, dim=1), output.extra["present"])
        return context.criterion(output.logits, target) + unimodal_loss
