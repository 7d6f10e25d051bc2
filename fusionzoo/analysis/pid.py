"""Redundancy, uniqueness and synergy of the modalities of a data set, over folds.

Shapes: `N` samples, `D` width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fusionzoo.errors import FusionZooError

from .codes import Coder, Features, choose_clusters, count_table
from .decompose import Parts, decompose, least_informative, split

DRAWS = 5  # of as many rows without synergy, which show what chance adds
RANDOM_GROUPS = 5  # of a data set with its own split
LITTLE = 0.05  # bits of information that are hardly any
MORE = 0.1  # share by which a probe knows more than a source's parts, from which on they lost it
FEWEST = 20  # samples of a fold that have both sources


@dataclass(frozen=True, kw_only=True)
class Fold:
    """Features and classes of one fold: to fit clusters on, and to count on."""

    features: Mapping[str, NDArray[np.float64]]  # modality -> (N, D)
    present: Mapping[str, NDArray[np.bool_]]  # modality -> (N,)
    target: NDArray[np.int64]  # (N,); -1 without a label
    train: NDArray[np.int64]  # rows
    test: NDArray[np.int64]  # rows


class Limits(NamedTuple):
    """What probes, read out of fold, allow the parts to be, in bits."""

    entropy: float  # H(Y)
    left_1: float  # at least H(Y | X1): what the first source leaves open
    left_2: float

    def lost(self, parts: Parts) -> int | None:
        """Return the number, 0 or 1, of a source of which a probe knows clearly more than its parts
        tell."""
        for number, left in enumerate((self.left_1, self.left_2)):
            known, told = self.entropy - left, parts.redundancy + parts[1 + number]
            if known - told > max(LITTLE, MORE * known):
                return number
        return None

    def clip(self, parts: Parts) -> Parts:
        """Clip parts: U2 + S = I(X2; Y | X1) <= H(Y | X1), so neither is above it; U1 likewise; and
        R = I(X1; Y) - U1 >= H(Y) - H(Y | X1) - H(Y | X2)."""
        return Parts(
            max(parts.redundancy, self.entropy - self.left_1 - self.left_2),
            min(parts.unique_1, self.left_2),
            min(parts.unique_2, self.left_1),
            min(parts.synergy, self.left_1, self.left_2),
        )


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The decomposition of two sources over the folds, in bits."""

    first: str
    second: str  # a modality, or all others joined by "+"
    parts: Parts  # mean over the folds
    low: Parts  # 95 % interval of the mean; NaN for a single fold
    high: Parts
    clusters: tuple[int, ...]  # by fold; () in the modes `batch` and `sample`
    limits: Limits | None = None  # what probes allow; None: not asked, or too few rows
    notes: tuple[str, ...] = ()  # where clusters and probes disagree
    rows: int  # held-out samples that have both sources, over all folds
    by_sample: Mapping[str, Parts] | None = (
        None  # mode `sample`: id -> parts; their mean is `parts`
    )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        named = {
            f"{key}_{name}": value
            for key in ("low", "high")
            for name, value in (getattr(self, key)._asdict().items())
        }
        shared = {"first": self.first, "second": self.second, **self.parts._asdict()}
        return {
            **shared,
            "total": self.parts.total,
            **named,
            "clusters": self.clusters,
            "limits": None if self.limits is None else self.limits._asdict(),
            "rows": self.rows,
        }


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What all pairs share."""

    folds: Sequence[Fold]
    classes: int
    clusters: int | None  # None: chosen on training rows left out
    seed: int
    fixed: bool  # whether all folds have the same features, which no label has shaped


Sources = tuple[tuple[str, ...], tuple[str, ...]]  # modalities of the first and the second
Estimate = tuple[NDArray[np.float64], NDArray[np.float64], tuple[int, ...], int]


def pid(setup: Setup) -> list[Pair]:
    """Decompose each pair of modalities, and with more than two each against all others.

    Features are clustered by K-means, and the information is counted in the table of clusters and
    classes. What chance adds to a table of so many rows is subtracted (`debiased`), so parts may be
    a little below 0. Where labels have shaped the features, clusters are fitted to a fold's
    training rows and its test rows are counted: the mean over folds, with the interval of that
    mean. Otherwise all rows are counted, and the interval is a jackknife over folds.
    """
    return [
        _pair(setup, first, second) for first, second in pairs_of(list(setup.folds[0].features))
    ]


def pairs_of(names: Sequence[str]) -> list[Sources]:
    """Return all pairs of modalities, and with more than two each against all others."""
    pairs: list[Sources] = [((a,), (b,)) for a, b in combinations(names, 2)]
    if len(names) > 2:
        pairs += [((a,), tuple(b for b in names if b != a)) for a in names]
    return pairs


def _pair(setup: Setup, first: tuple[str, ...], second: tuple[str, ...]) -> Pair:
    estimate = _count_all if setup.fixed else _count_tests
    parts, error, clusters, rows = estimate(setup, first, second)
    groups = len(_groups(setup)) if setup.fixed else len(setup.folds)
    return make_pair((first, second), parts, error, groups=groups, rows=rows, clusters=clusters)


def make_pair(
    sources: Sources,
    parts: NDArray[np.float64],
    error: NDArray[np.float64],
    *,
    groups: int,
    rows: int,
    clusters: tuple[int, ...] = (),
    by_sample: Mapping[str, Parts] | None = None,
) -> Pair:
    """Return the result with the 95 % interval of `error`, the standard error over `groups`."""
    margin = np.full(4, np.nan)
    if groups > 1:
        from scipy.stats import t

        margin = t.ppf(0.975, groups - 1) * error
    first, second = sources
    return Pair(
        first="+".join(first),
        second="+".join(second),
        parts=Parts(*parts.tolist()),
        low=Parts(*(parts - margin).tolist()),
        high=Parts(*(parts + margin).tolist()),
        clusters=clusters,
        rows=rows,
        by_sample=by_sample,
    )


def _count_tests(setup: Setup, first: tuple[str, ...], second: tuple[str, ...]) -> Estimate:
    """Count the test rows of each fold: mean and its standard error, clusters, rows."""
    parts, clusters, rows = [], [], 0
    for fold in setup.folds:
        train, test = (
            usable_rows(fold, part, (*first, *second)) for part in (fold.train, fold.test)
        )
        sources = [joined(fold, names) for names in (first, second)]
        number, coders = _coders(setup, [x[train] for x in sources], fold.target[train])
        codes = [coder(x[test]) for coder, x in zip(coders, sources, strict=True)]
        parts.append(debiased(codes, fold.target[test], setup.classes, setup.seed))
        clusters.append(number)
        rows += len(test)
    values = np.array(parts)
    spread = values.std(0, ddof=1) if len(values) > 1 else np.full(4, np.nan)
    return values.mean(0), spread / np.sqrt(len(values)), tuple(clusters), rows


def _count_all(setup: Setup, first: tuple[str, ...], second: tuple[str, ...]) -> Estimate:
    """Count all rows, and again without each fold's: estimate, jackknife error, clusters, rows."""
    fold = setup.folds[0]
    names = (*first, *second)
    rows = usable_rows(fold, np.arange(len(fold.target)), names)
    sources = [joined(fold, chosen)[rows] for chosen in (first, second)]
    target = fold.target[rows]
    number, coders = _coders(setup, sources, target)
    codes = [coder(x) for coder, x in zip(coders, sources, strict=True)]
    whole = np.array(debiased(codes, target, setup.classes, setup.seed))
    parts = []
    for group in _groups(setup):
        others = ~np.isin(rows, group)
        first_codes, second_codes = (x[others] for x in codes)
        table = count_table(first_codes, second_codes, target[others], setup.classes)
        parts.append(decompose(table))  # what chance shows is the same for all: no spread
    values = np.array(parts)
    variance = (len(values) - 1) / len(values) * np.square(values - values.mean(0)).sum(0)
    return whole, np.sqrt(variance), (number,), len(rows)


