"""On-the-fly prediction modulation: hide the modality that predicts best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fusionzoo.structures import Batch, StepContext

from ._shared import BatchSum, mean_of_sums
from .base import BALANCE, Balance, LossTerm, StrategyInputs
from .ogm_ge import sums_of_scores


@BALANCE.register(family="data", paper="Wei et al. 2024, TPAMI, arXiv:2410.11582")
class OPM(Balance):
    """Hide each modality of a sample the more often, the more it leads the others.

    s_m = mean of softmax(z_m)[y] over rows with m, with z_m as in `ogm_ge`, and rho_m = s_m / mean
    of the other s_n, from sums over the last `window` updates and all processes; q_m = q (1 +
    lambda tanh(rho_m - 1)) clipped to [0, 1] where rho_m > 1, else 0. With probability p a step
    hides modality m of each row with probability q_m. The modality that lags most has q = 0, so a
    complete row keeps something. Hiding edits the data, and no optimiser cancels it. Differs from
    the authors' code: any number of modalities; a hidden modality is absent, not zero, and nothing
    is scaled by 1 / (1 - q), which is biased; scores come from a window instead of one batch.

    Missing: left out of the scores; a row never loses its last modality.
    Pitfall: scores follow the updates, so the first step after `start` hides nothing.
    Use when: one modality dominates and the optimiser is Adam, or robustness to its absence is
    wanted too.

    Settings:
        rate: q, the probability of hiding at rho just above 1, 0 to 1 (authors: 0.4 or 0.5)
        slope: lambda, how much the probability grows with the lead, at least 0
        steps: p, the share of steps that hide anything, 0 to 1
        window: updates whose scores count, at least 1 (authors: 1)

    Shapes: logits of each modality (B, M, K) -> q (M,); batch.present (B, M) bool -> (B, M) bool
    """

    raw_inputs = False
    sums: Tensor
    updates: Tensor

    def __init__(
        self,
        inputs: StrategyInputs,
        *,
        rate: float = 0.5,
        slope: float = 0.5,
        steps: float = 0.7,
        window: int = 20,
        start: float = 6.0,
        end: float | None = None,
    ) -> None:
        super().__init__(inputs, start=start, end=end)
        self.require(0 <= rate <= 1, f"rate={rate:g}; it must be in [0, 1]")
        self.require(slope >= 0, f"slope={slope:g}; it must be at least 0")
        self.require(0 <= steps <= 1, f"steps={steps:g}; it must be in [0, 1]")
        self.require(window >= 1, f"window={window}; it must be at least 1")
        self.require(len(self.widths) > 1, "it hides modalities, and the model has only one")
        self.require_classes(inputs.targets)
        self.rate, self.slope, self.steps = rate, slope, steps
        self.size = len(inputs.targets)
        self.tally = BatchSum()  # sums of scores, rows: (2, M)
        zeros = torch.zeros(window, 2, len(self.widths), dtype=torch.float64)
        self.register_buffer("sums", zeros)  # of the last updates, in a ring
        self.register_buffer("updates", torch.tensor(0))

    def active(self, context: StepContext) -> bool:
        return bool(self.rate and self.steps) and super().active(context)

    def edit_batch(self, batch: Batch, rows: Tensor, context: StepContext) -> Batch:
        known = bool(((rows >= 0) & (rows < self.size)).all())
        self.require(known, "the batch holds samples that are not of the training split")
        rates = hiding_rates(self.sums.sum(0), self.rate, self.slope).cpu()
        hides = torch.rand((), generator=self.draw(context.step)) < self.steps
        if not (hides and rates.any()):
            return batch
        generator = self.draw(context.step, 1)
        uniform = torch.rand(self.size, len(self.widths), generator=generator)[rows]
        remaining = batch.present & (uniform >= rates).to(batch.present.device)
        present = torch.where(remaining.any(1)[:, None], remaining, batch.present)
        return batch._replace(present=present)

    def extra_losses(self, context: StepContext) -> dict[str, LossTerm]:
        self.tally.add(sums_of_scores(self.fusion, context), context)
        return {}

    def edit_gradients(
        self, encoders: Mapping[str, Sequence[nn.Parameter]], context: StepContext
    ) -> None:
        self.sums[int(self.updates) % len(self.sums)] = self.tally.take(self.world).to(self.sums)
        self.updates += 1


def hiding_rates(sums: Tensor, rate: float, slope: float) -> Tensor:
    """Return q: sums of scores, and rows (2, M) -> (M,); 0 for modalities without any rows."""
    known, scores = sums[1] > 0, mean_of_sums(sums)
    others = (scores.sum() - scores) / (known.sum() - 1).clamp(min=1)
    lead = scores / others.clamp(min=torch.finfo(scores.dtype).tiny) - 1
    ahead = known & (known.sum() > 1) & (scores > others)
    return torch.where(ahead, (rate * (1 + slope * lead.tanh())).clamp(0, 1), 0)
