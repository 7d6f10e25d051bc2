"""Prototypical modal rebalance: class prototypes pull the modality that lags behind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusionzoo.distributed.process_group import total
from fusionzoo.structures import StepContext

from .base import BALANCE, Balance, LossTerm, RunningTrainer, StrategyInputs, pooled_of

EPSILON = 1e-6  # under the root: the gradient of a distance is not defined at 0


@BALANCE.register(family="gradient", paper="Fan et al. 2023, CVPR, arXiv:2211.07089")
class PMR(Balance):
    """Add a prototype loss for each modality that lags behind, as strong as its lag.

    c_mk = mean feature of class k, refreshed every epoch: momentum new + (1 - momentum) old.
    s_m = mean over rows with m of softmax_k(-|x_m - c_mk|)[y]; rho_m = s_m / mean of the other
    s_n; a modality with rho_m < 1 gets + alpha clip(1 / rho_m - 1, 0, 1) CE(-|x_m - c_m|, y).
    New means are those of the features that the epoch's training steps made, so no pass over the
    data is added, and in the first epoch there is no loss. Differs from the paper: any M (rho
    against the mean of the others); no entropy penalty on the fast modality, as in its code.

    Missing: such rows neither score nor learn nor move a prototype.
    Pitfall: distances grow with the width; softmax saturates for wide features that are not normed.
    Use when: a modality's own classes are separable, and the fused loss does not show it how.

    Shapes: features[name].pooled (B, D), prototypes (K, D) -> a loss per row and modality (B,)
    """

    surgery = True

    def __init__(
        self,
        inputs: StrategyInputs,
        *,
        alpha: float = 1.0,
        momentum: float = 0.8,
        start: float = 0.0,
        end: float | None = None,
    ) -> None:
        super().__init__(inputs, start=start, end=end)
        self.require(alpha >= 0, f"alpha={alpha:g}; it must be at least 0")
        self.require(0 < momentum <= 1, f"momentum={momentum:g}; it must be in (0, 1]")
        self.require_classes(inputs.targets)
        self.alpha, self.momentum, self.classes = alpha, momentum, self.fusion.num_outputs
        for name, width in self.widths.items():
            self.register_buffer(f"prototypes_{name}", torch.zeros(self.classes, width))
            self.register_buffer(f"known_{name}", torch.zeros(self.classes, dtype=torch.bool))
            # Of this epoch so far: sums of features, and in the last column rows.
            self.register_buffer(f"sums_{name}", torch.zeros(self.classes, width + 1))

    def active(self, context: StepContext) -> bool:
        return bool(self.alpha) and super().active(context)

    def begin_epoch(
        self, trainer: RunningTrainer, loaders: Mapping[str, Any], context: StepContext
    ) -> None:
        for name in self.widths:
            old, known = self.prototypes(name)
            sums = self.get_buffer(f"sums_{name}")
            seen = sums[:, -1] > 0
            new = sums[:, :-1] / sums[:, -1:].clamp(min=1)
            mixed = torch.where(known[:, None], old.lerp(new, self.momentum), new)
            old.copy_(torch.where(seen[:, None], mixed, old))
            known |= seen
            sums.zero_()

    def prototypes(self, name: str) -> tuple[Tensor, Tensor]:
        """Return a modality's prototypes (K, D), and which of the classes have one (K,)."""
        return self.get_buffer(f"prototypes_{name}"), self.get_buffer(f"known_{name}")

    def extra_losses(self, context: StepContext) -> dict[str, LossTerm]:
        assert context.batch.target is not None
        target, losses, masks, scores = context.batch.target, [], [], []
        for name in self.widths:
            x, present = pooled_of(context.features, name)
            self._remember(name, x.detach(), present, target)
            centres, known = self.prototypes(name)
            logits = -distances(x.to(centres), centres)
            loss = F.cross_entropy(logits.masked_fill(~known, -1e4), target, reduction="none")
            mask = present & known[target]
            right = torch.where(mask, (-loss.detach()).exp(), 0)
            losses.append(loss)
            masks.append(mask)
            scores.append(torch.stack([right.sum(), mask.sum()]).double())
        strength = self.alpha * lag(total(torch.stack(scores, dim=1), self.world))
        return {
            f"pmr/{name}": LossTerm(loss, mask, weight.to(loss.dtype))
            for name, loss, mask, weight in zip(self.widths, losses, masks, strength, strict=True)
        }

    def _remember(self, name: str, x: Tensor, present: Tensor, target: Tensor) -> None:
        sums = self.get_buffer(f"sums_{name}")
        rows = torch.cat([x.to(sums), present[:, None].to(sums)], dim=1)  # absent: all zeros
        sums += total(torch.zeros_like(sums).index_add_(0, target, rows), self.world)


def distances(x: Tensor, centres: Tensor) -> Tensor:
    """Return smooth Euclidean distances: (B, D), (K, D) -> (B, K)."""
    apart = torch.cdist(x, centres, compute_mode="donot_use_mm_for_euclid_dist")
    return (apart.square() + EPSILON).sqrt()


def lag(scores: Tensor) -> Tensor:
    """Return clip(1 / rho - 1, 0, 1): (2, M) sums and rows -> (M,); 0 for what was not seen."""
    seen = scores[1] > 0
    means = torch.where(seen, scores[0] / scores[1].clamp(min=1), 0)
    others = (means.sum() - means) / (seen.sum() - 1).clamp(min=1)
    behind = (others / means.clamp(min=torch.finfo(means.dtype).tiny) - 1).clamp(0, 1)
    return torch.where(seen & (seen.sum() > 1), behind, 0)
