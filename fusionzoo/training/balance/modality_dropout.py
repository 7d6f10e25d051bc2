"""Modality dropout: now and then, train as if a modality were missing."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count

import torch
from torch import Tensor

from fusionzoo.structures import Batch, StepContext

from .base import BALANCE, Balance, StrategyInputs


@BALANCE.register(family="data", paper="Neverova et al. 2016, TPAMI, arXiv:1501.00102")
class ModalityDropout(Balance):
    """Hide each modality of each sample with probability `rate`, but never all of them.

    p' = p and keep, keep_m ~ Bernoulli(1 - q_m), drawn anew for a sample until one modality stays:
    with all M present, each stays with probability (1 - q) / (1 - q^M). Only presence is edited;
    nothing is scaled by 1 / (1 - q). Draws are a table of the split's samples per (seed, epoch,
    round), so they depend neither on batches nor on their order nor on the number of processes.
    Differs from the paper: no layer-wise schedule; a hidden modality is absent, not zero.

    Missing: stays missing; a sample with one modality keeps it.
    Pitfall: "drop, then force one back at random" has other marginals than redrawing does.
    Use when: modalities will be missing at test time, or one of them drowns the others.

    Shapes: batch.present (B, M) bool -> (B, M) bool
    """

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
        self.size = len(inputs.targets)
        self.tables: dict[tuple[int, int], Tensor] = {}  # (epoch, round) -> (N, M) bool

    def active(self, context: StepContext) -> bool:
        return any(self.rates.values()) and super().active(context)

    def edit_batch(self, batch: Batch, rows: Tensor, context: StepContext) -> Batch:
        known = bool(((rows >= 0) & (rows < self.size)).all())
        self.require(known, "the batch holds samples that are not of the training split")
        present = batch.present.clone()
        undecided = present.sum(1) > 1
        for number in count():
            if not undecided.any():
                break
            kept = batch.present & self.table(int(context.epoch), number)[rows].to(present.device)
            decided = undecided & kept.any(1)
            present[decided] = kept[decided]
            undecided = undecided & ~decided
        return batch._replace(present=present)

    def table(self, epoch: int, number: int) -> Tensor:
        """Return what each sample keeps in an epoch at the draw `number`: (N, M) bool."""
        key = (epoch, number)
        if key not in self.tables:
            self.tables = {old: kept for old, kept in self.tables.items() if old[0] == epoch}
            chance = torch.rand(self.size, len(self.rates), generator=self.draw(*key))
            self.tables[key] = chance >= torch.tensor(list(self.rates.values()))
        return self.tables[key]
