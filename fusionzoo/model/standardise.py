"""Features of frozen encoders, brought to mean 0 and one scale."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from fusionzoo.structures import Features

RAW_KINDS = ("vector", "sequence")  # columns of the user's, each with a unit of its own
Method = Literal["auto", "zscore", "minmax"]
LENGTH = 5.0  # root mean square of the scaled vectors' lengths (results/LOG.md compares 1 to 36)


class Moments(NamedTuple):
    """Number, mean, squared deviations (summed) and range of rows; the parts' give the whole's."""

    num_rows: int
    mean: Tensor  # (D,) float64
    squares: Tensor  # (D,) float64
    low: Tensor  # (D,) float64, infinite without rows
    high: Tensor  # (D,) float64, minus infinity without rows

    @classmethod
    def of(cls, rows: Tensor) -> Moments:
        """Measure rows (N, D), in single precision."""
        if not len(rows):
            zeros = torch.zeros(rows.shape[1], dtype=torch.float64)
            return cls(0, zeros, zeros, zeros + torch.inf, zeros - torch.inf)
        variance, mean = torch.var_mean(rows.float(), dim=0, correction=0)
        low, high = (x.cpu().double() for x in rows.float().aminmax(dim=0))
        return cls(len(rows), mean.cpu().double(), variance.cpu().double() * len(rows), low, high)

    @property
    def variance(self) -> Tensor:
        """The variance of each dimension, zero without rows: (D,) float32."""
        return (self.squares / max(1, self.num_rows)).float()

    def merge(self, other: Moments) -> Moments:
        """Return the moments of the rows of both (Chan et al. 1979)."""
        num_rows = self.num_rows + other.num_rows
        share = other.num_rows / max(1, num_rows)
        shift = other.mean - self.mean
        squares = self.squares + other.squares + shift.square() * self.num_rows * share
        low, high = self.low.minimum(other.low), self.high.maximum(other.high)
        return Moments(num_rows, self.mean + shift * share, squares, low, high)


class Standardise(nn.Module):
    """Centre one modality's features and scale them, by default to a common length.

    The pooled vector and the tokens have statistics of their own. An encoder's output is divided by
    a single number, which keeps the proportions of its dimensions; with `per_feature` each
    dimension is also divided by its own std, as columns with different units need it. With the
    method `zscore` each dimension has mean 0 and std 1 on the training split, with `minmax` it
    ranges from 0 to 1. A dimension that is constant there is only centred. Buffers are stored with
    the model.
    """

    pooled_mean: Tensor
    pooled_scale: Tensor
    token_mean: Tensor
    token_scale: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        for name in ("pooled", "token"):
            self.register_buffer(f"{name}_mean", torch.zeros(width))
            self.register_buffer(f"{name}_scale", torch.ones(width))

    @classmethod
    def measure(
        cls, pooled: Tensor, tokens: Tensor | None = None, per_feature: bool = False
    ) -> Standardise:
        """Return the module for these training features: (N, D), tokens of all samples (T, D).

        Without tokens, the pooled vector is the only token.
        """
        token_moments = None if tokens is None else Moments.of(tokens)
        return cls.from_moments(Moments.of(pooled), token_moments, per_feature)

    @classmethod
    def from_moments(
        cls,
        pooled: Moments,
        tokens: Moments | None = None,
        per_feature: bool = False,
        method: Method = "auto",
    ) -> Standardise:
        """Return the module for training features with these moments, see `measure`."""
        module = cls(len(pooled.mean))
        for name, moments in (("pooled", pooled), ("token", tokens or pooled)):
            if method == "minmax" and moments.num_rows:
                centre, width = moments.low, moments.high - moments.low
                scale = torch.where(width > 0, width.clamp(min=1e-12).reciprocal(), 1.0)
            elif method == "zscore":
                centre, scale = moments.mean, _inverse_std(moments.variance)
            else:
                centre, scale = moments.mean, _scale(moments.variance, per_feature)
            module.get_buffer(f"{name}_mean").copy_(centre)
            module.get_buffer(f"{name}_scale").copy_(scale)
        return module

    def forward(self, features: Features) -> Features:
        """Scale features; absent samples and padding become zero."""
        tokens = (features.tokens - self.token_mean) * self.token_scale
        pooled = (features.pooled - self.pooled_mean) * self.pooled_scale
        present = features.mask.any(-1, keepdim=True)
        return Features(
            tokens.masked_fill(~features.mask[..., None], 0),
            features.mask,
            pooled.masked_fill(~present, 0),
        )


def _scale(variance: Tensor, per_feature: bool) -> Tensor:
    """Return the factor of each dimension, after which rows have `LENGTH`: (D,)."""
    varies = variance > 1e-12
    if not varies.any():
        return torch.ones_like(variance)
    if not per_feature:
        return LENGTH * variance.sum().rsqrt().expand(len(variance))
    return LENGTH * _inverse_std(variance) / varies.sum().sqrt()


def _inverse_std(variance: Tensor) -> Tensor:
    """Return one over the std of each dimension, 1 where it is constant: (D,)."""
    return torch.where(variance > 1e-12, variance.clamp(min=1e-12).rsqrt(), 1.0)


def standardise(features: Mapping[str, Features], modules: nn.ModuleDict) -> dict[str, Features]:
    """Standardise the modalities that have a module; the others stay as they are."""
    return {name: modules[name](x) if name in modules else x for name, x in features.items()}
