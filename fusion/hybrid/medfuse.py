"""MedFuse: an LSTM that reads the present modalities as a sequence."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from fusionzoo.structures import Features, FusionOutput

from ..base import FUSIONS, Fusion


@FUSIONS.register(family="hybrid", paper="Hayat et al. 2022, arXiv:2207.07027", reads="pooled")
class MedFuse(Fusion):
    """Read the aligned vectors of the present modalities by an LSTM, in the order of `dims`.

    The sequence is a_m = V_m x_m of each present m; embedding = the last hidden state of one LSTM
    layer of width `dim`. Differs from the authors' code, for two modalities of which the first is
    always present and has no V_m: here any are missing. Their pre-training of each encoder alone is
    left to `--encoders.<name>.weights`.

    Missing: left out of the sequence, which gets shorter.
    Pitfall: complete training samples never show a shorter sequence: train with
    `modality_dropout` if modalities will be missing. The order of the modalities matters.
    Use when: you need the baseline of clinical papers.

    Shapes:
        features[name].pooled: (B, dims[name])
        returns: embedding (B, dim), logits (B, K)
    """

    def __init__(self, dims: Mapping[str, int], dim: int, num_outputs: int) -> None:
        super().__init__(dims, dim, num_outputs)
        self.project = self.align()
        self.cell = nn.LSTMCell(dim, dim)
        self.head = nn.Linear(dim, num_outputs)

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        aligned, present = self.aligned(features)
        hidden = cell = torch.zeros_like(aligned[:, 0])
        for x, here in zip(aligned.unbind(1), present.unbind(1), strict=True):
            new_hidden, new_cell = self.cell(x, (hidden, cell))
            hidden = torch.where(here[:, None], new_hidden, hidden)
            cell = torch.where(here[:, None], new_cell, cell)
        embedding = self.or_null(hidden, present)
        return FusionOutput(embedding, self.head(embedding), {}, None)
