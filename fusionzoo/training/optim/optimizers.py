"""Build optimisers by name, and set the learning rates of their groups."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import optim

from fusionzoo.config import OptimConfig
from fusionzoo.distributed.fsdp import is_shard
from fusionzoo.errors import FusionZooError, did_you_mean

from .param_groups import Group

# Optimisers that need something a training step does not provide.
UNFIT = {
    "lbfgs": "a closure",
    "sparseadam": "sparse gradients",
    "adahessian": "second derivatives",
}


def build_optimizer(groups: list[Group], cfg: OptimConfig) -> optim.Optimizer:
    """Build the optimiser, with fused kernels where it has them (faster on CPU too)."""
    name = cfg.name.lower()
    kind = _find(name)
    parameters = inspect.signature(kind).parameters
    setting_names = [key for key in parameters if key not in ("params", "lr", "weight_decay")]
    for key in cfg.settings:
        if key not in setting_names:
            raise FusionZooError(
                f"--optim.settings.{key}: {cfg.name} has no such setting."
                f"{did_you_mean(key, setting_names)} It has: {', '.join(setting_names)}."
            )
    settings: dict[str, Any] = {}
    if "sgd" in name and "momentum" in parameters:  # timm has variants
        settings["momentum"] = cfg.momentum
    elif name in ("adam", "adamw"):
        settings["betas"] = cfg.betas
    # Fused Adagrad works on the CPU only, fused SGD not on sharded weights.
    any_sharded = any(is_shard(p) for group in groups for p in group["params"])
    if (
        "fused" in parameters
        and kind is not optim.Adagrad
        and not (kind is optim.SGD and any_sharded)
    ):
        settings["fused"] = True
    settings |= {k: tuple(x) if isinstance(x, list) else x for k, x in cfg.settings.items()}
    try:
        optimizer = kind(groups, **settings)
    except (TypeError, ValueError, RuntimeError) as error:
        raise FusionZooError(f"--optim.name {cfg.name} with {settings}: {error}") from error
    if isinstance(optimizer, optim.SGD) and settings.get("momentum"):
        # Fused SGD raises if only some parameters of a group have a momentum buffer, which happens
        # with turns and phases. A buffer of zeros equals a missing one.
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def _find(name: str) -> Callable[..., optim.Optimizer]:
    """Return torch's optimiser of that name, else timm's."""
    torch_optimizers = {
        key.lower(): kind for key, kind in vars(optim).items() if isinstance(kind, type)
    }
    torch_optimizers = {
        key: kind for key, kind in torch_optimizers.items() if issubclass(kind, optim.Optimizer)
    }
    del (
        torch_optimizers["optimizer"],
        torch_optimizers["muon"],
    )  # torch's Muon takes no vectors; timm's does
    if name in UNFIT:
        raise FusionZooError(
            f"--optim.name {name} needs {UNFIT[name]}, which training does not provide"
        )
    if name in torch_optimizers:
        return torch_optimizers[name]
    from timm.optim import get_optimizer_class, list_optimizers

    names = sorted({*torch_optimizers, *list_optimizers()} - {*UNFIT})
    if name not in names:
        raise FusionZooError(
            f"unknown optimiser {name!r}.{did_you_mean(name, names)} There are: {', '.join(names)}."
        )
    try:
        return get_optimizer_class(name)
    except (ImportError, AssertionError) as error:
        raise FusionZooError(f"--optim.name {name}: {error}") from error


def set_rates(optimizer: optim.Optimizer, factors: Mapping[str, float]) -> None:
    """Scale each group's base rate by the factor of its owner, else by the default factor, ""."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factors.get(group["owner"], factors[""])


def rates(optimizer: optim.Optimizer) -> dict[str, float]:
    """Return each group's current learning rate."""
    return {group["name"]: group["lr"] for group in optimizer.param_groups}
