"""Parameter groups, optimisers, gradient clipping, mixed precision, and the EMA of the weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from fusionzoo.config import OptimConfig, TrainConfig
from fusionzoo.config.schema import KEYED, UNFREEZING
from fusionzoo.encoders.base import layer_numbers
from fusionzoo.errors import FusionZooError, check_known, explained
from fusionzoo.machine.fsdp import full_tensor, is_shard, reshard, shard_like
from fusionzoo.model.fusion_model import FusionModel

from .freezing import Unfreezing

Group = dict[str, Any]
# Optimisers that need something a training step does not provide.
UNFIT = {
    "lbfgs": "a closure",
    "sparseadam": "sparse gradients",
    "adahessian": "second derivatives",
}
MOMENTUM = 0.9  # of SGD
AMP_DTYPES = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def param_groups(
    model: FusionModel, heads: nn.Module, cfg: OptimConfig, balance: nn.Module | None = None
) -> list[Group]:
    """Put every trainable parameter in exactly one named group: `image`, `image/no_decay`, ...

    With `layer_decay` each layer has a group: `image/layer3`, `image/layer3/no_decay`. `heads` are
    the unimodal heads (group `unimodal`), `balance` the parameters of training strategies; both
    use the base rate; a strategy with an `lr_scale` has a group of its own at that multiple of it.
    Norms, biases, other vectors and what a timm model lists have no weight decay.
    """
    strategies = {} if balance is None else dict(balance.named_children())
    scales = {name: float(getattr(x, "lr_scale", 1.0)) for name, x in strategies.items()}
    at_base_rate = nn.ModuleDict({n: x for n, x in strategies.items() if scales[n] == 1})
    _check_keys(model, cfg)
    lr = dict(cfg.modality_lr)
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
            problem = f"--optim.{setting}.{name}: the model has no modality {name!r}"
            check_known(name, names, problem)
            if name in model.encoders and not any(
                p.requires_grad for p in model.encoders[name].parameters()
            ):
                raise FusionZooError(
                    f"--optim.{setting}.{name}: its encoder is frozen or has no parameters;"
                    f" --encoders.{name}.freeze none trains it"
                )


def _split(
    owner: str, module: nn.Module, lr: float, *, decay: float, factor: float | None
) -> Iterator[Group]:
    """Yield the groups of one part of the model; the last layer has the full rate."""
    numbers = {} if factor is None else layer_numbers(module)
    top = max(numbers.values(), default=0)
    layers: dict[int, list[nn.Parameter]] = {}
    undecayed = _undecayed(module)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            layers.setdefault(numbers.get(name, top), []).append(parameter)
    for number, params in sorted(layers.items()):
        label = owner if factor is None else f"{owner}/layer{number}"
        rate = lr if factor is None else lr * factor ** (top - number)
        for name, members, weight_decay in (
            (label, [p for p in params if id(p) not in undecayed], decay),
            (f"{label}/no_decay", [p for p in params if id(p) in undecayed], 0.0),
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


def _undecayed(module: nn.Module) -> set[int]:
    """Return the `id` of each parameter without weight decay: vectors, and those that a network
    lists, as timm's do: class tokens, position embeddings, tables of relative positions."""
    named = {
        f"{prefix}.{name}".removeprefix(".")
        for prefix, part in module.named_modules()
        if callable(getattr(part, "no_weight_decay", None))
        for name in part.no_weight_decay()
    }
    return {id(p) for name, p in module.named_parameters() if p.ndim <= 1 or name in named}


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
    """Return header and rows of the table of groups, from the result of `describe`; of 80 columns
    where names are short."""
    header = ("group", "parameters", "lr", "weight\ndecay", "schedule,\nwarm-up", "frozen\nuntil")
    return header, [_row(group) for group in described]


def _row(group: dict[str, Any]) -> tuple[str, ...]:
    sizes = (group["group"], f"{group['parameters']:,}")
    if not group["trainable"]:
        return (*sizes, "-", "-", "-", "the end")
    epochs = [str(epoch) for epoch in dict.fromkeys(group["frozen_until"])]
    return (
        *sizes,
        f"{group['lr']:.3g}",
        f"{group['weight_decay']:g}",
        f"{group['schedule']}, {100 * group['warmup']:g} %",
        f"epoch {' to '.join(epochs)}" if epochs else "-",
    )


