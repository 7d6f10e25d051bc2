"""Values that would pass as numbers: yes and no, infinity, and a flag without its value."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from fusionzoo.errors import FusionZooError


def check_numbers(cls: Any, tree: Mapping[str, Any], prefix: str = "") -> None:
    """Refuse what pydantic would take as a number: booleans, infinity, a flag without a value."""
    hints = get_type_hints(cls, include_extras=True)
    for name, value in tree.items():
        if is_dataclass(hints[name]):
            check_numbers(hints[name], value, f"{prefix}{name}.")
            continue
        for key, leaf in _walk(value, f"{prefix}{name}"):
            if isinstance(leaf, bool) and not _takes_bool(hints[name]):
                raise FusionZooError(
                    f"--{key} {str(leaf).lower()}: it needs a value of another kind"
                    " (a flag without a value means true)"
                )
            if isinstance(leaf, float) and not math.isfinite(leaf):
                raise FusionZooError(f"--{key} {leaf}: it must be a finite number")


UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}  # seconds


def in_seconds(duration: str | float, key: str) -> float:
    """Return a duration in seconds; `key` is the setting's name in the error.

    >>> in_seconds("1.5h", "train.time_limit"), in_seconds(20, "train.time_limit")
    (5400.0, 20.0)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", str(duration).strip())
    if match is None or not float(match[1]):
        raise FusionZooError(f"--{key} {duration!r}: give a time above 0 such as 90s, 10m or 1.5h")
    return float(match[1]) * UNITS[match[2]]


def switches_as_words(cls: Any, tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return `on` and `off` as words where those are choices; YAML reads them as booleans."""
    hints, words = get_type_hints(cls), dict(tree)
    for name, value in tree.items():
        if is_dataclass(hints[name]):
            words[name] = switches_as_words(hints[name], value)
        elif isinstance(value, bool) and get_origin(hints[name]) is Literal:
            word = "on" if value else "off"
            words[name] = word if word in get_args(hints[name]) else value
    return words


def _walk(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, child in value.items():
            yield from _walk(child, f"{key}.{name}")
    elif isinstance(value, list | tuple):
        for child in value:
            yield from _walk(child, key)
    else:
        yield key, value


def _takes_bool(hint: Any) -> bool:
    """Whether a type accepts booleans; the settings of components are checked by those."""
    if hint is bool or hint is Any or isinstance(hint, bool):
        return True
    return any(_takes_bool(part) for part in get_args(hint))
