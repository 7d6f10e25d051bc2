"""The layers of an encoder, from its input up, and what of it is frozen.

timm's models say themselves how their parameters form layers. In a transformer, layers are the
blocks of its longest list; what stands before them is layer 0, what stands after belongs to the
last. Elsewhere layers are the children in their order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from typing import cast

from torch import nn

from fusionzoo.errors import FusionZooError, did_you_mean

MODES = ("none", "all", "all_but_last_<n>", "norm")


def layer_numbers(module: nn.Module) -> dict[str, int]:
    """Map the name of each parameter to its layer; 0 is the input's.

    >>> layer_numbers(nn.Sequential(nn.Linear(1, 1, False), nn.ReLU(), nn.Linear(1, 1, False)))
    {'0.weight': 0, '2.weight': 1}
    """
    net = getattr(module, "net", None)
    if isinstance(net, nn.Module) and hasattr(net, "group_matcher"):
        return _of_timm(module, net)
    tops = _blocks(module) or _children(module)
    numbers, number = {}, 0
    for name, _ in module.named_parameters():
        own = [i for i, top in enumerate(tops) if f"{name}.".startswith(f"{top}.")]
        number = own[0] if own else number  # in order: what is no block's belongs to the one before
        numbers[name] = number
    return numbers


def _of_timm(module: nn.Module, net: nn.Module) -> dict[str, int]:
    from timm.models import group_parameters

    groups = group_parameters(net, net.group_matcher(coarse=False), reverse=True)  # type: ignore[operator]
    own = cast("dict[str, int]", groups)
    return {name: own.get(name.removeprefix("net."), 0) for name, _ in module.named_parameters()}


def _blocks(module: nn.Module) -> list[str]:
    """Return the blocks of the largest list of modules, after a name for what is before them."""
    lists = {name: part for name, part in module.named_modules() if isinstance(part, nn.ModuleList)}
    name = max(lists, key=lambda name: _size(lists[name]), default="")
    blocks = [f"{name}.{key}" for key, part in lists.get(name, nn.Module()).named_children()]
    return ["<before>", *blocks] if blocks else []


def _children(module: nn.Module) -> list[str]:
    """Return children with weights; one that holds more than half of all gives its own."""
    tops, half = [("", module)], _size(module) / 2
    while found := [i for i, (_, top) in enumerate(tops) if _size(top) > half and _parts(top)]:
        name, top = tops[found[0]]
        tops[found[0] : found[0] + 1] = [
            (f"{name}.{key}".removeprefix("."), part) for key, part in _parts(top)
        ]
    return [name for name, top in tops if any(p.ndim > 1 for p in top.parameters())]


def _parts(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, part) for name, part in module.named_children() if _size(part)]


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def freeze(module: nn.Module, mode: str, name: str) -> list[nn.Module]:
    """Freeze a part of an encoder, and return the modules that must stay in evaluation mode.

    `all_but_last_<n>` leaves the last n layers to train; `norm` freezes the normalisation layers,
    parameters and running statistics, and trains the rest.
    """
    last = re.fullmatch(r"all_but_last_([1-9]\d*)", mode)
    if mode == "norm":
        found = norms(module)
        if not found:
            raise FusionZooError(f"{name}={mode!r}: it has no normalisation layer")
        for part in found:
            part.requires_grad_(False)
        return found
    if last is None:
        raise FusionZooError(
            f"{name}={mode!r} is not one of {', '.join(MODES)}.{did_you_mean(mode, MODES)}"
        )
    numbers = layer_numbers(module)
    top, wanted = max(numbers.values(), default=-1) + 1, int(last[1])
    if wanted >= top:
        raise FusionZooError(f"{name}={mode!r}: it has only {top} layers; none trains all of them")
    for key, parameter in module.named_parameters():
        if numbers[key] < top - wanted:
            parameter.requires_grad_(False)
    return list(asleep(module, {id(p) for p in module.parameters() if not p.requires_grad}))


def norms(module: nn.Module) -> list[nn.Module]:
    """Return the normalisation layers inside a module."""
    return [part for part in module.modules() if part is not module and is_norm(part)]


def is_norm(module: nn.Module) -> bool:
    """Whether a module normalises: by its class's name, for timm and Hugging Face have their own.

    >>> [is_norm(x) for x in (nn.BatchNorm2d(1, affine=False), nn.Linear(1, 1))]
    [True, False]
    """
    vectors = all(p.ndim <= 1 for p in module.parameters())
    return vectors and "norm" in type(module).__name__.lower()


def asleep(module: nn.Module, rests: Set[int]) -> Iterator[nn.Module]:
    """Yield the largest parts all of whose parameters (by `id`) rest: evaluation mode is theirs."""
    own = {id(p) for p in module.parameters()}
    if own and own <= rests:
        yield module
    elif own:
        for part in module.children():
            yield from asleep(part, rests)
