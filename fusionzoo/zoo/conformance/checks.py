"""A table of checks: functions that raise `AssertionError`, each named by what must hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Checks(dict[str, Callable[[T], None]]):
    """Checks of one kind of component by name."""

    def add(self, function: Callable[[T], None]) -> Callable[[T], None]:
        """Add a check; its name is what it holds."""
        self[function.__name__] = function
        return function
