"""Ratios of CPU time, measured in interleaved rounds, with their median and quartiles.

Other programs on the machine make a wall-clock ratio meaningless (one step was 0.59 to 7.1 times
its bare loop on a busy machine); CPU time they disturb little.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence

Clock = Callable[[], float]
WIDEST = 0.1  # of the median: the distance of the quartiles beyond which a ratio says little


def cpu_seconds() -> float:
    """Return the CPU seconds, user and system, of this process with its threads, and of its
    children that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def seconds(work: Callable[[], object], clock: Clock = cpu_seconds) -> float:
    """Run `work` once and return how long it took; waiting does not count.

    >>> seconds(lambda: time.sleep(0.2)) < 0.15
    True
    """
    start = clock()
    work()
    return clock() - start


def interleaved(
    works: Mapping[str, Callable[[], object]], rounds: int, clock: Clock = cpu_seconds
) -> dict[str, list[float]]:
    """Time each of `works` once a round, in turns that change direction, so that drift of the
    machine affects all alike; a first round warms up and does not count.

    >>> calls = []
    >>> times = interleaved({name: lambda name=name: calls.append(name) for name in "ab"}, 2)
    >>> "".join(calls), [len(spent) for spent in times.values()]
    ('abbaab', [2, 2])
    """
    times: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name in list(works)[:: -1 if number % 2 else 1]:
            spent = seconds(works[name], clock)
            if number:
                times[name].append(spent)
    return times


def compare(ours: Sequence[float], bare: Sequence[float], digits: int = 3) -> dict[str, float]:
    """Return the median of ours / bare over rounds, its quartiles, and the median times.

    A run whose quartiles are too far apart says so on the error stream.

    >>> steady = compare([1.02, 1.03, 1.01, 1.02, 9.0], [1.0] * 5)
    >>> steady["quartile_low"], steady["ratio"], steady["quartile_high"]
    (1.02, 1.02, 1.03)
    """
    low, ratio, high = statistics.quantiles(
        [x / y for x, y in zip(ours, bare, strict=True)], n=4, method="inclusive"
    )
    if high - low > WIDEST * ratio:
        print(
            f"too noisy: half of the {len(ours)} rounds lie outside of {low:.3f} to {high:.3f};"
            " measure again on an idle machine, or with more rounds",
            file=sys.stderr,
        )
    return {
        "ours_s": statistics.median(ours),
        "bare_s": statistics.median(bare),
        "ratio": round(ratio, digits),
        "quartile_low": round(low, digits),
        "quartile_high": round(high, digits),
    }


def ratio(
    ours: Callable[[], object],
    bare: Callable[[], object],
    rounds: int = 15,
    clock: Clock = cpu_seconds,
) -> dict[str, float]:
    """Time `ours` and `bare` in turns, and compare them."""
    times = interleaved({"ours": ours, "bare": bare}, rounds, clock)
    return compare(times["ours"], times["bare"])