def build_optimizer(groups: list[Group], cfg: OptimConfig) -> optim.Optimizer:
    """Build the optimiser, with fused kernels where it has them (faster on CPU too)."""
    name = cfg.name.lower()
    kind = _find(name)
    parameters = inspect.signature(kind).parameters
    others = ("params", "lr", "weight_decay", "differentiable")  # the last is for meta-learning
    setting_names = [key for key in parameters if key not in others]
    for key in cfg.settings:
        problem = f"--optim.settings.{key}: {cfg.name} has no such setting"
        check_known(key, setting_names, problem)
    settings: dict[str, Any] = {}
    if "sgd" in name and "momentum" in parameters:  # timm has variants
        settings["momentum"] = MOMENTUM
    # Fused Adagrad works on the CPU only, fused SGD not on sharded weights.
    any_sharded = any(is_shard(p) for group in groups for p in group["params"])
    if (
        "fused" in parameters
        and kind is not optim.Adagrad
        and not (kind is optim.SGD and any_sharded)
    ):
        settings["fused"] = True
    settings |= {k: tuple(x) if isinstance(x, list) else x for k, x in cfg.settings.items()}
    with explained(f"--optim.name {cfg.name} with {settings}", TypeError, ValueError, RuntimeError):
        optimizer = _uncompiled(kind)(groups, **settings)
    if isinstance(optimizer, optim.SGD) and settings.get("momentum"):
        # Fused SGD raises if only some parameters of a group have a momentum buffer, which happens
        # with turns and phases. A buffer of zeros equals a missing one.
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def _uncompiled(kind: Any) -> Any:
    """Return an optimiser of torch whose methods do not import its compiler, 1.1 s of CPU, to say
    that it must not compile them; they compute the same. Others are returned as they are."""
    if kind not in vars(optim).values():
        return kind
    names = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in names}
    methods["step"] = torch.no_grad()(inspect.unwrap(kind.step))
    return type(kind.__name__, (kind,), methods)


def _find(name: str) -> Callable[..., optim.Optimizer]:
    """Return torch's optimiser of that name, else timm's."""
    kinds = {key.lower(): kind for key, kind in vars(optim).items() if isinstance(kind, type)}
    torch_optimizers = {k: kind for k, kind in kinds.items() if issubclass(kind, optim.Optimizer)}
    for key in ("optimizer", "muon"):  # torch's Muon takes no vectors; timm's does
        del torch_optimizers[key]
    if name in UNFIT:
        raise FusionZooError(
            f"--optim.name {name} needs {UNFIT[name]}, which training does not provide"
        )
    if name in torch_optimizers:
        return torch_optimizers[name]
    from timm.optim import get_optimizer_class, list_optimizers

    names = sorted({*torch_optimizers, *list_optimizers()} - {*UNFIT})
    check_known(name, names, f"unknown optimiser {name!r}", "There are")
    with explained(f"--optim.name {name}", ImportError, AssertionError):
        return get_optimizer_class(name)


def set_rates(optimizer: optim.Optimizer, factors: Mapping[str, float]) -> None:
    """Scale each group's base rate by the factor of its owner, else by the default factor, ""."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factors.get(group["owner"], factors[""])


def rates(optimizer: optim.Optimizer) -> dict[str, float]:
    """Return each group's current learning rate."""
    return {group["name"]: group["lr"] for group in optimizer.param_groups}


def grad_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the norm of all gradients together, (); also right for sharded ones."""
    grads = [p.grad for p in parameters if p.grad is not None]
    return full_tensor(get_total_norm(grads, foreach=True))


def clip_gradients(
    groups: Sequence[Sequence[nn.Parameter]], max_norm: float | None, device: torch.device
) -> Tensor:
    """Clip each group to `max_norm` (None: no clipping); return the norms before, (groups,)."""
    norms = []
    for parameters in groups:
        norms.append(grad_norm(parameters))
        if max_norm is not None:
            clip_grads_with_norm_(parameters, max_norm, norms[-1], foreach=True)
    return torch.stack([norm.to(device) for norm in norms])


def autocast(cfg: TrainConfig, device: torch.device) -> torch.autocast:
    """Return the autocast context of a run; disabled in full precision."""
    dtype = AMP_DTYPES[cfg.amp]
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


class EMA:
    """Average the weights: mean <- d mean + (1 - d) weight after every step.

    d = min(decay, (1 + n) / (10 + n)) after n steps, so that short runs also forget their initial
    weights (the warm-up of timm's `ModelEmaV3` and of TensorFlow's moving averages). Buffers are
    not averaged: batch norm statistics are moving averages already.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.module, self.decay, self.steps = module, decay, 0
        self.weights = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self.means = {name: p.detach().clone() for name, p in self.weights.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Update the averages after a step."""
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        self.steps += 1
        torch._foreach_lerp_(list(self.means.values()), list(self.weights.values()), 1 - decay)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Use the averaged weights in the module until the block ends."""
        trained = {name: p.detach().clone() for name, p in self.weights.items()}
        self._set_weights(self.means)
        try:
            yield
        finally:
            self._set_weights(trained)

    @torch.no_grad()
    def _set_weights(self, values: dict[str, torch.Tensor]) -> None:
        reshard(self.module)
        for name, value in values.items():
            self.weights[name].copy_(value)

    def state_dict(self) -> dict[str, object]:
        """Return full tensors for a checkpoint; called by all processes."""
        return {
            "steps": self.steps,
            "means": {n: full_tensor(x).cpu() for n, x in self.means.items()},
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Load what `state_dict` returned."""
        means = state["means"]
        assert isinstance(means, dict) and isinstance(state["steps"], int)
        self.steps = state["steps"]
        for name, mean in self.means.items():
            mean.copy_(shard_like(means[name], mean))
