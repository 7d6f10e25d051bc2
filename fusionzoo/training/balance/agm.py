"""Adaptive gradient modulation: Shapley responses say how hard each modality is driven."""

from __future__ import annotations

from itertools import combinations
from math import factorial

import torch
from torch import Tensor

from fusionzoo.distributed.process_group import total
from fusionzoo.model import quiet
from fusionzoo.structures import FusionOutput, StepContext

from .base import BALANCE, Balance, LossTerm, StrategyInputs, at_least_float32, keep_only, presence

EXACT = 4  # modalities; 2^M passes of the fusion
Marginal = tuple[int, frozenset[int], float]  # modality, who is there before it, weight


@BALANCE.register(family="gradient", paper="Li et al. 2023, ICCV, arXiv:2308.07686")
class AGM(Balance):
    """Scale the gradient through each modality's Shapley share of the logits.

    phi_m = sum over S without m of |S|! (M - |S| - 1)! / M! (f(S + m) - f(S)), f(S) the fusion's
    logits with only S present; sum_m phi_m + f(nothing) = f(all). s_m = mean over rows with m of
    CE(phi_m, y); r_m = exp(mean of the other s_n - s_m), and r^_m the same of the running means;
    kappa_m = exp(alpha min(r^_m - r_m, 10)). The loss reads f(all), unchanged in value; the
    gradient that reaches phi_m is multiplied by kappa_m. Costs 2^M - 1 more passes of the fusion
    (not of the encoders), without dropout; above 4 modalities, `samples` random orders.
    Differs from the reference: any fusion and M; absent means absent, not zero input; the running
    means begin anew in every epoch, so that they compare losses of one stage of training
    (`restart=False`: they run on, as in the reference).

    Missing: phi_m = 0 exactly in such rows, and they do not score.
    Pitfall: a fusion whose loss does not read the fused logits feels nothing: that is refused.
    Use when: OGM-GE's linear view of the fusion is too crude, and the fusion is cheap.

    Shapes: phi (B, M, K), kappa (M,) -> logits (B, K)
    """

    surgery = True
    losses: Tensor
    epoch: Tensor

    def __init__(
        self,
        inputs: StrategyInputs,
        *,
        alpha: float = 1.0,
        samples: int = 8,
        restart: bool = True,
        start: float = 0.0,
        end: float | None = None,
    ) -> None:
        super().__init__(inputs, start=start, end=end)
        self.require(alpha >= 0, f"alpha={alpha:g}; it must be at least 0")
        self.require(samples >= 1, f"samples={samples}; it must be at least 1")
        self.require_classes(inputs.targets)
        self.alpha, self.samples, self.restart, self.felt = alpha, samples, restart, False
        # Of the epoch, or with `restart=False` of the run so far: sums of CE(phi_m), rows.
        self.register_buffer("losses", torch.zeros(2, len(self.widths)))
        self.register_buffer("epoch", torch.tensor(-1.0))

    def active(self, context: StepContext) -> bool:
        return bool(self.alpha) and super().active(context)

    def edit_output(self, context: StepContext) -> FusionOutput:
        shares = self.shapley(context)
        factors = self.factors(shares.detach(), context)
        # Bit for bit the same logits, so plain training where every factor is 1.
        scaled = (factors[:, None] - 1) * (shares - shares.detach())
        logits = context.output.logits
        return context.output._replace(logits=logits + scaled.sum(1).to(logits.dtype))

    def main_loss(self, context: StepContext, loss: LossTerm) -> LossTerm:
        there = presence(context.features).any(1)
        if not self.felt and loss.values.requires_grad and there.any():
            answer = context.output.logits
            (asked,) = torch.autograd.grad(
                loss.values.sum(), answer, retain_graph=True, allow_unused=True
            )
            self.require(
                asked is not None and bool(asked[there].any()),
                f"the loss of {type(self.fusion).__name__} does not read the fused logits, so"
                " there is nothing to modulate: ogm_ge works with it",
            )
            self.felt = True
        return loss

    def shapley(self, context: StepContext) -> Tensor:
        """Return phi: (B, M, K)."""
        names = list(context.features)
        present = presence(context.features)
        wanted = marginals(len(names), self.samples, self.draw(context.step))
        asked = {s for m, before, _ in wanted for s in (before, before | {m})}
        found: dict[frozenset[int], Tensor] = {}
        full = at_least_float32(context.output.logits)
        with quiet(self.fusion):
            for some in asked:
                kept = [names[i] for i in sorted(some)]
                logits = full if len(some) == len(names) else self._masked(context, kept)
                # A row that has no more than these answers as it does when nothing is hidden.
                absent = [i for i in range(len(names)) if i not in some]
                whole = ~present[:, absent].any(1)
                found[some] = torch.where(whole[:, None], full, logits)
        shares = [torch.zeros_like(full) for _ in names]
        for m, before, weight in wanted:
            shares[m] = shares[m] + weight * (found[before | {m}] - found[before])
        return torch.stack(shares, dim=1)

    def _masked(self, context: StepContext, kept: list[str]) -> Tensor:
        return at_least_float32(self.fusion(keep_only(context.features, *kept)).logits)

    def factors(self, shares: Tensor, context: StepContext) -> Tensor:
        """Return kappa (M,), and remember this batch's losses."""
        assert context.batch.target is not None
        target, present = context.batch.target, presence(context.features)
        each = torch.stack([context.criterion(own, target) for own in shares.unbind(1)], dim=1)
        here = torch.stack([each.where(present, 0).sum(0), present.sum(0)])
        here = total(here.to(self.losses), self.world)
        if self.restart and int(self.epoch) != int(context.epoch):
            self.losses.zero_()
            self.epoch.fill_(int(context.epoch))
        self.losses += here
        seen_now = here[1] > 0
        gap = ratios(self.losses) - ratios(here)
        factors = (self.alpha * gap.clamp(max=10)).exp()
        return torch.where(seen_now & (seen_now.sum() > 1), factors, 1)


def ratios(losses: Tensor) -> Tensor:
    """Return r_m = exp(mean of the others' losses - its own): (2, M) sums and rows -> (M,)."""
    seen = losses[1] > 0
    means = torch.where(seen, losses[0] / losses[1].clamp(min=1), 0)
    others = (means.sum() - means) / (seen.sum() - 1).clamp(min=1)
    return (others - means).exp()


def marginals(count: int, samples: int, draw: torch.Generator) -> list[Marginal]:
    """Return whose steps into which coalitions make the Shapley values, and their weights."""
    if count <= EXACT:
        return [
            (m, frozenset(s), factorial(size) * factorial(count - size - 1) / factorial(count))
            for m in range(count)
            for size in range(count)
            for s in combinations([n for n in range(count) if n != m], size)
        ]
    orders = [torch.randperm(count, generator=draw).tolist() for _ in range(samples)]
    return [
        (m, frozenset(order[:place]), 1 / samples)
        for order in orders
        for place, m in enumerate(order)
    ]
