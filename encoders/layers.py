"""Number the layers of an encoder from its input up, and freeze some of them.

timm's models define themselves how their parameters form layers. In a transformer, the layers are
the blocks of its largest module list; parameters before them are layer 0, parameters after them
belong to the last. In other networks each child module is a layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from typing import cast

from torch import nn

from fusionzoo.errors import FusionZooError, did_you_mean

MODES = ("none", "all", "all_but_last_<n>", "norm")


def layer_numbers(module: nn.Module) -> dict[str, int]:
    """Map the name of each parameter to the number of its layer, 0 at the input.

    >>> layer_numbers(nn.Sequential(nn.Linear(1, 1, False), nn.ReLU(), nn.Linear(1, 1, False)))
    {'0.weight': 0, '2.weight': 1}
    """
    net = getattr(module, "net", None)
    if isinstance(net, nn.Module) and hasattr(net, "group_matcher"):
        return _timm_layer_numbers(module, net)
    layers = _transformer_blocks(module) or _children(module)
    numbers, number = {}, 0
    for name, _ in module.named_parameters():
        matches = [i for i, layer in enumerate(layers) if f"{name}.".startswith(f"{layer}.")]
        # Parameters come in order: one outside of all layers belongs to the layer before it.
        number = matches[0] if matches else number
        numbers[name] = number
    return numbers


def _timm_layer_numbers(module: nn.Module, net: nn.Module) -> dict[str, int]:
    from timm.models import group_parameters

    groups = group_parameters(net, net.group_matcher(coarse=False), reverse=True)  # type: ignore[operator]
    numbers = cast("dict[str, int]", groups)
    return {
        name: numbers.get(name.removeprefix("net."), 0) for name, _ in module.named_parameters()
    }


def _transformer_blocks(module: nn.Module) -> list[str]:
    """Return a name for what precedes the blocks, then the blocks of the largest module list."""
    lists = {name: part for name, part in module.named_modules() if isinstance(part, nn.ModuleList)}
    name = max(lists, key=lambda name: _num_parameters(lists[name]), default="")
    blocks = [f"{name}.{key}" for key, part in lists.get(name, nn.Module()).named_children()]
    return ["<before>", *blocks] if blocks else []


def _children(module: nn.Module) -> list[str]:
    """Return the children with weights; one with more than half of all is replaced by its own."""
    layers, half = [("", module)], _num_parameters(module) / 2
    while large := [
        i for i, (_, part) in enumerate(layers) if _num_parameters(part) > half and _parts(part)
    ]:
        name, layer = layers[large[0]]
        layers[large[0] : large[0] + 1] = [
            (f"{name}.{key}".removeprefix("."), part) for key, part in _parts(layer)
        ]
    return [name for name, layer in layers if any(p.ndim > 1 for p in layer.parameters())]


def _parts(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, part) for name, part in module.named_children() if _num_parameters(part)]


def _num_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def freeze(module: nn.Module, mode: str, name: str) -> list[nn.Module]:
    """Freeze a part of an encoder, and return the modules that must stay in evaluation mode.

    `all_but_last_<n>` leaves only the last n layers trainable; `norm` freezes the parameters and
    running statistics of the normalisation layers. `name` is the setting's name in errors.
    """
    last = re.fullmatch(r"all_but_last_([1-9]\d*)", mode)
    if mode == "norm":
        norm_layers = norms(module)
        if not norm_layers:
            raise FusionZooError(f"{name}={mode!r}: it has no normalisation layer")
        for layer in norm_layers:
            layer.requires_grad_(False)
        return norm_layers
    if last is None:
        raise FusionZooError(
            f"{name}={mode!r} is not one of {', '.join(MODES)}.{did_you_mean(mode, MODES)}"
        )
    numbers = layer_numbers(module)
    num_layers, num_trained = max(numbers.values(), default=-1) + 1, int(last[1])
    if num_trained >= num_layers:
        raise FusionZooError(
            f"{name}={mode!r}: the encoder has only {num_layers} layers; 'none' trains all of them"
        )
    for key, parameter in module.named_parameters():
        if numbers[key] < num_layers - num_trained:
            parameter.requires_grad_(False)
    return list(fully_frozen(module, {id(p) for p in module.parameters() if not p.requires_grad}))


def norms(module: nn.Module) -> list[nn.Module]:
    """Return the normalisation layers inside a module."""
    return [part for part in module.modules() if part is not module and is_norm(part)]


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a normalisation layer, by its class's name and parameters.

    Class names, because timm and Hugging Face define norms of their own.

    >>> [is_norm(x) for x in (nn.BatchNorm2d(1, affine=False), nn.Linear(1, 1))]
    [True, False]
    """
    vectors = all(p.ndim <= 1 for p in module.parameters())
    return vectors and "norm" in type(module).__name__.lower()


def fully_frozen(module: nn.Module, frozen: Set[int]) -> Iterator[nn.Module]:
    """Yield the largest submodules all of whose parameters are `frozen` (by `id`)."""
    parameters = {id(p) for p in module.parameters()}
    if parameters and parameters <= frozen:
        yield module
    elif parameters:
        for part in module.children():
            yield from fully_frozen(part, frozen)
