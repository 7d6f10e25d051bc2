"""`interactions` and `situations`: synthetic data whose best accuracy is known."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fusionzoo.errors import FusionZooError, check_known, check_number

from ..base import DATASETS, from_memory
from ..paired import PairedDataset
from ..tables.provenance import Provenance

SPLIT_CYCLE = ("train", "val", "train", "test", "train")
TASKS = ("redundant", "unique", "xor", "and", "copy")
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
ENCODERS = {
    "vector": {"name": "vector/mlp", "dim": 32, "hidden": 64},
    "sequence": {"name": "sequence/transformer", "dim": 32, "num_layers": 1, "num_heads": 4},
}


@DATASETS.register("interactions", family="built-in")
def interactions(
    *,
    task: str = "xor",
    num_modalities: int = 2,
    samples: int = 2000,
    width: int = 8,
    noise: float = 0.3,
    flip: float = 0.0,
    seed: int = 0,
) -> PairedDataset:
    """Draw vectors a, b, ... with known redundant, unique or synergistic information.

    Each modality holds a fair bit, as +1 or -1 along a fixed direction, under normal noise. A bit
    is misread with probability Q(sqrt(width) / noise), 1e-21 by default; while that is small, the
    best possible accuracy is `interactions_bayes_accuracy(task, num_modalities, flip)`. The split
    is 60/20/20.

    Settings:
        task: the class is, in `redundant`, the bit that all share; in `unique`, a's bit; in `xor`,
            the parity of all bits; in `and`, whether all are +1; in `copy`, all bits (2^M classes)
        num_modalities: number M of modalities, at least 2
        samples: number of samples
        width: dimensions of a vector
        noise: root-mean-square length of a vector's noise; its signal has length 1
        flip: share of classes replaced by random ones, 0 to 1
        seed: of all random draws
    """
    generator = np.random.default_rng(seed)
    bits, target = _draw_bits(task, num_modalities, samples, flip, generator)
    vectors = _draw_vectors(bits, width, noise, generator)
    return from_memory(
        vectors,
        dict.fromkeys(vectors, "vector"),
        ids=[str(row) for row in range(samples)],
        splits=[SPLIT_CYCLE[row % 5] for row in range(samples)],
        target=[str(label) for label in target],
        source=f"interactions ({task})",
        encoders={name: {"name": "vector/mlp", "dim": 32, "hidden": 32} for name in vectors},
        provenance=Provenance(split_rule="fixed"),
    )


def _draw_bits(
    task: str, num_modalities: int, samples: int, flip: float, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return the modalities' bits, (N, M) in 0 and 1, and the classes, (N,)."""
    check_known(task, TASKS, f"unknown task {task!r}")
    check_number("num_modalities", num_modalities, 2)
    bits = generator.integers(0, 2, (samples, num_modalities))
    if task == "redundant":
        bits[:] = bits[:, :1]
    target = _answer(task, bits)
    classes = 2**num_modalities if task == "copy" else 2
    flipped = generator.random(samples) < flip
    return bits, np.where(flipped, generator.integers(0, classes, samples), target)


def _draw_vectors(
    bits: np.ndarray, width: int, noise: float, generator: np.random.Generator
) -> dict[str, torch.Tensor]:
    """Return each modality's vectors, float32 (N, width): its bit along a direction, and noise."""
    samples, num_modalities = bits.shape
    vectors = {}
    for column in range(num_modalities):
        direction = generator.standard_normal(width)
        direction /= np.linalg.norm(direction)
        signal = (2 * bits[:, column : column + 1] - 1) * direction
        values = signal + noise * generator.standard_normal((samples, width)) / width**0.5
        vectors[_name(column)] = torch.from_numpy(values.astype(np.float32))
    return vectors


