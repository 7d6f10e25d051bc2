"""Choose settings by measured speed: a default stays unless another value wins by a margin."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch

from fusionzoo.errors import FusionZooError, one_line

MARGIN = 0.10  # share of the default's time that another value must save
SHARE = 0.05  # of the work's estimated time that measuring may take
LONGEST = 60.0  # seconds of measuring, however long the work
SHORTEST = 1.0  # seconds; with less to spend, nothing but the default is measured

Settings = dict[str, Any]


class Timing(NamedTuple):
    """What one combination of settings costs."""

    seconds: float  # per sample
    once: float = 0.0  # seconds before the first result, as of compiling


@dataclass(frozen=True)
class Option:
    """Values of a setting to try, in this order; after one that loses the rest is left out."""

    setting: str
    values: Sequence[Any]
    takes: float = 0.0  # seconds that measuring one value takes at least


@dataclass(frozen=True)
class Trial:
    """A measured value."""

    setting: str  # empty: the defaults
    value: Any
    samples_per_second: float | None  # None: not measured
    note: str  # why it was chosen or not


@dataclass(frozen=True)
class Choice:
    """The chosen settings, and what was measured."""

    settings: Settings
    trials: list[Trial] = field(default_factory=list)
    seconds: float = 0.0  # that measuring took

    @property
    def record(self) -> dict[str, Any]:
        """What is stored."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Choice:
        """Return a choice that was stored."""
        trials = [Trial(**trial) for trial in record["trials"]]
        return cls(dict(record["settings"]), trials, record["seconds"])


def choose(
    defaults: Settings,
    options: Sequence[Option],
    measure: Callable[[Settings], Timing],
    *,
    samples: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Choice:
    """Return the fastest settings for work on `samples` samples, one setting after the other.

    Measuring stops after 5 % of the time that the defaults would take, and after a minute. A value
    is taken if it saves 10 % of the time, what it costs once included, in two measurements that
    alternate with the best settings so far: so the choice is slower than the defaults by no more
    than the time of measuring, but for noise.
    """
    start = clock()
    measure(defaults)  # files are read and kernels chosen: not counted
    best, timing = dict(defaults), measure(defaults)
    budget = min(LONGEST, SHARE * samples * timing.seconds)
    trials = [Trial("", None, 1 / timing.seconds, "the defaults")]
    for option in options:
        for value in option.values:
            left = budget - (clock() - start)
            if budget < SHORTEST or left < max(option.takes, 0.0):
                trials.append(Trial(option.setting, value, None, "no time to measure it"))
                continue
            settings = {**best, option.setting: value}
            measured, note = _compare(settings, best, timing, measure, samples)
            rate = None if measured is None else 1 / measured.seconds
            trials.append(Trial(option.setting, value, rate, note))
            if measured is None or note != CHOSEN:
                break
            best, timing = settings, measured
    return Choice(best, trials, clock() - start)


CHOSEN = "chosen"


def _compare(
    settings: Settings,
    best: Settings,
    timing: Timing,
    measure: Callable[[Settings], Timing],
    samples: int,
) -> tuple[Timing | None, str]:
    """Measure settings against the best so far; return their timing, and a note."""
    try:
        measured = measure(settings)
        if not wins(measured, timing, samples):
            return measured, f"does not save {MARGIN:.0%}"
        again, confirmed = measure(best), measure(settings)
    except torch.OutOfMemoryError:
        return None, "out of memory"
    except (FusionZooError, RuntimeError, NotImplementedError) as error:
        return None, f"does not work here: {one_line(error)}"
    if not wins(confirmed, again, samples):
        return confirmed, f"does not save {MARGIN:.0%} in a second measurement"
    return confirmed, CHOSEN


def wins(timing: Timing, default: Timing, samples: int) -> bool:
    """Whether the work is done in 10 % less time than by the default, what is paid once included.

    >>> wins(Timing(0.8), Timing(1.0), 100), wins(Timing(0.8, once=15), Timing(1.0), 100)
    (True, False)
    """
    cost = timing.once + samples * timing.seconds
    return cost < (1 - MARGIN) * samples * default.seconds


def describe(choice: Choice, defaults: Settings, where: str) -> str:
    """Return one line on what was chosen, and how much faster it is.

    >>> choice = Choice({"amp": "bf16"}, [Trial("", None, 10.0, "the defaults"),
    ...                 Trial("amp", "bf16", 15.0, "chosen")], 3.0)
    >>> describe(choice, {"amp": "none"}, "a.json")
    '--speed auto: amp bf16 (15 samples/s; 10 with the defaults); measured in 3.0 s, see a.json'
    """
    changed = {name: x for name, x in choice.settings.items() if x != defaults.get(name)}
    rate = choice.trials[0].samples_per_second or 0.0
    end = f"measured in {choice.seconds:.1f} s, see {where}"
    if not changed:
        return f"--speed auto: the defaults stay ({rate:,.0f} samples/s); {end}"
    best = [t.samples_per_second for t in choice.trials if t.note == CHOSEN][-1] or 0.0
    words = {name: "on" if value is True else value for name, value in changed.items()}
    named = ", ".join(f"{name} {word}" for name, word in words.items())
    return f"--speed auto: {named} ({best:,.0f} samples/s; {rate:,.0f} with the defaults); {end}"
