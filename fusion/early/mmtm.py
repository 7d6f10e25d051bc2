"""Multimodal transfer module: squeeze-and-excitation across modalities."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from fusionzoo.errors import FusionZooError
from fusionzoo.structures import Features, FusionOutput, masked_mean

from ..base import FUSIONS, Fusion, present_mean


@FUSIONS.register(family="early", paper="Joze et al. 2020, arXiv:1911.08670", reads="tokens")
class MMTM(Fusion):
    """Rescale each modality's channels by gates that read all modalities, then average.

    S_m = mean of the unmasked tokens X_m; Z = ReLU(W [S_1; ...; S_M] + b); gate_m = g sigmoid(W_m Z
    + b_m); embedding = mean over present m of V_m (gate_m * S_m). A gate is the same for all
    tokens, so gating the tokens before averaging them would give the same result. With one modality
    this is squeeze-and-excitation. Differs from the authors' code, which stands between the
    convolutions of two networks and hands the gated maps on: there are no V_m and no mean over
    modalities in it.

    Missing: S_m = 0, and left out of the mean.
    Pitfall: padding must not count in S_m; the authors' public code has no mask.
    Use when: convolutional features of several modalities should recalibrate one another.

    Settings:
        ratio: reduction, Z has 2 sum_m D_m / ratio channels, of which at least 1 must remain
        gate: factor g, the upper limit of a gate; with 2, gates start near 1 (the authors' public
            code leaves the factor out)

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
        ratio: float = 4.0,
        gate: float = 2.0,
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        width = int(2 * sum(dims.values()) / ratio) if ratio > 0 else 0
        if width < 1:
            raise FusionZooError(f"ratio={ratio} leaves {width} squeezed channels; at least 1")
        self.gate = gate
        self.squeeze = nn.Linear(sum(dims.values()), width)
        self.excite = nn.ModuleDict({name: nn.Linear(width, w) for name, w in dims.items()})
        self.project = self.align()
        self.head = nn.Linear(dim, num_outputs)

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        present, tokens = self.present(features), self.tokens(features)
        means = {name: masked_mean(x, features[name].mask) for name, x in tokens.items()}
        squeezed = self.squeeze(torch.cat(list(means.values()), dim=-1)).relu()
        aligned = [
            self.project[name](self.gate * self.excite[name](squeezed).sigmoid() * x)
            for name, x in means.items()
        ]
        embedding = self.or_null(present_mean(torch.stack(aligned, dim=1), present), present)
        return FusionOutput(embedding, self.head(embedding), {}, None)
