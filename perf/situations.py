"""The data set `situations`: one circumstance decides how modalities should be fused.

A plugin for perf/which.py and perf/balance.py; with `--plugins perf/situations.py` it is open to
every command. `best_accuracy` and `best_aurc` say what the best possible classifier reaches on it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from fusionzoo.datasets import DATASETS, PairedDataset
from fusionzoo.datasets.builtin.interactions import SPLIT_CYCLE
from fusionzoo.datasets.tables.provenance import Provenance
from fusionzoo.errors import check_known, check_number

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
CLASSES = 4
SENSORS = 4  # modalities of `missing_at_test`
RIGHT = 0.75  # probability that a sensor reads the class
SPEAKERS = 3  # modalities of `reliability`
NOISY = 6.0  # root-mean-square length of a noisy vector's noise
HARD_RIGHT = 0.5  # probability that the hard modality shows the class where the easy one does
SLOTS = 4  # items that the content of `modifier` shows
KEYS = 6  # of `alignment`, of which each sample has four
TOKENS = 64  # of `long`
WIDTH = 16  # of a vector or token
NOISE = 0.3  # root-mean-square length of every vector's noise; its signal has length 1
# Of the samples: that something is missing, noisy, blank, without a cue or undecided.
SHARES = {"missing_at_test": 0.5, "reliability": 0.7, "starved": 0.2, "long": 0.3, "ambiguous": 0.4}
ENCODERS = {
    "vector": {"name": "vector/mlp", "dim": 32, "hidden": 64},
    "sequence": {"name": "sequence/transformer", "dim": 32, "num_layers": 1, "num_heads": 4},
}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The settings of a draw and its random generator."""

    generator: np.random.Generator
    samples: int
    width: int

    @property
    def at_test(self) -> NDArray[np.bool_]:
        """Whether a sample is in the test split: (N,)."""
        return np.arange(self.samples) % 5 == SPLIT_CYCLE.index("test")

    def directions(self, count: int) -> Floats:
        """Draw orthonormal directions: (count, width)."""
        basis, _ = np.linalg.qr(self.generator.standard_normal((self.width, count)))
        return np.asarray(basis.T)

    def noised(self, signal: Floats) -> Floats:
        """Add normal noise of root-mean-square length `NOISE` to vectors (..., width)."""
        return signal + NOISE * self._white(signal.shape)

    def random_vectors(self, length: float) -> Floats:
        """Draw normal vectors of root-mean-square length `length`: (N, width)."""
        return length * self._white((self.samples, self.width))

    def classes(self, *shape: int) -> Ints:
        """Draw uniform classes: (N, *shape)."""
        return self.generator.integers(0, CLASSES, (self.samples, *shape))

    def happens(self, probability: float) -> NDArray[np.bool_]:
        """Draw which samples an event of this probability happens to: (N,)."""
        return self.generator.random(self.samples) < probability

    def orders(self, count: int) -> Ints:
        """Draw a permutation of 0 to count - 1 for each sample: (N, count)."""
        return self.generator.random((self.samples, count)).argsort(1)

    def _white(self, shape: tuple[int, ...]) -> Floats:
        return self.generator.standard_normal(shape) / self.width**0.5


@dataclass(frozen=True)
class Planted:
    """Drawn samples; modalities without an entry in `absent` are always present."""

    values: Mapping[str, Floats]  # (N, width), of sequences (N, T, width)
    target: Ints  # (N,)
    absent: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)


def missing_at_test(setup: Setup) -> Planted:
    """Sensors each read the class, or else another one; in the test split some are missing."""
    target = setup.classes()
    values, present = {}, np.ones((setup.samples, SENSORS), bool)
    for column in range(SENSORS):
        wrong = (target + setup.generator.integers(1, CLASSES, setup.samples)) % CLASSES
        reading = np.where(setup.happens(RIGHT), target, wrong)
        values[chr(97 + column)] = setup.noised(setup.directions(CLASSES)[reading])
        present[:, column] = ~(setup.at_test & setup.happens(SHARES["missing_at_test"]))
    spared = setup.generator.integers(0, SENSORS, setup.samples)
    lost_all = ~present.any(1)
    present[lost_all, spared[lost_all]] = True
    return Planted(values, target, {chr(97 + m): ~present[:, m] for m in range(SENSORS)})