def interactions_bayes_accuracy(
    task: str, num_modalities: int, flip: float = 0.0, known: int | None = None
) -> float:
    """Return the best possible accuracy from the first `known` modalities, ignoring noise.

    By default all modalities are known.

    >>> [interactions_bayes_accuracy(task, 2, known=1) for task in TASKS]
    [1.0, 1.0, 0.5, 0.75, 0.5]
    """
    known = num_modalities if known is None else known
    classes = 2**num_modalities if task == "copy" else 2
    if known == num_modalities or (task in ("redundant", "unique") and known):
        clean = 1.0
    elif task == "and":
        # If all known bits are +1, the rest decide; otherwise the answer is certainly "no".
        all_unknown = 0.5 ** (num_modalities - known)  # probability that they are +1
        clean = 1 - 0.5**known * min(all_unknown, 1 - all_unknown)
    else:
        clean = 0.5 ** (num_modalities - known) if task == "copy" else 0.5
    return (1 - flip) * clean + flip / classes


def _answer(task: str, bits: np.ndarray) -> np.ndarray:
    if task in ("redundant", "unique"):
        return bits[:, 0]
    if task == "xor":
        return bits.sum(1) % 2
    if task == "and":
        return bits.all(1).astype(int)
    return bits @ (1 << np.arange(bits.shape[1]))


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The settings of a draw and its random generator."""

    generator: np.random.Generator
    at_test: NDArray[np.bool_]  # (N,) whether a sample is in the test split
    width: int
    noise: float
    share: float
    tokens: int

    @property
    def samples(self) -> int:
        """Return the number N of samples."""
        return len(self.at_test)

    def directions(self, count: int) -> Floats:
        """Draw orthonormal directions: (count, width)."""
        basis, _ = np.linalg.qr(self.generator.standard_normal((self.width, count)))
        return np.asarray(basis.T)

    def noised(self, signal: Floats) -> Floats:
        """Add normal noise of root-mean-square length `noise` to vectors (..., width)."""
        return signal + self.noise * self._white(signal.shape)

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
    """Drawn samples; modalities without an entry in `present` are always present."""

    values: Mapping[str, Floats]  # (N, width), of sequences (N, T, width)
    target: Ints  # (N,)
    present: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)


def missing_at_test(setup: Setup) -> Planted:
    """Sensors each read the class, or else another one; in the test split some are missing."""
    target = setup.classes()
    values, present = {}, np.ones((setup.samples, SENSORS), bool)
    for column in range(SENSORS):
        wrong = (target + setup.generator.integers(1, CLASSES, setup.samples)) % CLASSES
        reading = np.where(setup.happens(RIGHT), target, wrong)
        values[_name(column)] = setup.noised(setup.directions(CLASSES)[reading])
        present[:, column] = ~(setup.at_test & setup.happens(setup.share))
    spared = setup.generator.integers(0, SENSORS, setup.samples)
    lost_all = ~present.any(1)
    present[lost_all, spared[lost_all]] = True
    return Planted(values, target, {_name(m): present[:, m] for m in range(SENSORS)})


def reliability(setup: Setup) -> Planted:
    """Each vector shows the class, some under so much noise that their length tells it."""
    target = setup.classes()
    values = {}
    for column in range(SPEAKERS):
        clear = setup.noised(setup.directions(CLASSES)[target])
        noise = setup.random_vectors(NOISY)
        is_noisy = setup.happens(setup.share)
        values[_name(column)] = clear + is_noisy[:, None] * noise
    return Planted(values, target)


def starved(setup: Setup) -> Planted:
    """`a` shows the class plainly or nothing; `b` shows it as a difference modulo K.

    Where a shows nothing, b shows the class; elsewhere only with probability `HARD_RIGHT`, and
    otherwise a random one.
    """
    target = setup.classes()
    is_blank = setup.happens(setup.share)
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
        tokens = directions[setup.classes(setup.tokens)]
        place = setup.generator.integers(0, setup.tokens, setup.samples)
        marked = (directions[target] + directions[CLASSES]) / 2**0.5
        has_cue = ~setup.happens(setup.share)
        tokens[rows[has_cue], place[has_cue]] = marked[has_cue]
        values[name] = setup.noised(tokens)
    return Planted(values, target)


def ambiguous(setup: Setup) -> Planted:
    """Each vector shows two candidates; both share the class alone, or else both candidates."""
    order = setup.orders(CLASSES)
    target, is_ambiguous = order[:, 0], setup.happens(setup.share)
    others = {"a": order[:, 1], "b": np.where(is_ambiguous, order[:, 1], order[:, 2])}
    values = {}
    for name, other in others.items():
        directions = setup.directions(CLASSES)
        values[name] = setup.noised((directions[target] + directions[other]) / 2**0.5)
    return Planted(values, target)


def _name(column: int) -> str:
    return chr(ord("a") + column)


class Situation(NamedTuple):
    """How a situation is drawn, and what its settings may be."""

    draw: Callable[[Setup], Planted]
    directions: int  # orthonormal ones that a vector needs
    share: float | None = None  # default; None: the situation has no share
    kind: str = "vector"
    tokens: int | None = None  # default; None: the number of tokens is fixed


SITUATIONS = {
    "missing_at_test": Situation(missing_at_test, CLASSES, share=0.5),
    "reliability": Situation(reliability, CLASSES, share=0.7),
    "starved": Situation(starved, 2 * CLASSES, share=0.2),
    "modifier": Situation(modifier, SLOTS * CLASSES),
    "alignment": Situation(alignment, KEYS + CLASSES, kind="sequence"),
    "long": Situation(long, CLASSES + 1, share=0.3, kind="sequence", tokens=64),
    "ambiguous": Situation(ambiguous, CLASSES, share=0.4),
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
) -> PairedDataset:
    """Draw data in which one circumstance decides how modalities should be fused.

    Four equally frequent classes, signals of length 1 under normal noise. All modalities together
    reach `situations_bayes_accuracy(situation)`, none alone does. The split is 60/20/20.

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
    planted = entry.draw(setup)
    return from_memory(
        {name: torch.from_numpy(x.astype(np.float32)) for name, x in planted.values.items()},
        dict.fromkeys(planted.values, entry.kind),
        ids=[str(row) for row in range(setup.samples)],
        splits=[SPLIT_CYCLE[row % 5] for row in range(setup.samples)],
        target=[str(label) for label in planted.target],
        present=planted.present,
        source=f"situations ({situation})",
        encoders=dict.fromkeys(planted.values, ENCODERS[entry.kind]),
        provenance=Provenance(split_rule="fixed"),
    )


