"""MMPareto: join an encoder's unimodal and multimodal gradients where both agree to go."""

from __future__ import annotations

import torch
from torch import Tensor

from fusionzoo.structures import StepContext

from ._heads import ModalityHeads
from .base import BALANCE, Balance, LossTerm, StrategyInputs


@BALANCE.register(family="gradient", paper="Wei and Hu 2024, ICML, arXiv:2405.17730")
class MMPareto(Balance):
    """Give each encoder a direction that hurts neither its own loss nor the fused one.

    g_j, g_u = the encoder's gradients of the fused loss and of its own head's. If they do not
    conflict (g_j g_u > 0), d = g_j + g_u; else d = 2 k_j g_j + 2 k_u g_u with k the weights of
    the shortest convex combination, k_j = clip((g_u - g_j) g_u / |g_j - g_u|^2, 0, 1), brought up
    to the length of g_j + g_u if shorter. The encoder's gradient is gamma d; fusion and heads
    learn as with `unimodal_aux`. Costs a second backward pass. Differs from the reference: length
    is restored per encoder, not per tensor, which would void the guarantee; k is not clamped to
    0.001 .. 0.999.

    Missing: an encoder that a batch does not reach has no gradient of either loss.
    Pitfall: gamma makes gradients longer; clipping and Adam take that back.
    Use when: unimodal losses help, yet pull the encoders away from the fused optimum.

    Shapes: per encoder, two lists of gradients -> one
    """

    surgery = True
    shards = False  # two backward passes
    two_pass = True

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

    def active(self, context: StepContext) -> bool:
        return bool(self.weight) and super().active(context)

    def extra_losses(self, context: StepContext) -> dict[str, LossTerm]:
        return self.heads.losses(context, self.name, dict.fromkeys(self.widths, self.weight))

    def combine_gradients(self, joint: list[Tensor], own: list[Tensor]) -> list[Tensor]:
        j, u, length = weigh(joint, own)
        scale = self.gamma * length
        return [(scale * (j * x + u * y)).to(x.dtype) for x, y in zip(joint, own, strict=True)]


def weigh(joint: list[Tensor], own: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return 2 k_j, 2 k_u and by how much the vector that they make must grow."""
    jj, ju, uu = (inner(x, y) for x, y in ((joint, joint), (joint, own), (own, own)))
    apart = (jj - 2 * ju + uu).clamp(min=torch.finfo(jj.dtype).tiny)
    share = ((uu - ju) / apart).clamp(0, 1)
    # With one of the two zero there is no conflict either, and the shortest vector would be 0.
    agree = (ju > 0) | (jj == 0) | (uu == 0)
    j, u = (torch.where(agree, 1, 2 * k) for k in (share, 1 - share))
    made = (j * j * jj + 2 * j * u * ju + u * u * uu).clamp(min=0).sqrt()
    wanted = (jj + 2 * ju + uu).clamp(min=0).sqrt()
    length = torch.where(made > 0, wanted / made.clamp(min=torch.finfo(made.dtype).tiny), 1)
    return j, u, length.clamp(min=1)


def inner(left: list[Tensor], right: list[Tensor]) -> Tensor:
    """Return the inner product of two gradients that are lists of tensors, in double precision."""
    return torch.stack(
        [(x.double() * y.double()).sum() for x, y in zip(left, right, strict=True)]
    ).sum()