def reliability(setup: Setup) -> Planted:
    """Each vector shows the class, some under so much noise that their length tells it."""
    target = setup.classes()
    values = {}
    for column in range(SPEAKERS):
        clear = setup.noised(setup.directions(CLASSES)[target])
        noise = setup.random_vectors(NOISY)
        is_noisy = setup.happens(SHARES["reliability"])
        values[chr(97 + column)] = clear + is_noisy[:, None] * noise
    return Planted(values, target)


def starved(setup: Setup) -> Planted:
    """`a` shows the class plainly or nothing; `b` shows it as a difference modulo K.

    Where a shows nothing, b shows the class; elsewhere only with probability `HARD_RIGHT`, and
    otherwise a random one.
    """
    target = setup.classes()
    is_blank = setup.happens(SHARES["starved"])
    plain = setup.noised(setup.directions(CLASSES)[target])
    a = np.where(is_blank[:, None], setup.random_vectors(1.0), plain)
    tells = is_blank | setup.happens(HARD_RIGHT)
    shown = np.where(tells, target, setup.classes())
    key = setup.classes()
    directions = setup.directions(2 * CLASSES)
    code = directions[key] + directions[CLASSES + (shown + key) % CLASSES]
    return Planted({"a": a, "b": setup.noised(code / 2**0.5)}, target)


def modifier(setup: Setup) -> Planted:
    """`content` shows a class in each of several slots; `modifier` shows which slot counts."""
    slots = setup.classes(SLOTS)
    chosen = setup.generator.integers(0, SLOTS, setup.samples)
    items = setup.directions(SLOTS * CLASSES)[slots + CLASSES * np.arange(SLOTS)]
    content = setup.noised(items.sum(1) / SLOTS**0.5)
    selection = setup.noised(setup.directions(SLOTS)[chosen])
    target = slots[np.arange(setup.samples), chosen]
    return Planted({"content": content, "modifier": selection}, target)


def alignment(setup: Setup) -> Planted:
    """`a` pairs four keys with the classes, `b` repeats the keys and marks one of them: its class.

    Tokens are in random order.
    """
    keys, classes = setup.orders(KEYS)[:, :CLASSES], setup.orders(CLASSES)
    directions = setup.directions(KEYS + CLASSES)
    pairs = (directions[keys] + directions[KEYS + classes]) / 2**0.5
    directions = setup.directions(KEYS + 1)
    repeated = directions[keys]
    repeated[:, 0] = (repeated[:, 0] + directions[KEYS]) / 2**0.5  # the first pair is the answer
    a = np.take_along_axis(pairs, setup.orders(CLASSES)[..., None], 1)
    b = np.take_along_axis(repeated, setup.orders(CLASSES)[..., None], 1)
    return Planted({"a": setup.noised(a), "b": setup.noised(b)}, classes[:, 0])


def long(setup: Setup) -> Planted:
    """All tokens show random classes, and at most one, marked, the sample's class."""
    target = setup.classes()
    rows = np.arange(setup.samples)
    values = {}
    for name in ("a", "b"):
        directions = setup.directions(CLASSES + 1)
        tokens = directions[setup.classes(TOKENS)]
        place = setup.generator.integers(0, TOKENS, setup.samples)
        marked = (directions[target] + directions[CLASSES]) / 2**0.5
        has_cue = ~setup.happens(SHARES["long"])
        tokens[rows[has_cue], place[has_cue]] = marked[has_cue]
        values[name] = setup.noised(tokens)
    return Planted(values, target)


def ambiguous(setup: Setup) -> Planted:
    """Each vector shows two candidates; both share the class alone, or else both candidates."""
    order = setup.orders(CLASSES)
    target, is_ambiguous = order[:, 0], setup.happens(SHARES["ambiguous"])
    others = {"a": order[:, 1], "b": np.where(is_ambiguous, order[:, 1], order[:, 2])}
    values = {}
    for name, other in others.items():
        directions = setup.directions(CLASSES)
        values[name] = setup.noised((directions[target] + directions[other]) / 2**0.5)
    return Planted(values, target)


class Situation(NamedTuple):
    """How a situation is drawn."""

    draw: Callable[[Setup], Planted]
    directions: int = CLASSES  # orthonormal ones that a vector needs
    kind: str = "vector"