def situations_bayes_accuracy(
    situation: str, modality: str | None = None, *, share: float | None = None, width: int = 16
) -> float:
    """Return the best possible accuracy on the test split, of all modalities or of one alone.

    Exact but for items that are misread (probability below 1e-5 at the default noise and width);
    of `reliability`, with known noise levels (lengths tell them). It is the expected accuracy over
    draws of the data: on n drawn samples that of the best classifier has a standard deviation of
    sqrt(p (1 - p) / n), so a model may lie above it by chance: 1.5 points at p = 0.932, n = 300.

    >>> [round(situations_bayes_accuracy(name), 3) for name in SITUATIONS]
    [0.792, 0.863, 1.0, 1.0, 1.0, 0.932, 0.8]
    >>> names = ("reliability", "starved", "long")
    >>> [round(situations_bayes_accuracy(name, "a"), 3) for name in names]
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
    check_known(situation, SITUATIONS, f"unknown situation {situation!r}")
    entry = SITUATIONS[situation]
    for name, value, default in (("share", share, entry.share), ("tokens", tokens, entry.tokens)):
        if value is not None and default is None:
            raise FusionZooError(f"{name}={value} has no effect in the situation {situation!r}")
    check_number("share", share or 0, 0, 1 + 1e-9)
    check_number("tokens", 1 if tokens is None else tokens, 1)
    check_number("width", width, entry.directions)
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
