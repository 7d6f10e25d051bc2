"""Adaptive gradient modulation: scale gradients by how each modality's loss develops."""

from __future__ import annotations

from itertools import combinations
from math import factorial

import torch
from torch import Tensor

from fusionzoo.machine.distributed import total
from fusionzoo.structures import FusionOutput, StepContext, evaluating, keep_only

from ._shared import mean_of_sums, sums_of_rows
from .base import BALANCE, Balance, LossTerm, StrategyInputs, at_least_float32, presence

EXACT = 4  # most modalities with exact Shapley values, which take 2^M passes of the fusion
Marginal = tuple[int, frozenset[int], float]  # modality, coalition that it joins, weight


@BALANCE.register(family="gradient", paper="Li et al. 2023, ICCV, arXiv:2308.07686")
class AGM(Balance):
    """Scale the gradient through each modality's Shapley value of the fused logits.

    phi_m = sum over S without m of |S|! (M - |S| - 1)! / M! (f(S + m) - f(S)), f(S) the fusion's
    logits with only S present; sum_m phi_m + f(nothing) = f(all). s_m = mean over rows with m of
    CE(phi_m, y); r_m = exp(mean of the other s_n - s_m), r^_m the same from running means of s;
    kappa_m = exp(alpha min(r^_m - r_m, 10)). The loss uses f(all) with its value unchanged; the
    gradient that reaches phi_m is multiplied by kappa_m. Costs 2^M - 1 additional passes of the
    fusion (not of the encoders), without dropout. Differs from the authors' code: any fusion and
    number of modalities; modalities outside S are absent instead of zero; half of f(nothing) is no
    part of phi_m; running means hold the current batch, too, and restart in every epoch.

    Missing: phi_m is exactly 0 in such rows, and they are left out of s_m.
    Pitfall: has no effect on a fusion whose loss ignores the fused logits; raises an error.
    Use when: OGM-GE's linear approximation of the fusion is too crude and the fusion is cheap.

    Settings:
        alpha: strength of the modulation, at least 0; 0 switches it off
        samples: random orders that estimate the Shapley values above 4 modalities, at least 1
        restart: whether the running means restart in every epoch, so that they compare losses of
            the same stage of training (authors' code: False)

    Shapes: phi (B, M, K), kappa (M,) -> logits (B, K)
    """

    raw_inputs = False
    surgery = True
    losses: Tensor
    epoch: Tensor
    off_at_zero = ("alpha",)

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
        self.alpha, self.samples, self.restart, self.verified = alpha, samples, restart, False
        # Over the epoch, or with `restart=False` over the run: sums of CE(phi_m), numbers of rows.
        self.register_buffer("losses", torch.zeros(2, len(self.widths)))
        self.register_buffer("epoch", torch.tensor(-1.0))

    def edit_output(self, context: StepContext) -> FusionOutput:
        phi = self.shapley(context)
        factors = self.factors(phi.detach(), context)
        # Bit for bit the same logits, so this is plain training where every factor is 1.
        scaled = (factors[:, None] - 1) * (phi - phi.detach())
        logits = context.output.logits
        return context.output._replace(logits=logits + scaled.sum(1).to(logits.dtype))

    def main_loss(self, context: StepContext, loss: LossTerm) -> LossTerm:
        not_empty = presence(context.features).any(1)
        if not self.verified and loss.values.requires_grad and not_empty.any():
            logits = context.output.logits
            (gradient,) = torch.autograd.grad(
                loss.values.sum(), logits, retain_graph=True, allow_unused=True
            )
            self.require(
                gradient is not None and bool(gradient[not_empty].any()),
                f"the loss of {type(self.fusion).__name__} does not read the fused logits, so"
                " there is nothing to modulate: ogm_ge works with it",
            )
            self.verified = True
        return loss

    def shapley(self, context: StepContext) -> Tensor:
        """Return the Shapley values phi: (B, M, K)."""
        names = list(context.features)
        present = presence(context.features)
        triples = marginals(len(names), self.samples, self.draw(context.step))
        coalitions = {s for m, before, _ in triples for s in (before, before | {m})}
        logits_by_coalition: dict[frozenset[int], Tensor] = {}
        full = at_least_float32(context.output.logits)
        with evaluating(self.fusion):
            for coalition in coalitions:
                members = [names[i] for i in sorted(coalition)]
                logits = full if len(members) == len(names) else self._masked(context, members)
                # Rows without any modality outside of the coalition: the logits of the full input.
                outside = [i for i in range(len(names)) if i not in coalition]
                unchanged = ~present[:, outside].any(1)
                logits_by_coalition[coalition] = torch.where(unchanged[:, None], full, logits)
        phi = [torch.zeros_like(full) for _ in names]
        for m, before, weight in triples:
            gain = logits_by_coalition[before | {m}] - logits_by_coalition[before]
            phi[m] = phi[m] + weight * gain
        return torch.stack(phi, dim=1)

    def _masked(self, context: StepContext, members: list[str]) -> Tensor:
        """Return the fusion's logits with only some modalities present: (B, K)."""
        return at_least_float32(self.fusion(keep_only(context.features, *members)).logits)

    def factors(self, phi: Tensor, context: StepContext) -> Tensor:
        """Return kappa (M,), and add this batch's losses to the running sums."""
        assert context.batch.target is not None
        target, present = context.batch.target, presence(context.features)
        losses = torch.stack([context.criterion(phi_m, target) for phi_m in phi.unbind(1)], dim=1)
        batch_sums = sums_of_rows(losses, present, context)
        batch_sums = total(batch_sums.to(self.losses), self.world)
        if self.restart and int(self.epoch) != int(context.epoch):
            self.losses.zero_()
            self.epoch.fill_(int(context.epoch))
        self.losses += batch_sums
        in_batch = batch_sums[1] > 0
        gap = ratios(self.losses) - ratios(batch_sums)
        factors = (self.alpha * gap.clamp(max=10)).exp()
        return torch.where(in_batch & (in_batch.sum() > 1), factors, 1)


def ratios(losses: Tensor) -> Tensor:
    """Return r_m = exp(mean of the others' losses - loss of m): sums and rows (2, M) -> (M,)."""
    available, means = losses[1] > 0, mean_of_sums(losses)
    others = (means.sum() - means) / (available.sum() - 1).clamp(min=1)
    return (others - means).exp()


def marginals(count: int, samples: int, draw: torch.Generator) -> list[Marginal]:
    """Return the (modality, coalition, weight) triples of the Shapley sum."""
    if count <= EXACT:
        return [
            (m, frozenset(s), factorial(size) * factorial(count - size - 1) / factorial(count))
            for m in range(count)
            for size in range(count)
            for s in combinations([n for n in range(count) if n != m], size)
        ]
    orders = [torch.randperm(count, generator=draw).tolist() for _ in range(samples)]
    return [
        (m, frozenset(order[:position]), 1 / samples)
        for order in orders
        for position, m in enumerate(order)
    ]
