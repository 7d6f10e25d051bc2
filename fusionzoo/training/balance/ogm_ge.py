"""On-the-fly gradient modulation with generalisation enhancement (OGM-GE)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fusionzoo.fusion import Fusion
from fusionzoo.machine.fsdp import full_tensor, shard_like
from fusionzoo.structures import Features, StepContext, evaluating

from ._shared import BatchSum, mean_of_sums, sums_of_rows
from .base import BALANCE, Balance, LossTerm, StrategyInputs, at_least_float32, presence


@BALANCE.register(family="gradient", paper="Peng et al. 2022, CVPR, arXiv:2203.15332")
class OGMGE(Balance):
    """Shrink the gradients of encoders whose modality predicts better than the others.

    s_m = mean over rows with m of softmax(z_m)[y]; rho_m = s_m / mean of the other s_n;
    kappa_m = 1 - tanh(alpha rho_m) where rho_m > 1, else 1; g_m <- kappa_m g_m + xi with
    xi ~ N(0, std(g_m)^2) for each tensor, std of the unscaled g_m. z_m are the unimodal logits of a
    late fusion, else z_m = f(x_m, others 0) - (1 - 1/P) f(all 0), with P modalities present and
    without dropout; for a linear fusion these sum to its logits exactly. Differs from the authors'
    code: any fusion and number of modalities; all tensors of an encoder, not only 4-D ones; means
    instead of sums, because modalities may be missing; no damping at rho = 1.

    Missing: left out of the scores; a modality that the whole batch lacks has kappa 1.
    Pitfall: Adam largely cancels kappa; the modulation is effective with SGD.
    Use when: one modality converges early and the other encoders stay undertrained.

    Settings:
        alpha: strength of the damping, at least 0 (paper: 0.1 to 0.8, by data set)
        noise: whether to add the noise xi (generalisation enhancement)

    Shapes: logits of each modality (B, M, K) -> kappa (M,)
    """

    encoders_only = True
    raw_inputs = False
    surgery = True
    off_at_zero = ("alpha", "noise")

    def __init__(
        self,
        inputs: StrategyInputs,
        *,
        alpha: float = 0.5,
        noise: bool = True,
        start: float = 0.0,
        end: float | None = None,
    ) -> None:
        super().__init__(inputs, start=start, end=end)
        self.require(alpha >= 0, f"alpha={alpha:g}; it must be at least 0")
        self.require_classes(inputs.targets)
        self.alpha, self.noise = alpha, noise
        self.tally = BatchSum()  # sums of scores, rows: (2, M)

    def extra_losses(self, context: StepContext) -> dict[str, LossTerm]:
        self.tally.add(sums_of_scores(self.fusion, context), context)
        return {}

    def edit_gradients(
        self, encoders: Mapping[str, Sequence[nn.Parameter]], context: StepContext
    ) -> None:
        sums = self.tally.take(self.world)
        factors = damping(mean_of_sums(sums), sums[1] > 0, self.alpha).tolist()
        number = 0
        for factor, parameters in zip(factors, encoders.values(), strict=True):
            for parameter in parameters:
                number += 1
                gradient = parameter.grad
                if gradient is None:
                    continue
                unscaled = (
                    full_tensor(gradient).clone() if self.noise and gradient.numel() > 1 else None
                )
                gradient.mul_(factor)
                if unscaled is not None:
                    seed = self.draw(context.step, number).initial_seed()
                    generator = torch.Generator(unscaled.device).manual_seed(seed)
                    std = unscaled.std()
                    noise = std * unscaled.normal_(generator=generator)
                    gradient.add_(shard_like(noise, gradient))


@torch.no_grad()
def unimodal_logits(fusion: Fusion, context: StepContext) -> Tensor:
    """Return z_m, the contribution of each modality to the logits: (B, M, K)."""
    if context.output.unimodal:
        return torch.stack([context.output.unimodal[name] for name in context.features], 1)
    with evaluating(fusion):
        baseline = at_least_float32(fusion(zeroed_except(context.features)).logits)
        single = [fusion(zeroed_except(context.features, n)).logits for n in context.features]
    share = 1 - 1 / presence(context.features).sum(1).clamp(min=1).to(baseline.dtype)
    return torch.stack(single, dim=1) - (share[:, None] * baseline)[:, None]


def sums_of_scores(fusion: Fusion, context: StepContext) -> Tensor:
    """Return the sums over rows of softmax(z_m)[y], and the numbers of rows: (2, M)."""
    assert context.batch.target is not None
    probabilities = at_least_float32(unimodal_logits(fusion, context)).softmax(-1)
    target = context.batch.target[:, None, None].expand(-1, probabilities.shape[1], 1)
    scores = probabilities.gather(2, target)[..., 0]
    return sums_of_rows(scores, presence(context.features), context).double()


def damping(scores: Tensor, in_batch: Tensor, alpha: float) -> Tensor:
    """Return the factors kappa: (M,), (M,) bool -> (M,).

    1 for modalities that are not in the batch, and for a modality that is alone in it.
    """
    scores = scores.where(in_batch, 0)
    others = (in_batch.sum() - 1).clamp(min=1)
    mean = (scores.sum() - scores) / others
    ahead = in_batch & (scores > mean) & (in_batch.sum() > 1)
    ratio = scores / mean.clamp(min=torch.finfo(mean.dtype).tiny)
    return torch.where(ahead, 1 - (alpha * ratio).tanh(), 1)


def zeroed_except(features: Mapping[str, Features], *names: str) -> dict[str, Features]:
    """Return features with all modalities but `names` set to zero; all stay present."""
    return {
        name: x
        if name in names
        else Features(torch.zeros_like(x.tokens), x.mask, torch.zeros_like(x.pooled))
        for name, x in features.items()
    }