def _groups(setup: Setup) -> list[NDArray[np.int64]]:
    """Return the rows that the jackknife leaves out in turn: the folds' tests, or random fifths."""
    if len(setup.folds) > 1:
        return [fold.test for fold in setup.folds]
    count = len(setup.folds[0].target)
    return np.array_split(np.random.default_rng(setup.seed).permutation(count), RANDOM_GROUPS)


def _coders(
    setup: Setup, sources: Sequence[Features], target: NDArray[np.int64]
) -> tuple[int, list[Coder]]:
    if setup.clusters is None:
        return choose_clusters(sources, target, setup.classes, setup.seed)
    return setup.clusters, [Coder(x, setup.clusters, setup.seed) for x in sources]


def usable_rows(fold: Fold, rows: NDArray[np.int64], names: Sequence[str]) -> NDArray[np.int64]:
    """Return the rows that have a label and all these modalities."""
    chosen: NDArray[np.int64] = rows[is_usable(fold, rows, names)]
    if len(chosen) < FEWEST:
        raise FusionZooError(
            f"{len(chosen)} samples of a fold have {', '.join(names)} and a label; pid needs"
            f" {FEWEST}: fewer --folds, or more complete samples"
        )
    return chosen


def is_usable(fold: Fold, rows: NDArray[np.int64], names: Sequence[str]) -> NDArray[np.bool_]:
    """Return which rows have a label and all these modalities."""
    usable = (fold.target >= 0) & np.all([fold.present[name] for name in names], axis=0)
    return np.asarray(usable[rows])


def joined(fold: Fold, names: Sequence[str]) -> Features:
    """Return the features of some modalities side by side; each has the same weight."""
    parts = [fold.features[name] for name in names]
    scaled = [x / (np.sqrt(x.shape[1]) * max(float(x.std()), 1e-12)) for x in parts]
    return np.concatenate(scaled, axis=1) if len(parts) > 1 else parts[0]


def debiased(
    codes: Sequence[NDArray[np.int64]], target: NDArray[np.int64], classes: int, seed: int
) -> Parts:
    """Return the parts minus what chance adds to them: two codes (N,), classes (N,).

    Chance is measured on as many rows drawn from the table that has the same marginals and no
    synergy. Shuffled labels would overdo it: where the sources tell the class, few cells of the
    table are occupied, and a shuffle fills many more. What stays: with many classes and few rows
    redundancy is too low, and unique parts are too high.
    """
    first, second = codes
    table = count_table(first, second, target, classes)
    least = least_informative(table.sum(1), table.sum(0))
    parts = np.array(split(table, least))
    expected = np.array(split(least, least))
    generator = np.random.default_rng(seed)
    draws = generator.multinomial(len(target), least.ravel() / least.sum(), size=DRAWS)
    drawn = [decompose(rows.reshape(table.shape)) for rows in draws]
    return Parts(*(parts - (np.mean(drawn, axis=0) - expected)).tolist())
