"""How often intervals over folds cover the truth: `python perf/coverage.py`, about eight minutes.

Simulated data sets of two modalities; ridge classifiers see one of them (the single modality) or
both (fusion), each with a random subset of features that stands for a training seed. Five folds,
trained on 70 % of the samples, three seeds, as benchmark.py does. The truth is the mean gain over
many training sets of that size, tested on other samples. Writes results/coverage.csv: for each
setting, how often each interval covers the truth in 2,000 data sets, how wide it is, and how often
a planted tie (two trainings of the same kind) is called a difference.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t

from fusionzoo.benchmark.bench import VALIDATION_PARTS
from fusionzoo.evaluation.statistics import LEVEL, crossed

Array = NDArray[np.float64]
ROOT = Path(__file__).parents[1]
FOLDS, SEEDS, CLASSES = 5, 3, 4
KEPT = 0.9  # share of the features that a seed's classifier sees


class Setting(NamedTuple):
    """A population to draw data sets from."""

    samples: int
    width: int  # features of each modality
    first: float  # how far apart the classes are in the first modality
    second: float


SETTINGS = (
    Setting(300, 20, 2.0, 1.0),
    Setting(300, 20, 2.0, 0.0),
    Setting(150, 60, 2.0, 1.0),
    Setting(150, 60, 2.0, 0.0),
    Setting(700, 100, 2.5, 2.0),
)


class World:
    """Draws samples of a setting: class means plus white noise."""

    def __init__(self, setting: Setting) -> None:
        draw = np.random.default_rng(99)
        scale = 1.5 / math.sqrt(setting.width)
        self.means = [
            draw.normal(size=(CLASSES, setting.width)) * apart * scale
            for apart in (setting.first, setting.second)
        ]

    def sample(
        self, count: int, draw: np.random.Generator
    ) -> tuple[list[Array], NDArray[np.int64]]:
        """Return both modalities, (N, D) each, and the classes (N,)."""
        labels = draw.integers(CLASSES, size=count)
        return [m[labels] + draw.normal(size=(count, m.shape[1])) for m in self.means], labels


Answers = Callable[[list[Array]], NDArray[np.int64]]


def learn(parts: list[Array], labels: NDArray[np.int64], draw: np.random.Generator) -> Answers:
    """Fit a ridge classifier on a random subset of the features."""
    features = np.concatenate(parts, 1)
    kept = draw.random(features.shape[1]) < KEPT
    design = np.c_[features * kept, np.ones(len(features))]
    gram = design.T @ design + np.eye(design.shape[1])
    weights = np.linalg.solve(gram, design.T @ np.eye(CLASSES)[labels])

    def answers(others: list[Array]) -> NDArray[np.int64]:
        x = np.concatenate(others, 1)
        return np.asarray((np.c_[x * kept, np.ones(len(x))] @ weights).argmax(1), np.int64)

    return answers


def gain(
    train: tuple[list[Array], NDArray[np.int64]],
    test: tuple[list[Array], NDArray[np.int64]],
    draw: np.random.Generator,
    tie: bool,
) -> Array:
    """Return how much more often fusion is right on each test sample: -1, 0 or 1.

    With `tie` both see one modality and the first training has no advantage.
    """
    parts, labels = train
    others, truth = test
    used = 1 if tie else 2
    fused = learn(parts[:used], labels, draw)(others[:used]) == truth
    single = learn(parts[:1], labels, draw)(others[:1]) == truth
    return fused.astype(np.float64) - single


def cross_validate(world: World, setting: Setting, draw: np.random.Generator, tie: bool) -> Array:
    """Return the gains of a data set's samples in each seed, (S, N), fold after fold."""
    parts, labels = world.sample(setting.samples, draw)
    folds = np.array_split(draw.permutation(setting.samples), FOLDS)
    gains = np.zeros((SEEDS, setting.samples))
    for number, test in enumerate(folds):
        others = np.concatenate([rows for at, rows in enumerate(folds) if at != number])
        train = draw.permutation(others)[: train_count(setting)]
        for seed in range(SEEDS):
            gains[seed, test] = gain(
                ([x[train] for x in parts], labels[train]),
                ([x[test] for x in parts], labels[test]),
                draw,
                tie,
            )
    return np.concatenate([gains[:, rows] for rows in folds], 1)


def train_count(setting: Setting) -> int:
    """Return how many samples a fold trains on; it validates on others, and tests on others."""
    return setting.samples * (FOLDS - 1) // FOLDS * (VALIDATION_PARTS - 1) // VALIDATION_PARTS


def true_gain(world: World, setting: Setting, tie: bool) -> float:
    """Return the mean gain over training sets of the folds' size."""
    if tie:
        return 0.0
    draw = np.random.default_rng(12345)
    count = train_count(setting)
    gains = [
        gain(world.sample(count, draw), world.sample(2000, draw), draw, tie).mean()
        for _ in range(400)
    ]
    return float(np.mean(gains))


def ours(gains: Array) -> tuple[float, float]:
    """The interval of a report."""
    interval, _ = crossed(gains, FOLDS)
    return interval.low, interval.high


def ignorant(gains: Array) -> tuple[float, float]:
    """The interval that does not know that folds share training data."""
    interval, _ = crossed(gains)
    return interval.low, interval.high


def nadeau_bengio(gains: Array) -> tuple[float, float]:
    """Nadeau and Bengio's corrected t interval (2003) over the folds' means."""
    means = np.array([part.mean() for part in np.array_split(gains.mean(0), FOLDS)])
    variance = (1 / FOLDS + 1 / (FOLDS - 2)) * means.var(ddof=1)
    half = float(t.ppf((1 + LEVEL) / 2, FOLDS - 1)) * math.sqrt(variance)
    return means.mean() - half, means.mean() + half


METHODS = {"ours": ours, "ignorant of folds": ignorant, "Nadeau and Bengio": nadeau_bengio}


def simulate(setting: Setting, runs: int, tie: bool = False) -> dict[str, tuple[float, float]]:
    """Return for each method how often it covers the truth, and its mean half width."""
    world = World(setting)
    truth = true_gain(world, setting, tie)
    covered, widths = dict.fromkeys(METHODS, 0), dict.fromkeys(METHODS, 0.0)
    for run in range(runs):
        gains = cross_validate(world, setting, np.random.default_rng(run), tie)
        for name, interval in METHODS.items():
            low, high = interval(gains)
            covered[name] += low <= truth <= high
            widths[name] += (high - low) / 2
    return {name: (covered[name] / runs, widths[name] / runs) for name in METHODS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=2000, help="data sets of each setting")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "coverage.csv")
    args = parser.parse_args()
    rows = []
    for setting in SETTINGS:
        gains, ties = simulate(setting, args.runs), simulate(setting, args.runs, tie=True)
        for name in METHODS:
            coverage, half = gains[name]
            rows.append(
                [*setting, name, f"{coverage:.3f}", f"{half:.4f}", f"{1 - ties[name][0]:.3f}"]
            )
            print(*rows[-1], flush=True)
    with args.out.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        header = ["samples", "width", "first_apart", "second_apart", "interval"]
        writer.writerow([*header, "coverage", "half_width", "ties_called_different"])
        writer.writerows(rows)


if __name__ == "__main__":
    main()
