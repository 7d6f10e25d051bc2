"""A table of checks: functions that raise `AssertionError`, each named by what must hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")


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
                lines = str(error).strip().splitlines()
                yield name, f"{type(error).__name__}: {lines[0] if lines else ''}"
            else:
                yield name, None
