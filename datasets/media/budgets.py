"""Limits on one value, checked by its header before memory is allocated."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fusionzoo.errors import FusionZooError

EXPANSION = 100  # times the size of its file that a table may take, where that is more


@dataclass(frozen=True, kw_only=True)
class Budget:
    """A limit, its unit, and what to do with a value that exceeds it."""

    limit: int
    unit: str
    advice: str


BUDGETS = {
    # 270 MB as RGB; Pillow warns from there on, too.
    "pixels": Budget(limit=89_478_485, unit="pixels", advice="store it smaller"),
    "aspect": Budget(limit=1_000, unit="times as long as wide", advice="cut it into pieces"),
    "image file": Budget(limit=1 << 29, unit="bytes", advice="store it smaller"),
    # As many images of one sample may be kept at once: 1.6 GB.
    "pixels of all images": Budget(
        limit=1 << 29, unit="pixels", advice="take fewer frames (--data.frames)"
    ),
    "items": Budget(limit=1_000, unit="items", advice="take fewer (--data.frames)"),
    "video file": Budget(limit=1 << 36, unit="bytes", advice="cut it into shorter files"),
    # An hour and a quarter at 44.1 kHz, 800 MB as float32. Encoders read only the part in use of a
    # file, so the limit is that of a whole clip in memory.
    "samples": Budget(limit=200_000_000, unit="samples", advice="cut it into shorter files"),
    "audio file": Budget(limit=1 << 34, unit="bytes", advice="cut it into shorter files"),
    "rate": Budget(limit=768_000, unit="Hz", advice="resample it"),
    "characters": Budget(limit=10_000_000, unit="characters", advice="cut it into several texts"),
    "text file": Budget(limit=40_000_000, unit="bytes", advice="cut it into several texts"),
    # 400 MB as float32.
    "numbers": Budget(limit=100_000_000, unit="numbers", advice="store one array per sample"),
    "array file": Budget(limit=1 << 30, unit="bytes", advice="store one array per sample"),
    "cells": Budget(limit=50_000_000, unit="cells", advice="save the sheet as CSV"),
    # Excel allows 65,490 cell formats; as many elements take about 4 s.
    "styles": Budget(
        limit=250_000, unit="XML elements", advice="save the sheet as CSV, or without formats"
    ),
    # A table may be far larger than its file, but not a thousand times: see `check_expansion`.
    "table": Budget(limit=1 << 30, unit="bytes", advice="store repeated values once, as files"),
}


def check_budget(budget: str, amount: int | float, name: str, words: str = "") -> None:
    """Raise an error if a value needs more than its budget; `words` state the amount.

    >>> check_budget("pixels", 3 * 10**9, "a.png")
    Traceback (most recent call last):
    fusionzoo.errors.FusionZooError: a.png is too large: 3,000,000,000 pixels; at most 89,478,485 \
pixels: store it smaller
    """
    entry = BUDGETS[budget]
    if amount > entry.limit:
        words = words or f"{amount:,} {entry.unit}"
        raise FusionZooError(
            f"{name} is too large: {words}; at most {entry.limit:,} {entry.unit}: {entry.advice}"
        )


def check_image(width: int, height: int, name: str) -> None:
    """Raise an error for an image with too many pixels, or far longer than wide."""
    size = f"{width} x {height} pixels"
    check_budget("pixels", width * height, name, size)
    shorter = max(1, min(width, height))
    check_budget("aspect", max(width, height) / shorter, name, size)


def check_shape(shape: Sequence[int], name: str) -> None:
    """Raise an error for an array with too many numbers."""
    count = math.prod(shape)
    check_budget("numbers", count, name, f"shape {tuple(shape)} has {count:,} numbers")


def check_expansion(name: str, size: int, needed: int) -> None:
    """Raise an error for a table that takes far more memory than its file of `size` bytes."""
    limit = max(BUDGETS["table"].limit, EXPANSION * size)
    if needed > limit:
        problem = f"{name} has {size:,} bytes and would take {needed:,} or more in memory"
        raise FusionZooError(f"{problem}; at most {limit:,}: {BUDGETS['table'].advice}")


def file_size(path: str | Path, budget: str) -> int:
    """Return the bytes of a regular file within its budget; reading a pipe might never end."""
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise FusionZooError(f"{path} cannot be opened: {reason}") from error
    if not stat.S_ISREG(status.st_mode):
        raise FusionZooError(f"{path} is no file")
    check_budget(budget, status.st_size, str(path))
    return status.st_size
