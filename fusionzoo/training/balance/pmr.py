"""Prototypical modal rebalance: a prototype loss for modalities that learn too slowly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusionzoo.machine.distributed import total
from fusionzoo.structures import StepContext

from ._shared import mean_of_sums, sums_of_rows
from .base import BALANCE, Balance, LossTerm, RunningTrainer, StrategyInputs, pooled_of

EPSILON = 1e-6  # under the square root, because the gradient of a distance is undefined at 0


@BALANCE.register(family="gradient", paper="Fan et al. 2023, CVPR, arXiv:2211.07089")
class PMR(Balance):
    """Add a prototype loss for each modality that lags behind, weighted by how far.

    c_mk = mean feature of class k, updated every epoch: momentum new + (1 - momentum) old. s_m =
    mean over rows with m of softmax_k(-|x_m - c_mk|)[y]; rho_m = s_m / mean of the other s_n. A
    modality with rho_m < 1 gets the loss alpha clip(1 / rho_m - 1, 0, 1) CE(-|x_m - c_m|, y). New
    means are those of the features in the epoch's training steps, so no additional pass over the
    data is needed, and there is no loss in the first epoch. Differs from the paper: rho_m compares
    with the mean of the others, for any number of modalities; no entropy penalty on the faster
    modality, as in the authors' code. The weight is the paper's; in their code the slower of two
    modalities gets alpha, however far it lags.

    Missing: such rows are left out of scores, losses and prototypes.
    Pitfall: distances grow with the width; for wide, unnormalised features the softmax saturates.
    Use when: a modality separates the classes well, but the fused loss does not train it enough.

    Settings:
        alpha: weight of the prototype losses, at least 0; 0 switches it off
        momentum: weight of an epoch's new prototypes, above 0 to 1

    Shapes: features[name].pooled (B, D), prototypes (K, D) -> a loss per row and modality (B,)
    """

    encoders_only = True
    raw_inputs = False
    surgery = True
    off_at_zero = ("alpha",)

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
            # Over the epoch: sums of features per class; the last column is the number of rows.
            self.register_buffer(f"sums_{name}", torch.zeros(self.classes, width + 1))

    def begin_epoch(
        self, trainer: RunningTrainer, loaders: Mapping[str, Any], context: StepContext
    ) -> None:
        for name in self.widths:
            prototypes, known = self.prototypes(name)
            sums = self.get_buffer(f"sums_{name}")
            updated = sums[:, -1] > 0
            means = sums[:, :-1] / torch.where(sums[:, -1:] > 0, sums[:, -1:], 1)
            mixed = torch.where(known[:, None], prototypes.lerp(means, self.momentum), means)
            prototypes.copy_(torch.where(updated[:, None], mixed, prototypes))
            known |= updated
            sums.zero_()

    def prototypes(self, name: str) -> tuple[Tensor, Tensor]:
        """Return a modality's prototypes (K, D), and the mask of classes that have one (K,)."""
        return self.get_buffer(f"prototypes_{name}"), self.get_buffer(f"known_{name}")

    def extra_losses(self, context: StepContext) -> dict[str, LossTerm]:
        assert context.batch.target is not None
        target, losses, masks, scores = context.batch.target, [], [], []
        for name in self.widths:
            x, present = pooled_of(context.features, name)
            self._accumulate(name, x.detach(), present, context)
            centres, known = self.prototypes(name)
            logits = -distances(x.to(centres), centres)
            loss = F.cross_entropy(logits.masked_fill(~known, -1e4), target, reduction="none")
            mask = present & known[target]
            probability = (-loss.detach()).exp()
            losses.append(loss)
            masks.append(mask)
            scores.append(sums_of_rows(probability, mask, context).double())
        strength = self.alpha * lag(total(torch.stack(scores, dim=1), self.world))
        return {
            f"pmr/{name}": LossTerm(loss, mask, weight.to(loss.dtype))
            for name, loss, mask, weight in zip(self.widths, losses, masks, strength, strict=True)
        }

    def _accumulate(self, name: str, x: Tensor, present: Tensor, context: StepContext) -> None:
        """Add features (B, D) of all processes to the sums of their classes."""
        target, sums = context.batch.target, self.get_buffer(f"sums_{name}")
        assert target is not None
        rows = torch.cat([x.to(sums), present[:, None].to(sums)], dim=1)  # absent: all zeros
        if context.sample_weight is not None:
            rows = context.sample_weight[:, None].to(sums) * rows
        sums += total(torch.zeros_like(sums).index_add_(0, target, rows), self.world)


def distances(x: Tensor, centres: Tensor) -> Tensor:
    """Return Euclidean distances, smoothed at 0: (B, D), (K, D) -> (B, K)."""
    exact = torch.cdist(x, centres, compute_mode="donot_use_mm_for_euclid_dist")
    return (exact.square() + EPSILON).sqrt()


def lag(scores: Tensor) -> Tensor:
    """Return clip(1 / rho - 1, 0, 1): sums and rows (2, M) -> (M,); 0 without any rows."""
    in_batch = scores[1] > 0
    means = mean_of_sums(scores)
    others = (means.sum() - means) / (in_batch.sum() - 1).clamp(min=1)
    behind = (others / means.clamp(min=torch.finfo(means.dtype).tiny) - 1).clamp(0, 1)
    return torch.where(in_batch & (in_batch.sum() > 1), behind, 0)
