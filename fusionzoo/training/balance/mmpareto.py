"""MMPareto: combine an encoder's unimodal and multimodal gradients without conflict."""

from __future__ import annotations

import torch
from torch import Tensor

from fusionzoo.structures import StepContext

from ._shared import ModalityHeads
from .base import BALANCE, Balance, LossTerm, StrategyInputs


@BALANCE.register(family="gradient", paper="Wei and Hu 2024, ICML, arXiv:2405.17730")
class MMPareto(Balance):
    """Give each encoder a direction that increases neither the fused nor its unimodal loss.

    g_j, g_u = the encoder's gradients of the fused loss and of its unimodal head's loss. If they do
    not conflict (g_j g_u > 0), d = g_j + g_u; else d = 2 k_j g_j + 2 k_u g_u with k the weights of
    the shortest convex combination, k_j = clip((g_u - g_j) g_u / |g_j - g_u|^2, 0, 1), scaled up to
    the length of g_j + g_u if it is shorter. The encoder's gradient is gamma d; fusion and heads
    are trained as by `unimodal_aux`. Costs a second backward pass. Differs from the authors' code:
    lengths are restored per encoder, not per tensor, which would lose the guarantee of the first
    line; k is not clipped to 0.001..0.999.

    Missing: an encoder without rows in the batch gets no gradient from either loss.
    Pitfall: gamma only scales gradients, which clipping and Adam undo.
    Use when: unimodal losses help but draw the encoders away from the optimum of the fused loss.

    Settings:
        weight: weight of the unimodal losses, at least 0; 0 switches it off
        gamma: factor of the encoders' gradients, above 0

    Shapes: per encoder, two lists of gradients -> one
    """

    encoders_only = True
    raw_inputs = False
    surgery = True
    shards = False  # two backward passes
    off_at_zero = ("weight",)

    def __init__(
        self,
        inputs: StrategyInputs,
        *,
        weight: float = 1.0,
        gamma: float = 1.5,
        start: float = 0.0,
        end: float | None = None,
    ) -> None:
        super().__init__(inputs, start=start, end=end)
        self.require(gamma > 0, f"gamma={gamma:g}; it must be positive")
        self.weight, self.gamma = weight, gamma
        self.heads = ModalityHeads(self.widths, self.fusion.num_outputs)

    def extra_losses(self, context: StepContext) -> dict[str, LossTerm]:
        return self.heads.losses(context, self.name, dict.fromkeys(self.widths, self.weight))

    def combine_gradients(self, joint: list[Tensor], unimodal: list[Tensor]) -> list[Tensor]:
        j, u, factor = weigh(joint, unimodal)
        scale = self.gamma * factor
        return [(scale * (j * x + u * y)).to(x.dtype) for x, y in zip(joint, unimodal, strict=True)]


def weigh(joint: list[Tensor], unimodal: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return 2 k_j, 2 k_u and the factor, at least 1, that restores the length of g_j + g_u."""
    jj, ju, uu = (inner(x, y) for x, y in ((joint, joint), (joint, unimodal), (unimodal, unimodal)))
    squared_distance = (jj - 2 * ju + uu).clamp(min=torch.finfo(jj.dtype).tiny)
    share = ((uu - ju) / squared_distance).clamp(0, 1)
    # If either is zero there is no conflict, and the shortest combination would be 0.
    agree = (ju > 0) | (jj == 0) | (uu == 0)
    j, u = (torch.where(agree, 1, 2 * k) for k in (share, 1 - share))
    length = (j * j * jj + 2 * j * u * ju + u * u * uu).clamp(min=0).sqrt()
    sum_length = (jj + 2 * ju + uu).clamp(min=0).sqrt()
    floor = torch.finfo(length.dtype).tiny
    factor = torch.where(length > 0, sum_length / length.clamp(min=floor), 1)
    return j, u, factor.clamp(min=1)


def inner(left: list[Tensor], right: list[Tensor]) -> Tensor:
    """Return the inner product of two gradients, given as lists of tensors, in double precision."""
    return torch.stack(
        [(x.double() * y.double()).sum() for x, y in zip(left, right, strict=True)]
    ).sum()
