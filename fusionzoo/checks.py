"""Checks of settings: one clear error for a value that is out of range or unknown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import FusionZooError, did_you_mean


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


def check_modality(setting: str, value: str | None, dims: Mapping[str, int]) -> str:
    """Return the modality that a setting names (None: the first); raise if there is no such one."""
    name = next(iter(dims)) if value is None else value
    if name not in dims:
        raise FusionZooError(
            f"{setting}={name!r} is no modality.{did_you_mean(name, dims)}"
            f" There are: {', '.join(dims)}."
        )
    return name


def check_heads(dim: int, num_heads: int) -> None:
    """Raise an error if the number of heads does not divide the width."""
    if dim % num_heads:
        divisors = [n for n in range(1, dim + 1) if dim % n == 0 and n <= 2 * num_heads]
        raise FusionZooError(f"num_heads={num_heads} does not divide dim={dim}; {divisors} do")
