"""Conversions to shards that stop in the middle, and what they leave."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusionzoo.datasets.shards import write


class Stop(Exception):
    """Ends a conversion in the middle."""


def stop_at(value: int, convert: Callable[[], Any]) -> None:
    """Convert until the `value`-th value is to be stored."""
    calls, real = iter(range(10**6)), write.stored_value

    def failing(kind: str, stored: Any, prepare: bool) -> Any:
        if next(calls) == value:
            raise Stop
        return real(kind, stored, prepare)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write, "stored_value", failing)
        with pytest.raises(Stop):
            convert()


def hashes(folder: Path) -> dict[str, str]:
    return {x.name: hashlib.md5(x.read_bytes()).hexdigest() for x in sorted(folder.iterdir())}
