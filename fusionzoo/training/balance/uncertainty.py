"""Learn the weights of all losses of a run by their homoscedastic uncertainty."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusionzoo.errors import check_choice
from fusionzoo.machine.distributed import total
from fusionzoo.structures import StepContext, seed_of

from .base import BALANCE, Balance, LossTerm, MeanLoss, StrategyInputs

CAPACITY = 64  # losses of a run


@BALANCE.register(
    family="loss",
    paper="Kendall et al. 2018, CVPR, arXiv:1705.07115; Liebel and Körner 2018, arXiv:1805.06334",
)
class Uncertainty(Balance):
    """Weight each loss l_k of the run, those of other strategies too, by exp(-s_k), s_k learnt.

    L = sum_k exp(-s_k) l_k + s_k / 2, of squared errors (`gaussian`) sum_k exp(-s_k) l_k / 2 + s_k
    / 2 (twice that in the authors' code); penalty "log1p": log(1 + exp(s_k)) instead of s_k / 2. At
    the optimum exp(s_k) = 2 l_k, and the gradient of the model is that of sum_k log(l_k) / 2,
    whatever the units of l_k. l_k are means over the rows of all processes, times the weights their
    strategies give them. s_k starts at 0, stays in [-limit, limit], has 10 times the base learning
    rate and no weight decay. The fusion's own loss keeps weight 1, so that the meaning of the
    learning rate stays. Limits, rate and the fixed weight are ours.

    Missing: a loss for which no row counts leaves its s_k alone.
    Pitfall: a loss near 0 gets the largest weight: the easiest, or the most overfitted. Negative
    losses (`cca_loss`) have no optimum and are refused. Where the fusion's loss is the only one, it
    merely rescales the learning rate.
    Use when: several losses have different units, and there is no time to search their weights.

    Settings:
        free_main: whether the fusion's own loss has a weight to learn as well; None: only where it
            is the only loss
        gaussian: whether the losses are squared errors
        penalty: "half" for s / 2, or "log1p" for log(1 + exp(s)), which is never negative
        limit: largest absolute s, above 0

    Shapes: losses (), s (64,), one for each loss in the order of their appearance
    """

    raw_inputs = False
    lr_scale = 10.0
    keys: Tensor

    def __init__(
        self,
        inputs: StrategyInputs,
        *,
        free_main: bool | None = None,
        gaussian: bool = False,
        penalty: Literal["half", "log1p"] = "half",
        limit: float = 3.0,
        start: float = 0.0,
        end: float | None = None,
    ) -> None:
        super().__init__(inputs, start=start, end=end)
        check_choice("penalty", penalty, ("half", "log1p"))
        self.require(limit > 0, f"limit={limit:g}; it must be positive")
        self.free_main, self.gaussian, self.penalty = free_main, gaussian, penalty
        self.limit = limit
        self.log_variances = nn.Parameter(torch.zeros(CAPACITY))
        # What each of them belongs to: a hash of the loss's name, 0 where it is free.
        self.register_buffer("keys", torch.zeros(CAPACITY, dtype=torch.int64))
        self._in_forward: list[Tensor] = []  # `log_variances` as FSDP gathers them for the forward

    def main_loss(self, context: StepContext, loss: LossTerm) -> LossTerm:
        self._in_forward = [self.log_variances * 1.0]
        return loss

    def weigh(self, means: Mapping[str, MeanLoss]) -> Mapping[str, MeanLoss]:
        if not self._in_forward:
            return means
        log_variances = self._in_forward.pop()
        free = len(means) == 1 if self.free_main is None else self.free_main
        chosen = {name: mean for name, mean in means.items() if name or free}
        self._refuse_negative(chosen)
        weighed = dict(means)
        for name, mean in chosen.items():
            s = log_variances[self.place(name)].to(mean.value.dtype)
            penalty = s / 2 if self.penalty == "half" else F.softplus(s)
            value = (0.5 if self.gaussian else 1.0) * (-s).exp() * mean.value
            weighed[name] = mean._replace(value=value + penalty * (mean.rows > 0).to(s.dtype))
        return weighed

    def _refuse_negative(self, means: Mapping[str, MeanLoss]) -> None:
        """Raise, on all processes, if the mean of a loss over all rows is negative."""
        if not means:
            return
        values = torch.stack([mean.value.detach().double() for mean in means.values()])
        over_all = (total(values, self.world) / self.world.size).tolist()
        for name, value in zip(means, over_all, strict=True):
            self.require(
                not value < 0,
                f"the loss {name or 'of the fusion'!r} is {value:.3g}, and a negative loss has no"
                " optimal weight: train without its strategy or without uncertainty",
            )

    def place(self, name: str) -> int:
        """Return the place of a loss in `log_variances`, a new one for a new loss."""
        key = seed_of("loss", name)
        keys: list[int] = self.keys.tolist()
        if key not in keys:
            self.require(0 in keys, f"more than {CAPACITY} losses")
            self.keys[keys.index(0)] = key
            return keys.index(0)
        return keys.index(key)

    def weights(self, names: list[str]) -> dict[str, float]:
        """Return the weight exp(-s) of each of these losses."""
        learnt = (-self.log_variances.detach()).exp()
        return {name: float(learnt[self.place(name)]) for name in names}

    @torch.no_grad()
    def after_step(self) -> None:
        self.log_variances.clamp_(-self.limit, self.limit)
