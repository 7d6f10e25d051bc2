"""Modality dropout: hide random modalities in training."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count

import torch
from torch import Tensor

from fusionzoo.structures import Batch, StepContext

from ._shared import SubsetDraws
from .base import BALANCE, Balance, StrategyInputs


@BALANCE.register(family="data", paper="Neverova et al. 2016, TPAMI, arXiv:1501.00102")
class ModalityDropout(Balance):
    """Hide each modality of each sample with probability q, but never all of them.

    p' = p and keep, keep_m ~ Bernoulli(1 - q_m), redrawn for a sample until at least one modality
    remains; with all M present, each remains with probability (1 - q) / (1 - q^M). Only presence is
    changed; nothing is scaled by 1 / (1 - q). The draws are a table over the split's samples per
    (seed, epoch, round), so they depend neither on batches, nor on their order, nor on the number
    of processes. Differs from the paper: no layer-wise schedule; a hidden modality is absent, not
    zero.

    Missing: stays missing; a sample with a single modality keeps it.
    Pitfall: dropping all and restoring one at random has other marginals than redrawing.
    Use when: modalities will be missing at test time, or one of them dominates the others.

    Settings:
        rate: probability q of hiding a modality, 0 to below 1; one number, or one per modality
            (those not named: 0)

    Shapes: batch.present (B, M) bool -> (B, M) bool
    """

    raw_inputs = False

    def __init__(
        self,
        inputs: StrategyInputs,
        *,
        rate: float | Mapping[str, float] = 0.3,
        start: float = 0.0,
        end: float | None = None,
    ) -> None:
        super().__init__(inputs, start=start, end=end)
        self.rates = self.per_modality("rate", rate)
        for q in self.rates.values():
            self.require(0 <= q < 1, f"rate={q:g}; it must be at least 0 and less than 1")
        self.draws = SubsetDraws(
            len(inputs.targets), len(self.rates), self.seed, "modality_dropout"
        )

    def active(self, context: StepContext) -> bool:
        return any(self.rates.values()) and super().active(context)

    def edit_batch(self, batch: Batch, rows: Tensor, context: StepContext) -> Batch:
        known = bool(((rows >= 0) & (rows < self.draws.size)).all())
        self.require(known, "the batch holds samples that are not of the training split")
        present = batch.present.clone()
        undecided = present.sum(1) > 1
        rates = torch.tensor(self.rates_at(context))
        for number in count():
            if not undecided.any():
                break
            is_kept = self.draws.table(int(context.epoch), number)[rows] >= rates
            remaining = batch.present & is_kept.to(present.device)
            decided = undecided & remaining.any(1)
            present[decided] = remaining[decided]
            undecided = undecided & ~decided
        return batch._replace(present=present)

    def rates_at(self, context: StepContext) -> list[float]:
        """Return the probability of hiding each modality in a step."""
        return list(self.rates.values())
