"""On-the-fly gradient modulation: the modality that is ahead learns slower, with some noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fusionzoo.distributed.fsdp import like, whole
from fusionzoo.model import quiet
from fusionzoo.structures import Features, StepContext

from .base import BALANCE, Balance, BatchSum, LossTerm, StrategyInputs, at_least_float32, presence


@BALANCE.register(family="gradient", paper="Peng et al. 2022, CVPR, arXiv:2203.15332")
class OGMGE(Balance):
    """Shrink the gradient of an encoder whose modality already predicts better than the others.

    s_m = mean over rows with m of softmax(z_m)[y]; rho_m = s_m / mean of the other s_n;
    kappa_m = 1 - tanh(alpha rho_m) where rho_m > 1, else 1; g_m <- kappa_m g_m + xi with
    xi ~ N(0, std(g_m)^2) for each tensor, std of the unscaled g_m (`noise`, the GE). A fusion
    that votes gives z_m itself; else z_m = f(x_m, others 0) - (1 - 1/P) f(all 0), P modalities
    present, without dropout: for a linear fusion these add up to its logits exactly.
    Differs from the reference: any M and any fusion; all tensors of an encoder, not 4-D ones
    alone; means instead of sums, for modalities may be missing; at rho = 1 nothing is damped.

    Missing: neither scores nor is compared; a modality that the whole batch lacks has kappa 1.
    Pitfall: Adam divides most of kappa out again; modulation bites with SGD.
    Use when: one modality converges early and leaves the others' encoders undertrained.

    Shapes: logits of each modality (B, M, K) -> kappa (M,)
    """

    surgery = True

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

    def active(self, context: StepContext) -> bool:
        return bool(self.alpha or self.noise) and super().active(context)

    def extra_losses(self, context: StepContext) -> dict[str, LossTerm]:
        assert context.batch.target is not None
        scores = at_least_float32(self.alone(context)).softmax(-1)
        target = context.batch.target[:, None, None].expand(-1, scores.shape[1], 1)
        present = presence(context.features)
        right = scores.gather(2, target)[..., 0].where(present, 0)
        self.tally.add(torch.stack([right.sum(0), present.sum(0)]).double(), context)
        return {}

    @torch.no_grad()
    def alone(self, context: StepContext) -> Tensor:
        """Return what each modality adds to the logits: (B, M, K)."""
        if context.output.unimodal:
            return torch.stack([context.output.unimodal[name] for name in context.features], 1)
        with quiet(self.fusion):
            rest = at_least_float32(self.fusion(blanked(context.features)).logits)
            each = [self.fusion(blanked(context.features, n)).logits for n in context.features]
        share = 1 - 1 / presence(context.features).sum(1).clamp(min=1).to(rest.dtype)
        return torch.stack(each, dim=1) - (share[:, None] * rest)[:, None]

    def edit_gradients(
        self, encoders: Mapping[str, Sequence[nn.Parameter]], context: StepContext
    ) -> None:
        scores, rows = self.tally.take(self.world)
        factors = damping(scores / rows.clamp(min=1), rows > 0, self.alpha).tolist()
        number = 0
        for factor, parameters in zip(factors, encoders.values(), strict=True):
            for parameter in parameters:
                number += 1
                gradient = parameter.grad
                if gradient is None:
                    continue
                full = whole(gradient).clone() if self.noise and gradient.numel() > 1 else None
                gradient.mul_(factor)
                if full is not None:
                    seed = self.draw(context.step, number).initial_seed()
                    draw = torch.Generator(full.device).manual_seed(seed)
                    spread = full.std()
                    gradient.add_(like(spread * full.normal_(generator=draw), gradient))


def damping(scores: Tensor, seen: Tensor, alpha: float) -> Tensor:
    """Return kappa: (M,), (M,) bool -> (M,); 1 for what was not seen, and where nobody else was."""
    scores = scores.where(seen, 0)
    others = (seen.sum() - 1).clamp(min=1)
    mean = (scores.sum() - scores) / others
    ahead = seen & (scores > mean) & (seen.sum() > 1)
    ratio = scores / mean.clamp(min=torch.finfo(mean.dtype).tiny)
    return torch.where(ahead, 1 - (alpha * ratio).tanh(), 1)


def blanked(features: Mapping[str, Features], *kept: str) -> dict[str, Features]:
    """Return features in which all modalities but `kept` are zero, though present."""
    return {
        name: x
        if name in kept
        else Features(torch.zeros_like(x.tokens), x.mask, torch.zeros_like(x.pooled))
        for name, x in features.items()
    }