SITUATIONS = {
    "missing_at_test": Situation(missing_at_test),
    "reliability": Situation(reliability),
    "starved": Situation(starved, 2 * CLASSES),
    "modifier": Situation(modifier, SLOTS * CLASSES),
    "alignment": Situation(alignment, KEYS + CLASSES, "sequence"),
    "long": Situation(long, CLASSES + 1, "sequence"),
    "ambiguous": Situation(ambiguous),
}


@DATASETS.register(family="built-in")
def situations(
    *, situation: str = "reliability", samples: int = 2000, width: int = WIDTH, seed: int = 0
) -> PairedDataset:
    """Draw data in which one circumstance decides how modalities should be fused.

    Four equally frequent classes, signals of length 1 under normal noise. All modalities together
    reach `best_accuracy(situation)`, none alone does. The split is 60/20/20.

    Settings:
        situation: `missing_at_test`: four sensors, each right with probability 0.75; half of the
            test values are missing. `reliability`: three vectors show the class, 0.7 of each under
            noise of length 6. `starved`: a shows the class plainly, in a fifth of samples nothing;
            b shows it then, and in half of the others, as a difference modulo 4. `modifier`:
            content shows a class in each of four slots, modifier which slot counts. `alignment`:
            tokens of a pair keys with classes, b marks the key whose class is the answer. `long`:
            one of 64 tokens, marked, shows the class; 0.3 of sequences have none. `ambiguous`: a
            and b each show two candidates, in 0.4 of samples the same two
        samples: number of samples
        width: dimensions of a vector or token, at least 16 in `modifier`
        seed: of all random draws
    """
    check_known(situation, SITUATIONS, f"unknown situation {situation!r}")
    entry = SITUATIONS[situation]
    check_number("width", width, entry.directions)
    generator = np.random.default_rng(seed)
    planted = entry.draw(Setup(generator=generator, samples=samples, width=width))
    rows = np.arange(samples)
    table = {
        "id": [str(row) for row in rows],
        "split": [SPLIT_CYCLE[row % 5] for row in rows],
        "target": [str(label) for label in planted.target],
        **{name: pa.array(rows, mask=planted.absent.get(name)) for name in planted.values},
    }
    return PairedDataset(
        pa.table(table),
        dict.fromkeys(planted.values, entry.kind),
        memory={m: torch.from_numpy(x.astype(np.float32)) for m, x in planted.values.items()},
        source=f"situations ({situation})",
        encoders=dict.fromkeys(planted.values, ENCODERS[entry.kind]),
        provenance=Provenance(split_rule="fixed"),
    )


def best_accuracy(situation: str) -> float:
    """Return the best possible accuracy on the test split.

    Exact but for items that are misread (probability below 1e-5); of `reliability`, with known
    noise levels (lengths tell them). It is the expected accuracy over draws of the data: on n
    drawn samples that of the best classifier has a standard deviation of sqrt(p (1 - p) / n), so a
    model may lie above it by chance: 1.5 points at p = 0.932, n = 300.

    >>> [round(best_accuracy(name), 3) for name in SITUATIONS]
    [0.792, 0.863, 1.0, 1.0, 1.0, 0.932, 0.8]
    """
    share = SHARES.get(situation, 0.0)
    if situation == "missing_at_test":
        return _of_sensors(share)
    if situation == "reliability":
        # One clear vector suffices; of noisy ones, the projections on the directions are summed.
        detected = _detection(math.sqrt(SPEAKERS * WIDTH) / NOISY)
        return 1 - share**SPEAKERS * (1 - detected)
    if situation == "long":
        return 1 - share**2 * (1 - 1 / CLASSES)
    return 1 - share / 2 if situation == "ambiguous" else 1.0


def best_aurc() -> float:
    """Return the least area under the risk-coverage curve of `ambiguous`.

    A classifier that answers undecided samples last makes no error up to coverage c0 = 1 - share,
    and at coverage c has the risk (c - c0) / 2c; the area is (share + c0 log c0) / 2.

    >>> round(best_aurc(), 4)
    0.0468
    """
    share = SHARES["ambiguous"]
    return (share + (1 - share) * math.log(1 - share)) / 2


def _of_sensors(share: float) -> float:
    """Average the accuracy of MAP over the number of present sensors."""
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
