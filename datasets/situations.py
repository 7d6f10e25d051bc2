"""`situations`: synthetic data, one kind for each row of the table in docs/which.md."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from fusionzoo.errors import FusionZooError, did_you_mean

from . import _planted
from ._planted import (
    CLASSES,
    HARD_RIGHT,
    KEYS,
    NOISY,
    RIGHT,
    SENSORS,
    SLOTS,
    SPEAKERS,
    Planted,
    Setup,
)
from .amputation import Mechanism
from .base import DATASETS, apply_shared_settings, from_memory
from .failures import MAX_ERRORS, OnError
from .interactions import SPLIT_CYCLE
from .paired import PairedDataset
from .provenance import Provenance

ENCODERS = {
    "vector": {"name": "vector/mlp", "dim": 32, "hidden": 64},
    "sequence": {"name": "sequence/transformer", "dim": 32, "num_layers": 1, "num_heads": 4},
}


class Situation(NamedTuple):
    """How a situation is drawn, and what its settings may be."""

    draw: Callable[[Setup], Planted]
    directions: int  # orthonormal ones that a vector needs
    share: float | None = None  # default; None: the situation has no share
    kind: str = "vector"
    tokens: int | None = None  # default; None: the number of tokens is fixed


SITUATIONS = {
    "missing_at_test": Situation(_planted.missing_at_test, CLASSES, share=0.5),
    "reliability": Situation(_planted.reliability, CLASSES, share=0.7),
    "starved": Situation(_planted.starved, 2 * CLASSES, share=0.2),
    "modifier": Situation(_planted.modifier, SLOTS * CLASSES),
    "alignment": Situation(_planted.alignment, KEYS + CLASSES, kind="sequence"),
    "long": Situation(_planted.long, CLASSES + 1, share=0.3, kind="sequence", tokens=64),
    "ambiguous": Situation(_planted.ambiguous, CLASSES, share=0.4),
}


@DATASETS.register("situations", family="built-in")
def situations(
    *,
    situation: str = "reliability",
    samples: int = 2000,
    share: float | None = None,
    width: int = 16,
    tokens: int | None = None,
    noise: float = 0.3,
    seed: int = 0,
    on_error: OnError = "raise",
    max_errors: float = MAX_ERRORS,
    modalities: str | Sequence[str] | None = None,
    missing: float = 0.0,
    missing_mechanism: Mechanism = "mcar",
) -> PairedDataset:
    """Draw data in which one circumstance decides how modalities should be fused.

    Four equally frequent classes, signals of length 1 under normal noise. All modalities together
    reach `bayes_accuracy(situation)`, none alone does. The split is 60/20/20.

    Settings:
        situation: `missing_at_test`: four sensors, each right with probability 0.75; test values
            are missing with probability `share`. `reliability`: three vectors show the class, a
            `share` of each under noise of length 6. `starved`: a shows the class plainly, in a
            `share` of samples nothing; b shows it then, and in half of the others, as a difference
            modulo 4. `modifier`: content shows a class in each of four slots, modifier which slot
            counts. `alignment`: tokens of a pair keys with classes, b marks the key whose class is
            the answer. `long`: one marked token shows the class; a `share` of sequences have none.
            `ambiguous`: a and b each show two candidates, in a `share` of samples the same two
        samples: number of samples
        share: see `situation`, 0 to 1; null: that of `SITUATIONS`, 0.2 to 0.7
        width: dimensions of a vector or token, at least 16 in `modifier`
        tokens: tokens of a sequence in `long`; null: 64
        noise: root-mean-square length of a vector's noise
        seed: of all random draws
        on_error: `raise` on a value that cannot be read, treat it as `missing` or `skip` its sample
        max_errors: share of a modality's values that may fail before the run ends, 0 to 1
        modalities: names of those to keep, comma-separated or a list
        missing: share of each modality's values to remove, at least 0 and below 1
        missing_mechanism: `mcar` removes values at random, `mar` depending on the label, `mnar` on
            the value itself (length, brightness, loudness)
    """
    entry = _checked(situation, share, width, tokens)
    setup = Setup(
        generator=np.random.default_rng(seed),
        at_test=np.arange(samples) % 5 == SPLIT_CYCLE.index("test"),
        width=width,
        noise=noise,
        share=(entry.share or 0.0) if share is None else share,
        tokens=tokens or entry.tokens or 0,
    )
    dataset = _dataset(entry, setup, f"situations ({situation})", on_error, max_errors)
    return apply_shared_settings(dataset, modalities, missing, missing_mechanism)


def _dataset(
    entry: Situation,
    setup: Setup,
    source: str,
    on_error: OnError,
    max_errors: float,
) -> PairedDataset:
    planted = entry.draw(setup)
    return from_memory(
        {name: torch.from_numpy(x.astype(np.float32)) for name, x in planted.values.items()},
        dict.fromkeys(planted.values, entry.kind),
        ids=[str(row) for row in range(setup.samples)],
        splits=[SPLIT_CYCLE[row % 5] for row in range(setup.samples)],
        target=[str(label) for label in planted.target],
        present=planted.present,
        source=source,
        on_error=on_error,
        max_errors=max_errors,
        encoders=dict.fromkeys(planted.values, ENCODERS[entry.kind]),
        provenance=Provenance(split_rule="fixed"),
    )


def bayes_accuracy(
    situation: str, modality: str | None = None, *, share: float | None = None, width: int = 16
) -> float:
    """Return the best possible accuracy on the test split, of all modalities or of one alone.

    Exact but for items that are misread (probability below 1e-5 at the default noise and width);
    of `reliability`, with known noise levels (lengths tell them).

    >>> [round(bayes_accuracy(name), 3) for name in SITUATIONS]
    [0.792, 0.863, 1.0, 1.0, 1.0, 0.932, 0.8]
    >>> [round(bayes_accuracy(name, "a"), 3) for name in ("reliability", "starved", "long")]
    [0.612, 0.85, 0.775]
    """
    s = _checked(situation, share, width, None).share or 0.0 if share is None else share
    chance = 1 / CLASSES
    if situation == "missing_at_test":
        return _of_sensors(s, modality)
    if situation == "reliability":
        # One clear vector suffices; of noisy ones, the projections on the directions are summed.
        count = SPEAKERS if modality is None else 1
        return 1 - s**count * (1 - _detection(math.sqrt(count * width) / NOISY))
    if situation == "long":
        return 1 - (s * s if modality is None else s) * (1 - chance)
    if situation == "ambiguous":
        return 1 - s / 2 if modality is None else 0.5
    if modality is None:
        return 1.0
    alone = {
        ("starved", "a"): 1 - s * (1 - chance),
        ("starved", "b"): s + (1 - s) * (HARD_RIGHT + (1 - HARD_RIGHT) * chance),
        ("modifier", "content"): _most_frequent_slot(),
    }
    return alone.get((situation, modality), chance)


def bayes_aurc(share: float | None = None) -> float:
    """Return the least area under the risk-coverage curve of `ambiguous`.

    A classifier that answers undecided samples last makes no error up to coverage c0 = 1 - share,
    and at coverage c has the risk (c - c0) / 2c; the area is (share + c0 log c0) / 2.

    >>> round(bayes_aurc(0.4), 4)
    0.0468
    """
    s = (SITUATIONS["ambiguous"].share or 0.0) if share is None else share
    return (s + (1 - s) * math.log(1 - s)) / 2 if s < 1 else 0.5


def _checked(situation: str, share: float | None, width: int, tokens: int | None) -> Situation:
    if situation not in SITUATIONS:
        raise FusionZooError(
            f"unknown situation {situation!r}.{did_you_mean(situation, SITUATIONS)}"
            f" There are: {', '.join(SITUATIONS)}"
        )
    entry = SITUATIONS[situation]
    if share is not None and entry.share is None:
        raise FusionZooError(f"share={share}: the situation {situation!r} has no share")
    if share is not None and not 0 <= share <= 1:
        raise FusionZooError(f"share={share}; it must be 0 to 1")
    if tokens is not None and entry.tokens is None:
        raise FusionZooError(f"tokens={tokens} has an effect in the situation 'long' only")
    if tokens is not None and tokens < 1:
        raise FusionZooError(f"tokens={tokens}; it must be at least 1")
    if width < entry.directions:
        raise FusionZooError(f"width={width}; {situation!r} needs at least {entry.directions}")
    return entry


def _of_sensors(share: float, modality: str | None) -> float:
    """Average the accuracy of MAP over the number of present sensors."""
    if modality is not None:
        # Present by chance, or because all others and itself would have been lost.
        present = 1 - share + share**SENSORS / SENSORS
        return present * RIGHT + (1 - present) / CLASSES
    accuracy = 0.0
    for present_count in range(SENSORS + 1):
        ways = math.comb(SENSORS, present_count)
        probability = ways * (1 - share) ** present_count * share ** (SENSORS - present_count)
        accuracy += probability * _map_accuracy(max(present_count, 1))
    return accuracy


def _map_accuracy(sensors: int) -> float:
    """Sum, over all readings, the joint probability of the likeliest class."""
    wrong = (1 - RIGHT) / (CLASSES - 1)
    total = 0.0
    for readings in itertools.product(range(CLASSES), repeat=sensors):
        votes = max(readings.count(label) for label in range(CLASSES))
        total += RIGHT**votes * wrong ** (sensors - votes)
    return total / CLASSES


def _detection(distance: float) -> float:
    """Return P(X_0 is largest) of K normal X of variance 1, mean `distance` of X_0 and else 0."""
    x = np.linspace(-9, 9 + distance, 4001)
    density = np.exp(-((x - distance) ** 2) / 2) / math.sqrt(2 * math.pi)
    below = np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in x])
    return float(np.sum(density * below ** (CLASSES - 1)) * (x[1] - x[0]))


def _most_frequent_slot() -> float:
    """Return the expected share of slots that show the most frequent class."""
    shown = list(itertools.product(range(CLASSES), repeat=SLOTS))
    return sum(max(slots.count(label) for label in slots) for slots in shown) / len(shown) / SLOTS
