"""The values that are black and white in images of more than 8 bits: one range for a data set."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fusionzoo.errors import FusionZooError, warn_of_file

T = TypeVar("T")
Range = tuple[float, float]  # of black and of white
Pair = Sequence[float] | str  # text is of flags: `0,4095`
Ranges = Mapping[str, Pair] | Pair | None  # by modality, or of all images
DEEP = ("I", "F")  # first letters of Pillow's modes of 16 and 32 bits
FULL = (0.0, 65535.0)  # of 16 bits, unsigned
TOPS = (1, 255, 1023, 4095, 16383, 65535)  # whites that are usual
MOST_OUTSIDE = 0.01  # of an image's values, beyond which a range is said not to fit
ROWS = 64  # of an image that are scaled at a time


def range_of(ranges: Ranges, modality: str) -> Range | None:
    """Return the range of a modality's images; None: not known.

    >>> range_of("0,4095", "scan"), range_of({"scan": [0, 1]}, "photo")
    ((0.0, 4095.0), None)
    """
    chosen = ranges.get(modality) if isinstance(ranges, Mapping) else ranges
    return None if chosen is None else _read(chosen)


def _read(words: Pair) -> Range:
    try:
        low, high = map(float, words.split(",") if isinstance(words, str) else words)
    except (TypeError, ValueError):
        low = high = math.nan
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise FusionZooError(
            f"--data.image_range {words!r:.60}: the values of black and white, such as 0,4095"
        )
    return low, high


def shown(ranges: Ranges) -> str:
    """Return what is said of ranges; an error for one that is not two numbers, the first smaller.

    >>> shown([0, 4095]), shown({"scan": [0, 1]})
    ('from 0 to 4095', 'from 0 to 1 in scan')
    """
    if isinstance(ranges, Mapping):
        return ", ".join(f"{shown(x)} in {name}" for name, x in ranges.items())
    low, high = FULL if ranges is None else _read(ranges)
    return f"from {low:g} to {high:g}"


def is_deep(source: Any) -> bool:
    """Whether a file, bytes or an image of Pillow can be read and has more than 8 bits; of files
    the header is read."""
    return _of_deep(source, lambda image: True) or False


def extremes_of(source: Any) -> Range | None:
    """Return the lowest and highest value of an image of more than 8 bits; None of others, and of
    what cannot be read."""
    values = _of_deep(source, np.asarray)
    if values is None or not np.isfinite(values).all():
        return None
    return float(values.min()), float(values.max())


def _of_deep(source: Any, read: Callable[[Any], T]) -> T | None:
    from PIL import Image

    if not isinstance(source, str | Path | bytes):
        # A tensor's `mode` is a method.
        return read(source) if str(getattr(source, "mode", "")).startswith(DEEP) else None
    file = io.BytesIO(source) if isinstance(source, bytes) else source
    try:
        with Image.open(file, formats=("PNG", "TIFF")) as image:
            return read(image) if image.mode.startswith(DEEP) else None
    except Exception:  # of many kinds; `on_error` decides about the value when it is used
        return None


def usual_range(lowest: float, highest: float) -> Range:
    """Return the range of images with these extremes: from 0, or the lowest below it, to the
    highest, which is rounded up to 1, or to what 8, 10, 12, 14 or 16 bits hold, if that at most
    doubles it.

    >>> usual_range(7, 4071), usual_range(0, 1.02), usual_range(-1024, 3071)
    ((0.0, 4095.0), (0.0, 1.02), (-1024.0, 4095.0))
    """
    top = next((top for top in TOPS if highest <= top), highest)
    high = float(top if 2 * highest >= top else highest)
    low = float(lowest) if lowest < -abs(high) / 255 else 0.0  # less than a grey level: rounding
    return low, high if low < high else low + 1


def scaled_to_bytes(image: Any, path: str, image_range: Range | None) -> np.ndarray:
    """Scale an image of 16 or 32 bits to uint8, some rows at a time to save memory."""
    values = np.asarray(image)
    lowest, highest = float(values.min()), float(values.max())
    if not (np.isfinite(lowest) and np.isfinite(highest)):
        raise FusionZooError(f"{path} contains values that are not finite")
    # A PNG has 16 bits at most, which some versions of Pillow widen.
    if image_range is None and not (image.mode.startswith("I;16") or image.format == "PNG"):
        low, high = usual_range(lowest, highest)
        raise FusionZooError(
            f"{path} has 32 bits, and values from {lowest:g} to {highest:g}: which are black and"
            f" white in all images is not known; --data.image_range {low:g},{high:g} says so"
        )
    low, high = image_range or FULL
    scaled, outside = np.empty(values.shape, np.uint8), 0
    for start in range(0, len(values), ROWS):
        rows = slice(start, start + ROWS)
        greys = (values[rows].astype(np.float64) - low) * (255 / (high - low))
        outside += int(np.count_nonzero((greys <= -1) | (greys >= 256)))
        scaled[rows] = greys.clip(0, 255).astype(np.uint8)
    if outside > MOST_OUTSIDE * values.size:
        warn_of_file(
            path,
            f"{outside / values.size:.0%} of its values lie outside of {low:g} to {high:g}"
            " (--data.image_range), and become black or white",
        )
    return scaled
