"""Draws of `situations`: what each modality of a sample shows, and the class.

Classes are numbered 0 to K - 1, K = `CLASSES`, and equally frequent. A vector shows an item by
pointing along the item's direction; directions are orthonormal, signals have length 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

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
