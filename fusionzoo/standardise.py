"""Centre and scale the features of frozen encoders by statistics of the training split.

Shapes: `N` samples, `T` tokens, `D` width.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from .structures import Features

RAW_KINDS = ("vector", "sequence")  # columns of the user's, each with a unit of its own
LENGTH = 5.0  # root mean square of the scaled vectors' lengths (results/LOG.md compares 1 to 36)


class Standardise(nn.Module):
    """Centre one modality's features and scale them to a common length.

    The pooled vector and the tokens have statistics of their own. An encoder's output is divided by
    a single number, which keeps the proportions of its dimensions; with `per_feature` each
    dimension is also divided by its own deviation, as columns with different units need it. A
    dimension that is constant on the training split is only centred. Buffers are stored with the
    model.
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
        module = cls(pooled.shape[1])
        module.pooled_mean, module.pooled_scale = _mean_and_scale(pooled, per_feature)
        module.token_mean, module.token_scale = module.pooled_mean, module.pooled_scale
        if tokens is not None:
            module.token_mean, module.token_scale = _mean_and_scale(tokens, per_feature)
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


def _mean_and_scale(rows: Tensor, per_feature: bool) -> tuple[Tensor, Tensor]:
    """Return mean and factor of each dimension, after which rows have `LENGTH`: (D,) both."""
    rows = rows.float()
    width = rows.shape[1]
    if not len(rows):
        return torch.zeros(width), torch.ones(width)
    variance, mean = torch.var_mean(rows, dim=0, correction=0)
    varies = variance > 1e-12
    if not varies.any():
        return mean, torch.ones(width)
    if not per_feature:
        return mean, LENGTH * variance.sum().rsqrt().expand(width)
    scale = torch.where(varies, variance.clamp(min=1e-12).rsqrt(), 1.0)
    return mean, LENGTH * scale / varies.sum().sqrt()


def standardise(features: Mapping[str, Features], modules: nn.ModuleDict) -> dict[str, Features]:
    """Standardise the modalities that have a module; the others stay as they are."""
    return {name: modules[name](x) if name in modules else x for name, x in features.items()}
