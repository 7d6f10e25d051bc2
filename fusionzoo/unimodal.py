"""A classifier of each modality alone: what the fusion is compared with, and may fall back to.

Shapes: `B` rows, `M` modalities, `K` outputs, `D` width.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from .structures import Features


class UnimodalHeads(nn.Module):
    """A two-layer classifier of each modality alone, on its encoder's pooled features.

    It says what the fusion gained, and must not change what the fusion learns: no gradient flows
    back into the encoders, and nothing random happens here. A row that lacks the modality is
    answered with what the training split says, `prior` (K,): class frequencies, or odds.
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
    """Replace the fusion's logits (B, K) by those of a modality's own head where a row of `present`
    (B, M), in the order of `unimodal`, has that modality only."""
    only = present & (present.sum(1, keepdim=True) == 1)
    for column, own in enumerate(unimodal.values()):
        logits = torch.where(only[:, column, None], own.to(logits.dtype), logits)
    return logits
