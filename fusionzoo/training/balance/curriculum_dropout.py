"""Modality dropout whose rate rises during training."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fusionzoo.errors import check_choice
from fusionzoo.structures import Batch, StepContext

from .base import BALANCE, RunningTrainer, StrategyInputs
from .modality_dropout import ModalityDropout


@BALANCE.register(
    family="data",
    paper="Zheng et al. 2026, arXiv:2605.15235; Morerio et al. 2017, ICCV, arXiv:1703.06229",
)
class CurriculumDropout(ModalityDropout):
    """Hide random modalities at a rate that rises from 0, never all of a sample.

    As `modality_dropout`, with q_m(t) after t epochs (fractions count) and a ramp of T: linear q_m
    min(1, t / T), exp q_m (1 - exp(-10 t / T)), step 0 before T. With M modalities present and one
    q, each is hidden in r = (q - q^M) / (1 - q^M) of the samples, less than q because a sample
    whose modalities are all hidden is drawn again; `target` gives r, and q is solved for. T = 0
    draws what `modality_dropout` draws. The papers give the finding and the exponential ramp; the
    other ramps and defaults are ours.

    Missing: stays missing, and does not count towards r.
    Pitfall: robustness ends at the highest rate of training; a validation split in which more is
    missing raises a warning. Gaps in time within a modality are another failure.
    Use when: modalities will be missing at test time, and a high rate from the start slows
    learning.

    Settings:
        rate: highest probability q of hiding a modality, 0 to below 1; one number, or one per
            modality (those not named: 0)
        target: share r of samples in which a modality is hidden once the ramp is over, instead of
            `rate`; one number, or one per modality; the sum over the M modalities is below M - 1
        ramp: epochs T until the highest rate, at least 0; None for half of the training
        schedule: "linear", "exp" or "step"

    Shapes: batch.present (B, M) bool -> (B, M) bool
    """

    half_of_training: Tensor

    def __init__(
        self,
        inputs: StrategyInputs,
        *,
        rate: float | Mapping[str, float] = 0.5,
        target: float | Mapping[str, float] | None = None,
        ramp: float | None = None,
        schedule: Literal["linear", "exp", "step"] = "linear",
        start: float = 0.0,
        end: float | None = None,
    ) -> None:
        super().__init__(inputs, rate=rate, start=start, end=end)
        check_choice("schedule", schedule, ("linear", "exp", "step"))
        self.require(ramp is None or ramp >= 0, f"ramp={ramp}; it must be at least 0")
        self.ramp, self.schedule = ramp, schedule
        if target is not None:
            targets = self.per_modality("target", target)
            for name, share in targets.items():
                self.require(
                    0 <= share < 1, f"target={share:g} of {name}; it must be at least 0, below 1"
                )
            most = len(targets) - 1
            self.require(
                sum(targets.values()) < most or not any(targets.values()),
                f"target={target}: no sample loses all {len(targets)} modalities, so the shares"
                f" must add up to less than {most} (one number: below {most}/{len(targets)})",
            )
            solved = solve_rates(list(targets.values()))
            self.rates = dict(zip(targets, solved, strict=True))
        # Set as an epoch begins, -1 before; a run resumed within an epoch reads the checkpoint's.
        self.register_buffer("half_of_training", torch.tensor(-1.0, dtype=torch.float64))

    def begin_epoch(
        self, trainer: RunningTrainer, loaders: Mapping[str, Any], context: StepContext
    ) -> None:
        if self.ramp is None:
            self.half_of_training.fill_(trainer.cfg.train.epochs / 2)
        if "val" in loaders and context.epoch == math.ceil(self.start):
            self._warn_of_more(getattr(loaders["val"].dataset, "present", None))

    def _warn_of_more(self, present: Tensor | None) -> None:
        """Warn if validation lacks a modality more often than training will."""
        if present is None or not len(present):
            return
        hidden = hidden_shares(list(self.rates.values()))
        evaluated = (~present).double().mean(0).tolist()
        for name, most, share in zip(self.rates, hidden, evaluated, strict=True):
            if share > most + 0.01:
                warnings.warn(
                    f"curriculum_dropout: the validation split lacks {name} in {share:.0%} of the"
                    f" samples, and training hides it in at most {most:.0%}: beyond that nothing is"
                    " learnt; raise `target`",
                    stacklevel=2,
                )

    def rates_at(self, context: StepContext) -> list[float]:
        share = self.progress(context.epoch - self.start)
        return [share * rate for rate in self.rates.values()]

    def progress(self, epochs: float) -> float:
        """Return the share of the highest rate after some epochs, 0 to 1."""
        ramp = float(self.half_of_training) if self.ramp is None else self.ramp
        if ramp < 0:  # started within an epoch, whose beginning did not tell the length
            return 0.0
        if epochs >= ramp:
            return 1.0 if self.schedule != "exp" or ramp == 0 else -math.expm1(-10 * epochs / ramp)
        if self.schedule == "step":
            return 0.0
        return epochs / ramp if self.schedule == "linear" else -math.expm1(-10 * epochs / ramp)

    def edit_batch(self, batch: Batch, rows: Tensor, context: StepContext) -> Batch:
        return super().edit_batch(batch, rows, context) if any(self.rates_at(context)) else batch


def hidden_shares(rates: Sequence[float]) -> list[float]:
    """Return how often each modality ends up hidden, with all present: r from q.

    >>> [round(share, 3) for share in hidden_shares([0.5, 0.5])]
    [0.333, 0.333]
    """
    none_left = math.prod(rates)
    return [(rate - none_left) / (1 - none_left) for rate in rates]


def solve_rates(shares: Sequence[float]) -> list[float]:
    """Return the probabilities q of hiding that hide each modality in these shares r of samples.

    r = (q - p) / (1 - p) with p the product of the q, so q = r + p (1 - r); p is found by
    bisection.

    >>> [round(rate, 6) for rate in solve_rates([1 / 3, 1 / 3])]
    [0.5, 0.5]
    """

    def rates(product: float) -> list[float]:
        return [share + product * (1 - share) for share in shares]

    low, high = 0.0, 1.0
    # The product minus its argument is convex, at least 0 at 0, and 0 at 1 from below.
    for _ in range(200):
        middle = (low + high) / 2
        if math.prod(rates(middle)) > middle:
            low = middle
        else:
            high = middle
    return rates(low)
