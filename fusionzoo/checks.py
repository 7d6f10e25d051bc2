"""Checks of settings: one clear error for a value that is out of range or unknown."""

from __future__ import annotations

from typing import Any

from .errors import FusionZooError


def check_choice(setting: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise an error if the value of a setting is not one of the choices."""
    if value not in choices:
        raise FusionZooError(f"{setting}={value!r} is neither {' nor '.join(map(repr, choices))}")


def check_number(setting: str, value: Any, low: float, below: float = float("inf")) -> None:
    """Refuse a value that is no number, less than `low`, or not less than `below`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value < below:
        limit = "" if below == float("inf") else f" and below {below:g}"
        raise FusionZooError(f"{setting}={value!r}; it must be a number of at least {low:g}{limit}")
