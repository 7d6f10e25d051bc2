"""Tensor fusion network: an MLP on the outer product of all modalities."""

from __future__ import annotations

from collections.abc import Mapping

from einops import einsum, rearrange
from torch import nn

from fusionzoo.structures import Features, FusionOutput

from ..base import FUSIONS, Fusion, RunningMeans
from ._bilinear import check_budget, narrow, with_ones


@FUSIONS.register(family="early", paper="Zadeh et al. 2017, arXiv:1707.07250", reads="pooled")
class TFN(Fusion):
    """Apply an MLP to the outer product of all [1; x_m].

    z = [1; x_1] x ... x [1; x_M], flattened; embedding = MLP(z) with two hidden layers. The leading
    ones make z include all products of fewer modalities. Differs from the authors' code: its MLP
    ends in a number that a sigmoid keeps between -3 and 3, here a classifier follows; x_m is first
    narrowed; its networks before the product (batch norm and three layers, an LSTM for text) are
    left to the encoders.

    Missing: x_m is replaced by its training mean.
    Pitfall: the product grows as D^M: beyond three modalities choose a small `proj_dim`, or `lmf`.
    Use when: there are two or three modalities and their products matter (synergy).

    Settings:
        proj_dim: modalities wider than this are first projected to it, at least 1 (paper: at most
            128)
        hidden: width of the two hidden layers, at least 1
        dropout: dropout rate on the flattened outer product, 0 to below 1
        budget: largest number of weights of the first layer; a larger one is an error

    Shapes:
        features[name].pooled: (B, dims[name])
        returns: embedding (B, dim), logits (B, K)
    """

    def __init__(
        self,
        dims: Mapping[str, int],
        dim: int,
        num_outputs: int,
        *,
        proj_dim: int = 32,
        hidden: int = 128,
        dropout: float = 0.1,
        budget: int = 20_000_000,
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        size = check_budget("tfn", dims, proj_dim, hidden, budget)
        self.means = RunningMeans(dims)
        self.narrow = narrow(dims, proj_dim)
        self.mlp = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(size, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, dim),
        )
        self.head = nn.Linear(dim, num_outputs)

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        present = self.present(features)
        first, *others = with_ones(self.means(self.pooled(features), present), self.narrow)
        outer = first
        for x in others:
            outer = rearrange(einsum(outer, x, "b i, b j -> b i j"), "b i j -> b (i j)")
        embedding = self.or_null(self.mlp(outer), present)
        return FusionOutput(embedding, self.head(embedding), {}, None)
