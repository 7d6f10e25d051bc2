"""One learning-rate group per modality and one for the fusion, each split by weight decay."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn, optim

from ..config import OptimConfig
from ..errors import FusionZooError, did_you_mean
from ..model import FusionModel
from ..structures import Phase

Group = dict[str, Any]


def param_groups(
    model: FusionModel, heads: nn.Module, cfg: OptimConfig, balance: nn.Module | None = None
) -> list[Group]:
    """Put every trainable parameter in exactly one named group: `image`, `image/no_decay`, ...

    `heads` are the modalities' own heads (group `unimodal`), `balance` what training strategies
    learn; both learn at the base rate. Norms, biases and other vectors are never decayed.
    """
    balance = nn.ModuleDict() if balance is None else balance
    for name in cfg.modality_lr:
        if name not in model.encoders:
            raise FusionZooError(
                f"--optim.modality_lr.{name}: the model has no modality {name!r}."
                f"{did_you_mean(name, model.encoders)} It has: {', '.join(model.encoders)}."
            )
        if not any(p.requires_grad for p in model.encoders[name].parameters()):
            raise FusionZooError(
                f"--optim.modality_lr.{name}: its encoder is frozen or has no parameters;"
                f" --encoders.{name}.freeze none trains it"
            )
    rates = {name: cfg.modality_lr.get(name, cfg.lr) for name in model.encoders}
    owners: list[tuple[str, nn.Module, float]] = []
    owners += [(name, encoder, rates[name]) for name, encoder in model.named_encoders()]
    owners += [("fusion", model.fusion, cfg.fusion_lr or cfg.lr), ("unimodal", heads, cfg.lr)]
    owners += [("balance", balance, cfg.lr)]
    groups = [group for owner in owners for group in _split(*owner, cfg.weight_decay)]
    _check_coverage(groups, [*model.parameters(), *heads.parameters(), *balance.parameters()])
    return groups


def _split(name: str, module: nn.Module, lr: float, decay: float) -> Iterator[Group]:
    trainable = [p for p in module.parameters() if p.requires_grad]
    matrices = [p for p in trainable if p.ndim > 1]
    vectors = [p for p in trainable if p.ndim <= 1]
    for label, params, weight_decay in (
        (name, matrices, decay),
        (f"{name}/no_decay", vectors, 0.0),
    ):
        if params:
            yield {
                "name": label,
                "params": params,
                "lr": lr,
                "base_lr": lr,
                "weight_decay": weight_decay,
            }


def _check_coverage(groups: list[Group], parameters: list[nn.Parameter]) -> None:
    grouped = [id(p) for group in groups for p in group["params"]]
    wanted = {id(p) for p in parameters if p.requires_grad}
    if len(grouped) != len(set(grouped)) or set(grouped) != wanted:
        raise FusionZooError("a trainable parameter stands in no group, or in more than one")
    if not grouped:
        raise FusionZooError("nothing to train: every parameter is frozen")


def build_optimizer(groups: list[Group], cfg: OptimConfig) -> optim.Optimizer:
    """Build the optimiser; the fused kernels are faster on CPU too."""
    if cfg.name == "sgd":
        sgd = optim.SGD(groups, momentum=cfg.momentum, fused=True)
        # The fused kernel refuses a group of which only some have had a gradient before: turns,
        # phases. A momentum of 0 is where the others start, too.
        for parameter in (p for group in sgd.param_groups for p in group["params"]):
            if cfg.momentum:
                sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return sgd
    kind = optim.AdamW if cfg.name == "adamw" else optim.Adam
    return kind(groups, betas=cfg.betas, fused=True)


def schedule(cfg: OptimConfig, steps: int, steps_per_epoch: int) -> Callable[[int], float]:
    """Return the factor of every group's rate as a function of the step alone.

    >>> factor = schedule(OptimConfig(warmup=0.2), steps=10, steps_per_epoch=5)
    >>> [round(factor(step), 2) for step in (0, 1, 2, 6, 9)]
    [0.5, 1.0, 1.0, 0.5, 0.04]
    """
    rising = round(cfg.warmup * steps)

    def factor(step: int) -> float:
        if step < rising:
            return (step + 1) / rising
        if cfg.schedule == "cosine":
            done = (step - rising) / max(1, steps - rising)
            return 0.5 * (1 + math.cos(math.pi * done))
        if cfg.schedule == "step":
            return cfg.gamma ** (step // (cfg.step_epochs * steps_per_epoch))
        return 1.0

    return factor


def phased(
    cfg: OptimConfig, phases: Sequence[Phase], steps: int, steps_per_epoch: int
) -> Callable[[int], tuple[int, float]]:
    """Return the phase of a step, and its factor: each phase has a schedule of its own.

    >>> halves = [Phase("first", 0.5), Phase("second", 0.5)]
    >>> at = phased(OptimConfig(warmup=0.0), halves, steps=8, steps_per_epoch=4)
    >>> [(phase, round(factor, 2)) for phase, factor in map(at, (0, 2, 4, 6))]
    [(0, 1.0), (0, 0.5), (1, 1.0), (1, 0.5)]
    """
    if steps < len(phases):
        raise FusionZooError(
            f"the fusion trains in {len(phases)} phases, and the run has only {steps} steps"
        )
    shares = accumulate(phase.share for phase in phases)
    least = range(1, len(phases) + 1)  # a step for each phase
    stops = [
        min(max(round(steps * share), number), steps - len(phases) + number)
        for number, share in zip(least, shares, strict=True)
    ]
    starts = [0, *stops[:-1]]
    factors = [
        schedule(cfg, stop - start, steps_per_epoch)
        for start, stop in zip(starts, stops, strict=True)
    ]

    def at(step: int) -> tuple[int, float]:
        number = bisect_right(stops[:-1], step)
        return number, factors[number](step - starts[number])

    return at


def set_rates(optimizer: optim.Optimizer, factor: float) -> None:
    """Scale each group's own base rate."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor


def rates(optimizer: optim.Optimizer) -> dict[str, float]:
    """Return each group's rate of the moment."""
    return {group["name"]: group["lr"] for group in optimizer.param_groups}


def group_rows(
    groups: list[Group], model: FusionModel
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the header and the rows of the table of groups; what is frozen stands in it too."""
    header = ("group", "tensors", "parameters", "lr", "weight decay")

    def row(name: str, params: list[nn.Parameter], lr: str, decay: str) -> tuple[str, ...]:
        return name, f"{len(params)}", f"{sum(p.numel() for p in params):,}", lr, decay

    rows = [
        row(g["name"], g["params"], f"{g['base_lr']:g}", f"{g['weight_decay']:g}") for g in groups
    ]
    for name, module in (*model.named_encoders(), ("fusion", model.fusion)):
        frozen = [p for p in module.parameters() if not p.requires_grad]
        if frozen:
            rows.append(row(f"{name} (frozen)", frozen, "-", "-"))
    return header, rows
