"""The optimiser, by name, and the rates of its groups."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import optim

from fusionzoo.config import OptimConfig
from fusionzoo.distributed.fsdp import is_share
from fusionzoo.errors import FusionZooError, did_you_mean

from .param_groups import Group

# What a training step does not give them.
UNFIT = {
    "lbfgs": "a closure",
    "sparseadam": "sparse gradients",
    "adahessian": "second derivatives",
}


def build_optimizer(groups: list[Group], cfg: OptimConfig) -> optim.Optimizer:
    """Build the optimiser; the fused kernels are faster on CPU too."""
    name = cfg.name.lower()
    kind = _find(name)
    known = inspect.signature(kind).parameters
    own = [key for key in known if key not in ("params", "lr", "weight_decay")]
    for key in cfg.settings:
        if key not in own:
            raise FusionZooError(
                f"--optim.settings.{key}: {cfg.name} has no such setting."
                f"{did_you_mean(key, own)} It has: {', '.join(own)}."
            )
    settings: dict[str, Any] = {}
    if "sgd" in name and "momentum" in known:  # timm has variants
        settings["momentum"] = cfg.momentum
    elif name in ("adam", "adamw"):
        settings["betas"] = cfg.betas
    # Adagrad's is for the CPU alone, SGD's cannot update weights that are shared out.
    shared = any(is_share(p) for group in groups for p in group["params"])
    if "fused" in known and kind is not optim.Adagrad and not (kind is optim.SGD and shared):
        settings["fused"] = True
    settings |= {k: tuple(x) if isinstance(x, list) else x for k, x in cfg.settings.items()}
    try:
        made = kind(groups, **settings)
    except (TypeError, ValueError, RuntimeError) as error:
        raise FusionZooError(f"--optim.name {cfg.name} with {settings}: {error}") from error
    if isinstance(made, optim.SGD) and settings.get("momentum"):
        # The fused kernel refuses a group of which only some have had a gradient before: turns,
        # phases. A momentum of 0 is where the others start, too.
        for parameter in (p for group in made.param_groups for p in group["params"]):
            made.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return made


def _find(name: str) -> Callable[..., optim.Optimizer]:
    """Return torch's optimiser of that name, else timm's."""
    own = {key.lower(): kind for key, kind in vars(optim).items() if isinstance(kind, type)}
    own = {key: kind for key, kind in own.items() if issubclass(kind, optim.Optimizer)}
    del own["optimizer"], own["muon"]  # torch's Muon takes no vectors; timm's does
    if name in UNFIT:
        raise FusionZooError(f"--optim.name {name} needs {UNFIT[name]}, which training has not")
    if name in own:
        return own[name]
    from timm.optim import get_optimizer_class, list_optimizers

    known = sorted({*own, *list_optimizers()} - {*UNFIT})
    if name not in known:
        raise FusionZooError(
            f"unknown optimiser {name!r}.{did_you_mean(name, known)} There are: {', '.join(known)}."
        )
    try:
        return get_optimizer_class(name)
    except (ImportError, AssertionError) as error:
        raise FusionZooError(f"--optim.name {name}: {error}") from error


def set_rates(optimizer: optim.Optimizer, factors: Mapping[str, float]) -> None:
    """Scale each group's own base rate by its owner's factor, or by that of "", all others."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factors.get(group["owner"], factors[""])


def rates(optimizer: optim.Optimizer) -> dict[str, float]:
    """Return each group's rate of the moment."""
    return {group["name"]: group["lr"] for group in optimizer.param_groups}
