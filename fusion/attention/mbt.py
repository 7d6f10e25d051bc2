"""Multimodal bottleneck transformer: modalities exchange information via a few shared tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusionzoo.errors import check_number
from fusionzoo.structures import Features, FusionOutput, masked_mean

from ..base import FUSIONS, present_mean
from ._blocks import TokenFusion, transformer


@FUSIONS.register(family="attention", paper="Nagrani et al. 2021, arXiv:2107.00135", reads="tokens")
class MBT(TokenFusion):
    """Run one transformer per modality; its later layers share a few bottleneck tokens.

    Layers below `fusion_layer` are unimodal. From there on [X_m; z] <- Block_m([X_m; z]) with the
    *same* z for every modality, followed by z <- mean over present m of the returned z, so that
    information needs two fusion layers to cross. embedding = mean over present m of the mean of
    LN(X_m). Differs from the paper, which fine-tunes 12-layer ViTs: a few layers on top of the
    encoders' tokens, without stochastic depth.

    Missing: does not update z and is left out of the mean.
    Pitfall: updating z modality by modality would make their order matter; with fewer than two
    fusion layers no information crosses. An answer that is only in the combination of three
    modalities may stay at chance for 60 epochs (results/LOG.md): look at the training loss. With a
    few hundred samples a linear classifier of pooled features does better (docs/which.md).
    Use when: token sequences are long and cross-modal exchange must have linear cost.

    Settings:
        num_layers: layers of each modality's transformer, at least 1 (paper: 12)
        fusion_layer: index of the first layer with bottleneck tokens, 0 to `num_layers`; the
            latter gives unimodal transformers (paper: 8)
        num_bottlenecks: number of bottleneck tokens z, at least 1
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
        fusion_layer: int = 2,
        num_bottlenecks: int = 4,
        num_heads: int = 4,
        dropout: float = 0.1,
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        check_number("fusion_layer", fusion_layer, 0, num_layers + 1)
        self.fusion_layer = fusion_layer
        self.bottlenecks = nn.Parameter(torch.randn(num_bottlenecks, dim) * 0.02)
        self.streams = nn.ModuleDict(
            {name: transformer(num_layers, dim, num_heads, dropout) for name in dims}
        )

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        tokens, masks = self.embedded(features)
        present = self.present(features)
        z = self.bottlenecks.to(next(iter(tokens.values())).dtype).expand(present.shape[0], -1, -1)
        for layer in range(len(next(iter(self.streams.values())))):  # type: ignore[arg-type]
            if layer < self.fusion_layer:
                tokens = {m: self.streams[m][layer](x, masks[m]) for m, x in tokens.items()}  # type: ignore[index]
            else:
                tokens, z = self._fuse(layer, tokens, masks, z, present)
        means = [masked_mean(self.norm(x), masks[name]) for name, x in tokens.items()]
        embedding = self.or_null(present_mean(torch.stack(means, dim=1), present), present)
        return FusionOutput(embedding, self.head(embedding), {}, None)

    def _fuse(
        self,
        layer: int,
        tokens: dict[str, Tensor],
        masks: dict[str, Tensor],
        z: Tensor,
        present: Tensor,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Run one fusion layer; all modalities read the z of the previous layer."""
        updated, bottlenecks = {}, []
        for name, x in tokens.items():
            mask = F.pad(masks[name], (0, z.shape[1]), value=True)
            output = self.streams[name][layer](torch.cat([x, z], dim=1), mask)  # type: ignore[index]
            updated[name], bottleneck = output.split([x.shape[1], z.shape[1]], dim=1)
            bottlenecks.append(bottleneck)
        return updated, present_mean(torch.stack(bottlenecks, dim=1), present)
