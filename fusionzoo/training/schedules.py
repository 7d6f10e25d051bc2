"""Learning-rate schedules: factors of the rates as functions of step and validation losses.

All are stateless, so a resumed run continues exactly.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Protocol

from fusionzoo.config import OptimConfig
from fusionzoo.errors import FusionZooError
from fusionzoo.structures import Phase

from .freezing import first_epoch

Factors = dict[str, float]  # modality or `fusion` -> factor; "" = all others
STEP_EPOCHS, PLATEAU_EPOCHS = 10, 3  # where `step_epochs` is not given
CYCLE_START, CYCLE_END = 1 / 25, 1 / 250_000  # of the peak, as torch's OneCycleLR


class Plan(Protocol):
    """Phase and learning-rate factors at a step."""

    def __call__(
        self, step: int, losses: Sequence[float] = (), restarts: Mapping[str, int] | None = None
    ) -> tuple[int, Factors]:
        """Return the phase of a step, and the factors of the rates; `losses` has one per epoch.

        `restarts`: modality -> epoch at which its schedule starts anew, with its warm-up, for the
        steps that remain of the phase.
        """


def schedule(
    cfg: OptimConfig, steps: int, steps_per_epoch: int, owner: str = ""
) -> Callable[[int, Sequence[float]], float]:
    """Return the factor function of `owner`; its losses are those of the epochs since step 0.

    >>> factor = schedule(OptimConfig(warmup=0.2), steps=10, steps_per_epoch=5)
    >>> [round(factor(step, []), 2) for step in (0, 1, 2, 6, 9)]
    [0.5, 1.0, 1.0, 0.5, 0.04]
    """
    kind = cfg.modality_schedule.get(owner, cfg.schedule)
    warmup_steps = round(cfg.modality_warmup.get(owner, cfg.warmup) * steps)

    def factor(step: int, losses: Sequence[float]) -> float:
        if kind == "onecycle":
            return _one_cycle(step, warmup_steps, steps)
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = (step - warmup_steps) / max(1, steps - warmup_steps)
        if kind == "cosine":
            return _cosine(1.0, 0.0, progress)
        if kind == "linear":
            return 1 - progress
        if kind == "step":
            return cfg.gamma ** (step // ((cfg.step_epochs or STEP_EPOCHS) * steps_per_epoch))
        if kind == "plateau":
            return cfg.gamma ** drops(losses, cfg.step_epochs or PLATEAU_EPOCHS)
        return 1.0

    return factor


def _cosine(start: float, end: float, progress: float) -> float:
    return end + (start - end) * (0.5 * (1 + math.cos(math.pi * progress)))


def _one_cycle(step: int, warmup_steps: int, steps: int) -> float:
    """Rise from 1/25 to 1, then fall to almost 0; the peak is the last step of the rise."""
    peak = max(warmup_steps - 1, 0)
    if step < peak:
        return _cosine(CYCLE_START, 1.0, step / peak)
    return _cosine(1.0, CYCLE_END, (step - peak) / max(1, steps - 1 - peak))


def drops(losses: Sequence[float], patience: int) -> int:
    """Count how often `patience` consecutive epochs did not improve on the best loss.

    >>> [drops([3, 2, 2, 2, 1, 1, 1][:epochs], patience=2) for epochs in range(8)]
    [0, 0, 0, 0, 1, 1, 1, 2]
    """
    best, waited, count = math.inf, 0, 0
    for loss in losses:
        waited = 0 if loss < best else waited + 1
        best = min(best, loss)
        if waited == patience:
            waited, count = 0, count + 1
    return count


def phased(cfg: OptimConfig, phases: Sequence[Phase], steps: int, steps_per_epoch: int) -> Plan:
    """Return the plan of a run: the schedule restarts in each phase.

    The schedule of an encoder that is frozen at first starts when it is unfrozen.

    >>> halves = [Phase("first", 0.5), Phase("second", 0.5)]
    >>> plan = phased(OptimConfig(warmup=0.0), halves, steps=8, steps_per_epoch=4)
    >>> [(phase, round(factors[""], 2)) for phase, factors in map(plan, (0, 2, 4, 6))]
    [(0, 1.0), (0, 0.5), (1, 1.0), (1, 0.5)]
    """
    if steps < len(phases):
        raise FusionZooError(
            f"the fusion trains in {len(phases)} phases, and the run has only {steps} steps"
        )
    shares = accumulate(phase.share for phase in phases)
    min_stops = range(1, len(phases) + 1)  # a step for each phase
    stops = [
        min(max(round(steps * share), number), steps - len(phases) + number)
        for number, share in zip(min_stops, shares, strict=True)
    ]
    owners = {"", *cfg.modality_schedule, *cfg.modality_warmup}
    owners |= {*cfg.unfreeze_at_epoch, *cfg.gradual_unfreeze}
    begins = {owner: first_epoch(cfg, owner) * steps_per_epoch for owner in sorted(owners)}

    def factor_function(
        owner: str, start: int, stop: int
    ) -> Callable[[int, Sequence[float]], float]:
        begin = min(max(start, begins.get(owner, 0)), stop)
        factor = schedule(cfg, stop - begin, steps_per_epoch, owner)
        epoch = begin // steps_per_epoch
        return lambda step, losses: factor(step - begin, losses[epoch:]) if step >= begin else 0.0

    starts = [0, *stops[:-1]]
    factors = [
        {owner: factor_function(owner, start, stop) for owner in begins}
        for start, stop in zip(starts, stops, strict=True)
    ]

    def plan(
        step: int, losses: Sequence[float] = (), restarts: Mapping[str, int] | None = None
    ) -> tuple[int, Factors]:
        number = bisect_right(stops[:-1], step)
        functions = dict(factors[number])
        for owner, epoch in (restarts or {}).items():
            start = max(starts[number], epoch * steps_per_epoch)
            functions[owner] = factor_function(owner, start, stops[number])
        return number, {owner: factor(step, losses) for owner, factor in functions.items()}

    return plan
