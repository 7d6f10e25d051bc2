"""One learning-rate group per modality and one for the fusion, split by layer and weight decay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from fusionzoo.config import OptimConfig
from fusionzoo.config.schema import KEYED, UNFREEZING
from fusionzoo.encoders.layers import layer_numbers
from fusionzoo.errors import FusionZooError, did_you_mean
from fusionzoo.model import FusionModel

from .unfreezing import Unfreezing

Group = dict[str, Any]


def param_groups(
    model: FusionModel, heads: nn.Module, cfg: OptimConfig, balance: nn.Module | None = None
) -> list[Group]:
    """Put every trainable parameter in exactly one named group: `image`, `image/no_decay`, ...

    With `layer_decay` each layer has a group: `image/layer3`, `image/layer3/no_decay`. `heads` are
    the unimodal heads (group `unimodal`), `balance` the parameters of balancing strategies; both
    use the base rate; a strategy with an `lr_scale` has a group of its own at that multiple of it.
    Norms, biases and other vectors have no weight decay.
    """
    strategies = {} if balance is None else dict(balance.named_children())
    scales = {name: float(getattr(x, "lr_scale", 1.0)) for name, x in strategies.items()}
    at_base_rate = nn.ModuleDict({n: x for n, x in strategies.items() if scales[n] == 1})
    _check_keys(model, cfg)
    lr = {"fusion": cfg.fusion_lr or cfg.lr, **cfg.modality_lr}
    lr |= {f"balance/{name}": cfg.lr * scale for name, scale in scales.items()}
    owners = [*model.named_encoders(), ("fusion", model.fusion), ("unimodal", heads)]
    owners += [("balance", at_base_rate)]
    owners += [(f"balance/{n}", x) for n, x in strategies.items() if scales[n] != 1]
    groups = [
        group
        for name, module in owners
        for group in _split(
            name,
            module,
            lr.get(name, cfg.lr),
            decay=cfg.modality_weight_decay.get(name, cfg.weight_decay),
            factor=cfg.layer_decay.get(name),
        )
    ]
    of_strategies = [p for strategy in strategies.values() for p in strategy.parameters()]
    _check_coverage(groups, [*model.parameters(), *heads.parameters(), *of_strategies])
    return groups


def _check_keys(model: FusionModel, cfg: OptimConfig) -> None:
    """Raise on settings of modalities that the model does not have or does not train."""
    for setting in KEYED:
        names = [*model.encoders, *([] if setting in UNFREEZING else ["fusion"])]
        for name in getattr(cfg, setting):
            if name not in names:
                raise FusionZooError(
                    f"--optim.{setting}.{name}: the model has no modality {name!r}."
                    f"{did_you_mean(name, names)} It has: {', '.join(names)}."
                )
            if name in model.encoders and not any(
                p.requires_grad for p in model.encoders[name].parameters()
            ):
                raise FusionZooError(
                    f"--optim.{setting}.{name}: its encoder is frozen or has no parameters;"
                    f" --encoders.{name}.freeze none trains it"
                )
    if cfg.fusion_lr is not None and "fusion" in cfg.modality_lr:
        raise FusionZooError("--optim.fusion_lr and --optim.modality_lr.fusion: give one of them")


def _split(
    owner: str, module: nn.Module, lr: float, *, decay: float, factor: float | None
) -> Iterator[Group]:
    """Yield the groups of one part of the model; the last layer has the full rate."""
    numbers = {} if factor is None else layer_numbers(module)
    top = max(numbers.values(), default=0)
    layers: dict[int, list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            layers.setdefault(numbers.get(name, top), []).append(parameter)
    for number, params in sorted(layers.items()):
        label = owner if factor is None else f"{owner}/layer{number}"
        rate = lr if factor is None else lr * factor ** (top - number)
        for name, members, weight_decay in (
            (label, [p for p in params if p.ndim > 1], decay),
            (f"{label}/no_decay", [p for p in params if p.ndim <= 1], 0.0),
        ):
            if members:
                yield {
                    "name": name,
                    "owner": owner,
                    "params": members,
                    "lr": rate,
                    "base_lr": rate,
                    "weight_decay": weight_decay,
                }


def _check_coverage(groups: list[Group], parameters: list[nn.Parameter]) -> None:
    grouped = [id(p) for group in groups for p in group["params"]]
    trainable = {id(p) for p in parameters if p.requires_grad}
    if len(grouped) != len(set(grouped)) or set(grouped) != trainable:
        raise FusionZooError("a trainable parameter is in no group, or in more than one")
    if not grouped:
        raise FusionZooError("nothing to train: every parameter is frozen")


def describe(
    groups: list[Group], model: FusionModel, cfg: OptimConfig, unfreezing: Unfreezing
) -> list[dict[str, Any]]:
    """Return the facts of each group, and of parameters that are frozen for the whole run.

    `frozen_until` holds the epochs (from 0) at which its first and last parameters are unfrozen.
    """
    rows = [
        {
            **_size(group["name"], group["params"], trainable=True),
            "lr": group["base_lr"],
            "weight_decay": group["weight_decay"],
            "schedule": cfg.modality_schedule.get(group["owner"], cfg.schedule),
            "warmup": cfg.modality_warmup.get(group["owner"], cfg.warmup),
            "frozen_until": unfreezing.span(group["params"]),
        }
        for group in groups
    ]
    for name, module in (*model.named_encoders(), ("fusion", model.fusion)):
        frozen = [p for p in module.parameters() if not p.requires_grad]
        if frozen:
            rows.append(_size(f"{name} (frozen)", frozen, trainable=False))
    return rows


def _size(name: str, params: list[nn.Parameter], *, trainable: bool) -> dict[str, Any]:
    count = sum(p.numel() for p in params)
    return {"group": name, "tensors": len(params), "parameters": count, "trainable": trainable}


def group_rows(described: list[dict[str, Any]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return header and rows of the table of groups, from the result of `describe`."""
    header = ("group", "tensors", "parameters", "lr", "weight decay", "schedule", "warm-up")
    return (*header, "frozen until"), [_row(group) for group in described]


def _row(group: dict[str, Any]) -> tuple[str, ...]:
    sizes = (group["group"], f"{group['tensors']}", f"{group['parameters']:,}")
    if not group["trainable"]:
        return (*sizes, "-", "-", "-", "-", "the end")
    epochs = [str(epoch) for epoch in dict.fromkeys(group["frozen_until"])]
    return (
        *sizes,
        f"{group['lr']:.3g}",
        f"{group['weight_decay']:g}",
        group["schedule"],
        f"{100 * group['warmup']:g} %",
        f"epoch {' to '.join(epochs)}" if epochs else "-",
    )
