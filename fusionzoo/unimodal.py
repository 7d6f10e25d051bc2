"""Unimodal heads: one classifier per modality, a baseline and a fallback for the fusion.

Shapes: `B` rows, `M` modalities, `K` outputs, `D` width.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from .structures import Features


class UnimodalHeads(nn.Module):
    """A two-layer classifier per modality, on its encoder's pooled features.

    Shows what the fusion gains, without changing its training: features are detached, and no random
    numbers are drawn. A row that lacks the modality gets the logits of `prior` (K,), the class
    frequencies or odds of the training split.
    """

    prior: Tensor

    def __init__(self, dims: Mapping[str, int], dim: int, prior: Tensor) -> None:
        super().__init__()
        self.dim = dim
        self.register_buffer("prior", prior)
        self.heads = nn.ModuleDict(
            {
                name: nn.Sequential(
                    nn.LayerNorm(width),
                    nn.Linear(width, dim),
                    nn.GELU(),
                    nn.Linear(dim, len(prior)),
                )
                for name, width in dims.items()
            }
        )

    def forward(self, features: Mapping[str, Features]) -> dict[str, Tensor]:
        return {name: self._logits(name, features[name]) for name in self.heads}

    def _logits(self, name: str, features: Features) -> Tensor:
        present = features.mask.any(1)[:, None]  # (B, 1)
        pooled = torch.where(present, features.pooled.detach(), 0)
        logits = self.heads[name](pooled)
        return torch.where(present, logits, self.prior.log().to(logits.dtype))


def fall_back(logits: Tensor, unimodal: Mapping[str, Tensor], present: Tensor) -> Tensor:
    """Replace the fusion's logits (B, K) by those of the unimodal head in rows that have only one
    modality; the columns of `present` (B, M) are in the order of `unimodal`."""
    only = present & (present.sum(1, keepdim=True) == 1)
    for column, head_logits in enumerate(unimodal.values()):
        logits = torch.where(only[:, column, None], head_logits.to(logits.dtype), logits)
    return logits
