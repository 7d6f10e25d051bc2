"""Refuse a model that is far larger than its stored weights, before memory for it is allocated."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .errors import FusionZooError, one_line

SPARE = 2**24  # elements that a build may allocate beyond four times the weights: tables, a picture
TENSOR = 4096  # elements that the bookkeeping of a module and its tensor is worth
ATEN = torch.ops.aten
GROWING = (  # what makes a tensor of a size that is not its input's, or another of its input's
    *(ATEN.clone, ATEN.repeat, ATEN.constant_pad_nd),
    *(ATEN.new_empty, ATEN.new_zeros, ATEN.new_ones, ATEN.new_full),
)


@contextmanager
def bounded_allocation(weights: Path) -> Iterator[None]:
    """Refuse, in the block, to allocate much more than the tensors of a safetensors file hold.

    A setting in config.json that does not belong to the weights (a width, a number of layers) is
    thus refused before memory for it is taken. Building on the meta device would do the same, but
    the libraries' constructors compute with what they build.
    """
    from safetensors import safe_open

    try:
        with safe_open(str(weights), "pt") as file:
            shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
    except Exception as error:
        raise FusionZooError(f"{weights} cannot be read: {one_line(error)}") from None
    with _Budget(4 * sum(math.prod(shape) for shape in shapes) + SPARE, weights):
        yield


class _Budget(TorchDispatchMode):
    """Count the elements of new tensors, before they are allocated."""

    def __init__(self, elements: int, weights: Path) -> None:
        super().__init__()
        self.left, self.weights = elements, weights

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self.left -= _new_elements(func, args, kwargs)
        if self.left < 0:
            raise FusionZooError(
                f"the settings ask for far larger tensors than {self.weights.name} holds"
            )
        return func(*args, **kwargs)


def _new_elements(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Return how many elements an operation that makes a tensor will allocate, else 0."""
    from torch.utils._pytree import tree_map_only

    factory = "device" in kwargs and not any(isinstance(x, torch.Tensor) for x in args)
    if factory:
        planned = func(*args, **{**kwargs, "device": "meta", "pin_memory": False})
    elif func.overloadpacket in GROWING:
        on_meta = tree_map_only(torch.Tensor, lambda x: x.to("meta"), args)
        planned = func(*on_meta, **{key: kwargs[key] for key in kwargs if key != "device"})
    else:
        return 0
    return planned.numel() + TENSOR if isinstance(planned, torch.Tensor) else 0
