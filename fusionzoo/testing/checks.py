"""A table of checks, each named by what must hold; and what `fusionzoo zoo check` checks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from fusionzoo.ground.plugins import import_class, is_reference
from fusionzoo.ground.registry import Registry

if TYPE_CHECKING:
    from torch import nn


T = TypeVar("T")


def describe(error: Exception) -> str:
    """Return the kind of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


class Checks(dict[str, Callable[[T], None]]):
    """The checks of one kind of component, by name."""

    def add(self, function: Callable[[T], None]) -> Callable[[T], None]:
        """Add a check; its name is what it holds, its docstring what it tries."""
        self[function.__name__] = function
        return function

    def run(self, component: T) -> Iterator[tuple[str, str | None]]:
        """Yield each check's name and what failed, or None."""
        for name, function in self.items():
            try:
                function(component)
            except Exception as error:  # any error of the component is a failed check
                yield name, describe(error)
            else:
                yield name, None


def assert_registered(module: nn.Module) -> None:
    """Require that every tensor that wants a gradient is a registered parameter."""
    from torch import Tensor

    registered = {id(x) for x in itertools.chain(module.parameters(), module.buffers())}
    for part in module.modules():
        for name, value in vars(part).items():
            for x in value if isinstance(value, list | tuple) else [value]:
                loose = isinstance(x, Tensor) and x.requires_grad and id(x) not in registered
                assert not loose, (
                    f"{type(part).__name__}.{name} is a tensor that no optimiser will see:"
                    " register it, or use nn.ParameterList or nn.ParameterDict"
                )


def find(target: str, registry: Registry[Any, Any]) -> Any:
    """Return the class or function of a registered name, `module:Class` or `file.py:Class`."""
    return import_class(target) if is_reference(target) else registry[target].cls
