"""Paired timing: A and B alternate, so that drift of the machine affects both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def ratio(a: Callable[[], object], b: Callable[[], object], rounds: int = 9) -> dict[str, float]:
    """Time `a` and `b` alternately; return median seconds and median, least, largest a / b."""
    a(), b()  # warm up
    pairs = [(seconds(a), seconds(b)) for _ in range(rounds)]
    ratios = [x / y for x, y in pairs]
    return {
        "ours_s": statistics.median(x for x, _ in pairs),
        "bare_s": statistics.median(y for _, y in pairs),
        "ratio": statistics.median(ratios),
        "least": min(ratios),
        "largest": max(ratios),
    }


def seconds(work: Callable[[], object]) -> float:
    """Run `work` once and return how long it took."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
