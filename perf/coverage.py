"""How often intervals over folds cover the truth.

`python perf/coverage.py` takes about 25 minutes; with `--random 500` it prints the
coverage over random splits instead, in as many data sets of each kind, and writes nothing.

Simulated data sets of two modalities; ridge classifiers see one of them (the single modality) or
both (fusion), each with a random subset of features that stands for a training seed. Five folds,
trained on 70 % of the samples, three seeds, as benchmark.py does. The truth is the mean gain over
many training sets of that size, tested on other samples. Writes results/coverage.csv: for each
setting, how often each interval covers the truth in 2,000 data sets, how wide it is, and how often
a planted tie (two trainings of the same kind) is called a difference.

Then the whole procedure, in 300 to 1,000 data sets each: 30 fusions of different quality, one of
them chosen on validation data in each fold (or, as a comparison, over all folds), compared with the
best of heads and probes of two modalities, chosen on the test split as in a report or known in
advance; with groups of samples, and with a refit on training and validation samples. `bias` is the
mean of the estimate minus the truth. In a tie the fusions see the first modality only; choosing
among their trainings is worth the little that `tie_gain` says.

Last, two models that are as good: of 40 groups, whose samples each model finds hard or easy
together, one has as many samples as the column `group` says, the others 4 each.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit
from scipy.stats import t

from fusionzoo.benchmark.bench import VALIDATION_PARTS
from fusionzoo.evaluation.statistics import LEVEL, crossed

Array = NDArray[np.float64]
Samples = tuple[list[Array], NDArray[np.int64]]  # both modalities, (N, D) each, and the classes
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

    def sample(self, count: int, draw: np.random.Generator) -> Samples:
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


def gain(train: Samples, test: Samples, draw: np.random.Generator, tie: bool) -> Array:
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
            learnt, tested = (([x[rows] for x in parts], labels[rows]) for rows in (train, test))
            gains[seed, test] = gain(learnt, tested, draw, tie)
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
    learnt = (world.sample(count, draw) for _ in range(400))
    return float(np.mean([gain(x, world.sample(2000, draw), draw, tie).mean() for x in learnt]))


def ours(gains: Array) -> tuple[float, float]:
    """The interval of a report."""
    interval, _ = crossed(gains, 1 / FOLDS)
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


RANDOM_SPLITS = ((5, 0.2), (5, 0.15), (10, 0.2), (20, 0.2))  # how many, and what each tests


def split_at_random(
    world: World, setting: Setting, draw: np.random.Generator, tie: bool, splits: tuple[int, float]
) -> tuple[Array, list[str]]:
    """Return the gains (S, tests) of random splits, split after split, and the sample of each.

    A tenth of what a split does not test validates, as for `--repeats` without such samples.
    """
    parts, labels = world.sample(setting.samples, draw)
    count, share = splits
    gains, samples = [], []
    for _ in range(count):
        order = draw.permutation(setting.samples)
        train, test = np.split(order, [setting.samples - round(setting.samples * share)])
        train = train[: len(train) * 9 // 10]
        learnt, tested = (([x[rows] for x in parts], labels[rows]) for rows in (train, test))
        gains.append(np.stack([gain(learnt, tested, draw, tie) for _ in range(SEEDS)]))
        samples += [str(row) for row in test]
    return np.concatenate(gains, 1), samples


def simulate_random(
    setting: Setting, runs: int, splits: tuple[int, float], tie: bool = False
) -> dict[str, float]:
    """Return how often intervals over random splits cover the truth: ours, where a sample's tests
    count as one, and one that takes every test for a sample."""
    world, share = World(setting), splits[1]
    count = (setting.samples - round(setting.samples * share)) * 9 // 10
    draw = np.random.default_rng(12345)
    learnt = (world.sample(count, draw) for _ in range(0 if tie else 400))
    gains = [gain(x, world.sample(2000, draw), draw, tie).mean() for x in learnt]
    truth, covered = float(np.mean(gains or [0.0])), {"ours": 0, "every test a sample": 0}
    for run in range(runs):
        scores, samples = split_at_random(world, setting, np.random.default_rng(run), tie, splits)
        for name, groups in zip(covered, (samples, None), strict=True):
            interval, _ = crossed(scores, share, groups=groups)
            covered[name] += interval.low <= truth <= interval.high
    return {name: x / runs for name, x in covered.items()}


LARGEST = (4, 40, 100, 200)  # samples of the largest group
OTHERS = 39  # groups, of 4 samples each


def simulate_groups(largest: int, runs: int) -> tuple[float, float]:
    """Return how often an interval over groups covers 0, the truth, and its mean half width."""
    draw, covered, width = np.random.default_rng(0), 0, 0.0
    groups = np.repeat(np.arange(OTHERS + 1), [largest] + [4] * OTHERS)
    for _ in range(runs):
        shared, first, second = draw.normal(0.0, [[1.2], [0.6], [0.6]], (3, OTHERS + 1))[:, groups]
        right = draw.random((2, SEEDS, len(groups))) < expit(0.6 + shared + [[first], [second]])
        interval, _ = crossed(right[0] - 1.0 * right[1], groups=groups.astype(str))
        covered += interval.low <= 0 <= interval.high
        width += (interval.high - interval.low) / 2
    return covered / runs, width / runs


class Procedure(NamedTuple):
    """How a whole benchmark is run on data of a setting."""

    setting: Setting
    group: int  # samples that share a part of their noise, and a fold
    refit: bool  # whether models are trained on the validation samples, too, once one is chosen
    data_sets: int  # to simulate


PROCEDURES = (
    Procedure(Setting(300, 20, 2.0, 1.0), 1, False, 1000),
    Procedure(Setting(300, 20, 2.0, 1.0), 3, False, 1000),
    Procedure(Setting(300, 20, 2.0, 1.0), 3, True, 1000),
    Procedure(Setting(150, 60, 2.0, 1.0), 1, False, 300),
    Procedure(Setting(700, 40, 2.0, 1.5), 3, True, 300),
)
FUSIONS = 30
SHARED = 0.6  # std of the noise that a group shares; that of a sample is 0.8: 1 together
STRENGTHS = np.logspace(-1, 2, FUSIONS)  # of the fusions' ridge penalties: they differ in quality
REFERENCES = ("best single on the test split", "best single in truth")
CHOICES = ("in each fold", "over all folds")


class Model(NamedTuple):
    """Trainings of one candidate: the features that each may see, and the ridge penalty."""

    visible: NDArray[np.bool_]  # (S, D), a row per seed
    penalty: float


def models(setting: Setting, tie: bool, draw: np.random.Generator) -> list[Model]:
    """Return the singles (a head and a probe of each modality, the probe without seeds), then the
    fusions. With `tie` fusions see the first modality only and train as its head."""
    first = np.arange(2 * setting.width) < setting.width

    def kept(sees: NDArray[np.bool_], seeds: int = SEEDS) -> NDArray[np.bool_]:
        mask = sees & (draw.random((seeds, len(first))) < KEPT)
        return np.broadcast_to(mask, (SEEDS, len(first)))

    singles = [Model(kept(sees, n), 1.0) for sees in (first, ~first) for n in (SEEDS, 1)]
    if tie:
        return singles + [Model(kept(first), 1.0) for _ in range(FUSIONS)]
    everything = np.ones_like(first)
    return singles + [Model(kept(everything), float(strength)) for strength in STRENGTHS]


def right_answers(
    candidates: Sequence[Model],
    x: Array,
    labels: NDArray[np.int64],
    tests: Sequence[Array],
    truths: Sequence[NDArray[np.int64]],
) -> list[Array]:
    """Fit all candidates; return for each test set which samples they are right on, (C, S, n)."""
    visible = np.concatenate([model.visible for model in candidates])
    penalties = np.repeat([model.penalty for model in candidates], SEEDS)
    seen = np.c_[visible, np.ones(len(visible))].astype(np.float64)
    design = np.c_[x, np.ones(len(x))]
    gram = design.T @ design * seen[:, :, None] * seen[:, None]
    gram += penalties[:, None, None] * np.eye(design.shape[1])
    weights = np.linalg.solve(gram, (design.T @ np.eye(CLASSES)[labels]) * seen[:, :, None])
    results = []
    for test, truth in zip(tests, truths, strict=True):
        answers = (np.c_[test, np.ones(len(test))] @ weights).argmax(-1)
        right = (answers == truth).astype(np.float64)
        results.append(right.reshape(len(candidates), SEEDS, -1))
    return results


def grouped(
    world: World, procedure: Procedure, count: int, draw: np.random.Generator
) -> tuple[Array, NDArray[np.int64], NDArray[np.int64]]:
    """Draw features (N, 2 D), classes and groups; the samples of a group have one class."""
    groups = np.arange(count) // procedure.group
    labels = draw.integers(CLASSES, size=groups[-1] + 1)[groups]
    means = np.concatenate(world.means, 1)[labels]
    shared = draw.normal(size=(groups[-1] + 1, means.shape[1]))[groups]
    return means + SHARED * shared + 0.8 * draw.normal(size=means.shape), labels, groups


class Outcome(NamedTuple):
    """What a whole benchmark on one data set measures, (C, S, N) fold after fold."""

    right: Array
    validation: Array  # (F, C), means over seeds
    groups: NDArray[np.int64]  # (N,)
    folds: list[slice]


def run_procedure(
    world: World, procedure: Procedure, draw: np.random.Generator, tie: bool
) -> Outcome:
    """Run all folds of a benchmark: 70 % of the groups train, 10 % validate, 20 % are tested."""
    x, labels, groups = grouped(world, procedure, procedure.setting.samples, draw)
    parts = np.array_split(draw.permutation(groups[-1] + 1), FOLDS)
    right, validation, tested, folds = [], [], [], []
    for number, part in enumerate(parts):
        others = np.concatenate([p for at, p in enumerate(parts) if at != number])
        val = others[: len(others) // VALIDATION_PARTS]  # the same groups in several folds
        is_val, is_test = np.isin(groups, val), np.isin(groups, part)
        train, tests = ~is_val & ~is_test, [x[is_val], x[is_test]]
        truths = [labels[is_val], labels[is_test]]
        candidates = models(procedure.setting, tie, draw)
        of_val, of_test = right_answers(candidates, x[train], labels[train], tests, truths)
        if procedure.refit:
            learnt = x[~is_test], labels[~is_test]
            (of_test,) = right_answers(candidates, *learnt, tests[1:], truths[1:])
        start = sum(len(rows) for rows in tested)
        folds.append(slice(start, start + int(is_test.sum())))
        tested.append(groups[is_test])
        right.append(of_test)
        validation.append(of_val.mean((1, 2)))
    return Outcome(np.concatenate(right, 2), np.stack(validation), np.concatenate(tested), folds)


SINGLES = 4


def chosen(outcome: Outcome, candidates: slice, choice: str = CHOICES[0]) -> Array:
    """Return the scores (S, N) of what validation data chooses among some candidates."""
    validation = outcome.validation[:, candidates]
    if choice == CHOICES[1]:
        validation = np.broadcast_to(validation.mean(0), validation.shape)
    numbers = validation.argmax(1)
    scores = outcome.right[candidates]
    parts = [scores[k][:, rows] for k, rows in zip(numbers, outcome.folds, strict=True)]
    return np.concatenate(parts, 1)


def true_procedure(world: World, procedure: Procedure, tie: bool, draws: int) -> tuple[float, int]:
    """Return the true gain of the chosen fusion over the best single in truth, and that single."""
    draw, samples = np.random.default_rng(12345), procedure.setting.samples
    singles, fused = [], []
    for _ in range(draws):
        x, labels, _ = grouped(world, procedure, samples * (FOLDS - 1) // FOLDS, draw)
        first = len(x) // VALIDATION_PARTS // procedure.group * procedure.group
        test, truth, _ = grouped(world, procedure, 1500, draw)
        candidates = models(procedure.setting, tie, draw)
        tests, truths = [x[:first], test], [labels[:first], truth]
        of_val, of_test = right_answers(candidates, x[first:], labels[first:], tests, truths)
        if procedure.refit:
            (of_test,) = right_answers(candidates, x, labels, [test], [truth])
        validation, true = of_val.mean((1, 2)), of_test.mean((1, 2))
        singles.append(true[:SINGLES])
        fused.append(true[SINGLES + validation[SINGLES:].argmax()])
    means = np.mean(singles, 0)
    return float(np.mean(fused) - means.max()), int(means.argmax())


class Figures(NamedTuple):
    """Means over data sets, for a choice and a reference."""

    coverage: float
    half_width: float
    bias: float
    called_different: float
    true_gain: float


def simulate_procedure(
    procedure: Procedure, runs: int, tie: bool = False, draws: int = 400
) -> dict[tuple[str, str], Figures]:
    """Run whole benchmarks on new data sets; return the figures by choice and reference."""
    world = World(procedure.setting)
    truth, best_in_truth = true_procedure(world, procedure, tie, draws)
    measured: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    for run in range(runs):
        outcome = run_procedure(world, procedure, np.random.default_rng(run), tie)
        groups = [str(group) for group in outcome.groups]
        singles = outcome.right[:SINGLES]
        references = (singles[singles.mean((1, 2)).argmax()], singles[best_in_truth])
        for choice in CHOICES:
            fusion = chosen(outcome, slice(SINGLES, None), choice)
            for name, single in zip(REFERENCES, references, strict=True):
                gains = fusion - single
                (mean, low, high), p = crossed(gains, 1 / FOLDS, groups=groups)
                figures = (low <= truth <= high, (high - low) / 2, mean - truth, p < 1 - LEVEL)
                measured.setdefault((choice, name), []).append(figures)
    return {key: Figures(*np.mean(x, 0).tolist(), truth) for key, x in measured.items()}


COLUMNS = ("samples", "width", "first_apart", "second_apart", "group", "refit", "fusions")
MEASURED = ("interval", "single", "data_sets", "coverage", "half_width", "bias")
TIES = ("ties_called_different", "tie_gain")


def gain_rows(runs: int) -> Iterator[list[object]]:
    """Yield the rows of the gain of one fusion over one modality."""
    for setting in SETTINGS:
        gains, ties = simulate(setting, runs), simulate(setting, runs, tie=True)
        for name in METHODS:
            coverage, half = gains[name]
            row = [*setting, 1, "no", 1, name, "the only one", runs]
            row += [f"{coverage:.3f}", f"{half:.4f}", "", f"{1 - ties[name][0]:.3f}", "0"]
            yield row


def procedure_rows(procedures: Sequence[Procedure] = PROCEDURES) -> Iterator[list[object]]:
    """Yield the rows of whole benchmarks."""
    for procedure in procedures:
        runs = procedure.data_sets
        gains = simulate_procedure(procedure, runs)
        ties = simulate_procedure(procedure, runs, tie=True)
        labels = [*procedure.setting, procedure.group, "yes" if procedure.refit else "no", FUSIONS]
        for (choice, single), figures in gains.items():
            tie = ties[choice, single]
            row = [*labels, f"ours, chosen {choice}", single, runs, f"{figures.coverage:.3f}"]
            row += [f"{figures.half_width:.4f}", f"{figures.bias:+.4f}"]
            row += [f"{tie.called_different:.3f}", f"{tie.true_gain:.4f}"]
            yield row


def group_rows(runs: int) -> Iterator[list[object]]:
    """Yield the rows of two equal models on groups of which one is large."""
    for largest in LARGEST:
        covered, half = simulate_groups(largest, runs)
        row = [largest + 4 * OTHERS, "", "", "", f"{largest}; {OTHERS} of 4", "no", 1, "ours"]
        row += ["the only one", runs, f"{covered:.3f}", f"{half:.4f}", "", f"{1 - covered:.3f}", 0]
        yield row


def main() -> None:
    """Measure all settings and procedures, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=2000, help="data sets of each setting")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "coverage.csv")
    parser.add_argument("--random", type=int, default=0, help="data sets, over random splits")
    args = parser.parse_args()
    if args.random:
        for setting in (SETTINGS[0], SETTINGS[2]):
            for splits in RANDOM_SPLITS:
                for tie in (False, True):
                    covered = simulate_random(setting, args.random, splits, tie)
                    print(*setting, splits, "tie" if tie else "gain", covered, flush=True)
        return
    rows = []
    for row in chain(gain_rows(args.runs), procedure_rows(), group_rows(args.runs)):
        rows.append(row)
        print(*row, sep=", ", flush=True)
    with args.out.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*COLUMNS, *MEASURED, *TIES])
        writer.writerows(rows)


if __name__ == "__main__":
    main()
