"""Redundancy, uniqueness and synergy of modalities, over folds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import isnan
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fusionzoo.errors import FusionZooError

Table = NDArray[np.float64]
ROUNDS = 300  # of the search for q
CHANGE = 1e-8  # of every entry of q: the search ends
TINY = 1e-300
FeatureArray = NDArray[np.float64]
Codes = NDArray[np.int64]
CLUSTERS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 50)  # tried; the literature uses up to 50
MOST_ROWS = 20_000  # that clusters are fitted to
DRAWS = 5  # of as many rows without synergy, which show what chance adds
RANDOM_GROUPS = 5  # of a data set with its own split
LITTLE = 0.05  # bits of information that are hardly any
MORE = 0.1  # share by which a probe knows more than a source's parts, from which on they lost it
FEWEST = 20  # samples of a fold that have both sources
Sources = tuple[tuple[str, ...], tuple[str, ...]]  # modalities of the first and the second
Estimate = tuple[NDArray[np.float64], NDArray[np.float64], tuple[int, ...], int]
SYNERGY = 0.2  # share of the information from which on synergy decides
DOMINANT = 0.8  # share of the information from which on a single part decides


class InformationParts(NamedTuple):
    """Information about the target in bits."""

    redundancy: float  # in either source
    unique_1: float  # in the first source only
    unique_2: float  # in the second source only
    synergy: float  # in the combination only

    @property
    def total(self) -> float:
        """The information of both sources together."""
        return sum(self)


def decompose(table: Table, rounds: int = ROUNDS) -> InformationParts:
    """Split I(X1 X2; Y) into redundancy, unique parts and synergy: p (A, B, C) -> bits.

    With q* of the least I_q(X1 X2; Y) among the q that share p's marginals (x1, y) and (x2, y):
    R = I(X1; Y) + I(X2; Y) - I_q*, U_i = I(X_i; Y) - R, S = I_p(X1 X2; Y) - I_q* (Bertschinger et
    al. 2014, Entropy; Liang et al. 2023, NeurIPS, arXiv:2302.12247). q* is found by multiplicative
    steps q <- q q(y | x1, x2)^(-1/2), each followed by Sinkhorn's scaling to both marginals.

    >>> gate = np.zeros((2, 2, 2))
    >>> for a in (0, 1):
    ...     for b in (0, 1):
    ...         gate[a, b, a & b] = 0.25
    >>> [abs(round(part, 4)) for part in decompose(gate)]
    [0.3113, 0.0, 0.0, 0.5]
    """
    p = table / table.sum()
    return split(p, least_informative(p.sum(1), p.sum(0), rounds))


def split(p: Table, q: Table) -> InformationParts:
    """Split the information of p (A, B, C), given the q of `least_informative` (A, B, C)."""
    joint, least = (information(table.reshape(-1, table.shape[2])) for table in (p, q))
    alone_1, alone_2 = information(p.sum(1)), information(p.sum(0))
    redundancy = alone_1 + alone_2 - least
    return InformationParts(redundancy, alone_1 - redundancy, alone_2 - redundancy, joint - least)


def least_informative(first: Table, second: Table, rounds: int = ROUNDS) -> Table:
    """Return q* with the marginals (A, C) and (B, C): (A, B, C)."""
    classes = first.sum(0)
    # Independent given the class: it has both marginals.
    q = first[:, None] * second[None] / np.maximum(classes, TINY)
    for _ in range(rounds):
        given_both = q / np.maximum(q.sum(2, keepdims=True), TINY)
        before, q = q, sinkhorn(q / np.sqrt(np.maximum(given_both, TINY)), first, second, 20)
        if np.abs(q - before).max() < CHANGE:
            break
    return sinkhorn(q, first, second, 1000)


def sinkhorn(q: Table, first: Table, second: Table, rounds: int) -> Table:
    """Scale q (A, B, C) to both marginals."""
    for _ in range(rounds):
        q = q * (first / np.maximum(q.sum(1), TINY))[:, None]
        columns = q.sum(0)
        q = q * (second / np.maximum(columns, TINY))[None]
        if np.abs(columns - second).max() < 1e-10:
            break
    return q


def information(table: Table) -> float:
    """Return I(X; Y) in bits: (A, C), entries of sum 1.

    >>> information(np.array([[0.5, 0.0], [0.0, 0.5]]))
    1.0
    """
    independent = table.sum(1, keepdims=True) * table.sum(0, keepdims=True)
    positive = table > 0
    return float((table[positive] * np.log2(table[positive] / independent[positive])).sum())


class Coder:
    """K-means on standardised features of the training rows."""

    def __init__(self, train: FeatureArray, clusters: int, seed: int) -> None:
        from sklearn.cluster import KMeans

        self.centre = train.mean(0)
        std = train.std(0)
        self.scale = np.where(std > 0, std, 1.0)
        distinct = len(np.unique(train[:MOST_ROWS], axis=0))
        self.means = KMeans(min(clusters, distinct), n_init=4, random_state=seed)
        self.means.fit(self._standardise(train[:MOST_ROWS]))

    def _standardise(self, features: FeatureArray) -> FeatureArray:
        return (features - self.centre) / self.scale

    def __call__(self, features: FeatureArray) -> Codes:
        """Return the cluster of each row: (N, D) -> (N,)."""
        return np.asarray(self.means.predict(self._standardise(features)), dtype=np.int64)


def count_table(first: Codes, second: Codes, target: Codes, classes: int) -> NDArray[np.float64]:
    """Return the share of the samples with each pair of codes and class."""
    table = np.zeros((int(first.max()) + 1, int(second.max()) + 1, classes))
    np.add.at(table, (first, second, target), 1.0)
    return table / len(target)


def choose_clusters(
    sources: Sequence[FeatureArray], target: Codes, classes: int, seed: int
) -> tuple[int, list[Coder]]:
    """Choose how many clusters tell most about the class on training rows left out.

    At least as many as there are classes, if an eighth of the rows is no less: fewer cannot tell
    the classes apart. The fewest whose held-out log loss, of the class given both codes, is within
    one standard error of the least. Returns the number and the coder of each source.
    """
    order = np.random.default_rng(seed).permutation(len(target))
    third = len(order) // 3
    left_out, used = order[:third], order[third:]
    best: tuple[float, float] | None = None
    tried: list[tuple[int, list[Coder], NDArray[np.float64]]] = []
    most = max(2, len(used) // 8)
    fewest = min(classes, most)
    for clusters in sorted({fewest, *(k for k in CLUSTERS if fewest < k <= most)}):
        coders = [Coder(source[used], clusters, seed) for source in sources]
        codes = [coder(source) for coder, source in zip(coders, sources, strict=True)]
        losses = _log_losses(codes, target, classes, used, left_out)
        tried.append((clusters, coders, losses))
        if best is None or losses.mean() < best[0]:
            best = float(losses.mean()), float(losses.std() / np.sqrt(len(losses)))
    assert best is not None
    most_loss = sum(best)
    return next((number, coders) for number, coders, losses in tried if losses.mean() <= most_loss)


def _log_losses(
    codes: Sequence[Codes], target: Codes, classes: int, used: Codes, left_out: Codes
) -> NDArray[np.float64]:
    """Return each left-out row's log loss under the smoothed table of the used rows."""
    first, second = codes
    counts = np.zeros((int(first.max()) + 1, int(second.max()) + 1, classes))
    np.add.at(counts, (first[used], second[used], target[used]), 1.0)
    prior = counts.sum((0, 1)) + 1
    smoothed = counts + prior / prior.sum()  # one further sample in each cell, spread as the prior
    probability = smoothed / smoothed.sum(2, keepdims=True)
    rows = first[left_out], second[left_out], target[left_out]
    return np.asarray(-np.log(probability[rows]))


@dataclass(frozen=True, kw_only=True)
class FoldFeatures:
    """Features and classes of one fold: to fit clusters on, and to count on."""

    features: Mapping[str, NDArray[np.float64]]  # modality -> (N, D)
    present: Mapping[str, NDArray[np.bool_]]  # modality -> (N,)
    target: NDArray[np.int64]  # (N,); -1 without a label
    train: NDArray[np.int64]  # rows
    test: NDArray[np.int64]  # rows


class ProbeLimits(NamedTuple):
    """What probes, read out of fold, allow the parts to be, in bits."""

    entropy: float  # H(Y)
    left_1: float  # at least H(Y | X1): what the first source leaves open
    left_2: float

    def lost(self, parts: InformationParts) -> int | None:
        """Return the number, 0 or 1, of a source of which a probe knows clearly more than its parts
        tell."""
        for number, left in enumerate((self.left_1, self.left_2)):
            by_probe, by_parts = self.entropy - left, parts.redundancy + parts[1 + number]
            if by_probe - by_parts > max(LITTLE, MORE * by_probe):
                return number
        return None

    def clip(self, parts: InformationParts) -> InformationParts:
        """Clip parts: U2 + S = I(X2; Y | X1) <= H(Y | X1), so neither is above it; U1 likewise; and
        R = I(X1; Y) - U1 >= H(Y) - H(Y | X1) - H(Y | X2)."""
        return InformationParts(
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
    parts: InformationParts  # mean over the folds
    low: InformationParts  # 95 % interval of the mean; NaN for a single fold
    high: InformationParts
    clusters: tuple[int, ...]  # by fold
    limits: ProbeLimits | None = None  # what probes allow; None: not asked, or too few rows
    notes: tuple[str, ...] = ()  # where clusters and probes disagree
    rows: int  # held-out samples that have both sources, over all folds

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        values = {"first": self.first, "second": self.second, **self.parts._asdict()}
        values["total"] = self.parts.total
        for key, bound in (("low", self.low), ("high", self.high)):
            values |= {f"{key}_{name}": value for name, value in bound._asdict().items()}
        limits = None if self.limits is None else self.limits._asdict()
        return {**values, "clusters": self.clusters, "limits": limits, "rows": self.rows}


@dataclass(frozen=True, kw_only=True)
class PidInputs:
    """What all pairs share."""

    folds: Sequence[FoldFeatures]
    classes: int
    clusters: int | None  # None: chosen on training rows left out
    seed: int
    fixed: bool  # whether all folds have the same features, which no label has shaped


def pid(setup: PidInputs) -> list[Pair]:
    """Decompose each pair of modalities, and with more than two each against all others.

    Features are clustered by K-means, and the information is counted in the table of clusters and
    classes. What chance adds to a table of so many rows is subtracted (`debiased`), so parts may be
    a little below 0. Where labels have shaped the features, clusters are fitted to a fold's
    training rows and its test rows are counted: the mean over folds, with the interval of that
    mean. Otherwise all rows are counted, and the interval is a jackknife over folds.
    """
    return [_pair(setup, *sources) for sources in pairs_of(list(setup.folds[0].features))]


def pairs_of(names: Sequence[str]) -> list[Sources]:
    """Return all pairs of modalities, and with more than two each against all others."""
    pairs: list[Sources] = [((first,), (second,)) for first, second in combinations(names, 2)]
    if len(names) > 2:
        pairs += [((name,), tuple(other for other in names if other != name)) for name in names]
    return pairs


def _pair(setup: PidInputs, first: tuple[str, ...], second: tuple[str, ...]) -> Pair:
    estimate = _count_all if setup.fixed else _count_tests
    parts, error, clusters, rows = estimate(setup, first, second)
    groups = len(_groups(setup)) if setup.fixed else len(setup.folds)
    margin = np.full(4, np.nan)
    if groups > 1:
        from scipy.special import stdtrit

        margin = stdtrit(groups - 1, 0.975) * error
    return Pair(
        first="+".join(first),
        second="+".join(second),
        parts=InformationParts(*parts.tolist()),
        low=InformationParts(*(parts - margin).tolist()),
        high=InformationParts(*(parts + margin).tolist()),
        clusters=clusters,
        rows=rows,
    )


def _count_tests(setup: PidInputs, first: tuple[str, ...], second: tuple[str, ...]) -> Estimate:
    """Count the test rows of each fold: mean and its standard error, clusters, rows."""
    parts, clusters, rows = [], [], 0
    for fold in setup.folds:
        names = (*first, *second)
        train, test = (usable_rows(fold, part, names) for part in (fold.train, fold.test))
        sources = [joined(fold, names) for names in (first, second)]
        number, coders = _coders(setup, [source[train] for source in sources], fold.target[train])
        codes = [coder(source[test]) for coder, source in zip(coders, sources, strict=True)]
        parts.append(debiased(codes, fold.target[test], setup.classes, setup.seed))
        clusters.append(number)
        rows += len(test)
    by_fold = np.array(parts)  # (F, 4)
    std = by_fold.std(0, ddof=1) if len(by_fold) > 1 else np.full(4, np.nan)
    return by_fold.mean(0), std / np.sqrt(len(by_fold)), tuple(clusters), rows


def _count_all(setup: PidInputs, first: tuple[str, ...], second: tuple[str, ...]) -> Estimate:
    """Count all rows, and again without each fold's: estimate, jackknife error, clusters, rows."""
    fold = setup.folds[0]
    names = (*first, *second)
    rows = usable_rows(fold, np.arange(len(fold.target)), names)
    sources = [joined(fold, modalities)[rows] for modalities in (first, second)]
    target = fold.target[rows]
    number, coders = _coders(setup, sources, target)
    codes = [coder(source) for coder, source in zip(coders, sources, strict=True)]
    estimate = np.array(debiased(codes, target, setup.classes, setup.seed))
    parts = []
    for group in _groups(setup):
        others = ~np.isin(rows, group)
        first_codes, second_codes = (of_source[others] for of_source in codes)
        table = count_table(first_codes, second_codes, target[others], setup.classes)
        parts.append(decompose(table))  # what chance shows is the same for all: no spread
    left_out = np.array(parts)  # (G, 4)
    groups = len(left_out)
    variance = (groups - 1) / groups * np.square(left_out - left_out.mean(0)).sum(0)
    return estimate, np.sqrt(variance), (number,), len(rows)


def _groups(setup: PidInputs) -> list[NDArray[np.int64]]:
    """Return the rows that the jackknife leaves out in turn: the folds' tests, or random fifths."""
    if len(setup.folds) > 1:
        return [fold.test for fold in setup.folds]
    count = len(setup.folds[0].target)
    return np.array_split(np.random.default_rng(setup.seed).permutation(count), RANDOM_GROUPS)


def _coders(
    setup: PidInputs, sources: Sequence[FeatureArray], target: NDArray[np.int64]
) -> tuple[int, list[Coder]]:
    if setup.clusters is None:
        return choose_clusters(sources, target, setup.classes, setup.seed)
    return setup.clusters, [Coder(source, setup.clusters, setup.seed) for source in sources]


def usable_rows(
    fold: FoldFeatures, rows: NDArray[np.int64], names: Sequence[str]
) -> NDArray[np.int64]:
    """Return the rows that have a label and all these modalities."""
    usable: NDArray[np.int64] = rows[is_usable(fold, rows, names)]
    if len(usable) < FEWEST:
        raise FusionZooError(
            f"{len(usable)} samples of a fold have {', '.join(names)} and a label; pid needs"
            f" {FEWEST}: fewer --folds, or more complete samples"
        )
    return usable


def is_usable(
    fold: FoldFeatures, rows: NDArray[np.int64], names: Sequence[str]
) -> NDArray[np.bool_]:
    """Return which rows have a label and all these modalities."""
    usable = (fold.target >= 0) & np.all([fold.present[name] for name in names], axis=0)
    return np.asarray(usable[rows])


def joined(fold: FoldFeatures, names: Sequence[str]) -> FeatureArray:
    """Return the features of some modalities side by side; each has the same weight."""
    if len(names) == 1:
        return fold.features[names[0]]
    scaled = []
    for name in names:
        values = fold.features[name]
        scaled.append(values / (np.sqrt(values.shape[1]) * max(float(values.std()), 1e-12)))
    return np.concatenate(scaled, axis=1)


def debiased(
    codes: Sequence[NDArray[np.int64]], target: NDArray[np.int64], classes: int, seed: int
) -> InformationParts:
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
    return InformationParts(*(parts - (np.mean(drawn, axis=0) - expected)).tolist())


def advise_fusion(pairs: Sequence[Pair]) -> str:
    """Return what the decompositions mean for the choice of a fusion."""
    whole = [pair for pair in pairs if "+" in pair.second] or list(pairs)
    pair = max(whole, key=lambda pair: pair.parts.synergy)
    total, parts = pair.parts.total, pair.parts
    for other in whole:
        number = None if other.limits is None else other.limits.lost(other.parts)
        if other.limits is not None and number is not None:
            by_parts = other.parts.redundancy + other.parts[1 + number]
            by_probe = other.limits.entropy - other.limits[1 + number]
            return (
                f"No advice: the parts of {(other.first, other.second)[number]} tell {by_parts:.2f}"
                f" bits, and a probe of it {by_probe:.2f}; compare with more --clusters."
            )
    between = f"{pair.first} and {pair.second}"
    if total < LITTLE:
        return (
            f"{between} tell {total:.2f} bits about the target: check labels, features or the"
            " number of clusters before choosing a fusion."
        )
    least_synergy = pair.low.synergy
    certain = isnan(least_synergy) or least_synergy > 0
    if parts.synergy >= max(LITTLE, SYNERGY * total) and certain:
        return (
            f"{parts.synergy / total:.0%} of the information is in the combination of {between}:"
            " take a fusion that multiplies or attends (gmu, lmf, concat, an attention fusion);"
            " late fusions and sums of unimodal terms cannot express it."
        )
    alone = max(whole, key=lambda pair: pair.parts.unique_1)
    if alone.parts.unique_1 >= DOMINANT * alone.parts.total:
        return _alone(alone.parts.unique_1 / alone.parts.total, alone.first)
    if len(whole) == 1 and parts.unique_2 >= DOMINANT * total:
        return _alone(parts.unique_2 / total, pair.second)
    if parts.redundancy >= 0.5 * total:
        return (
            f"{parts.redundancy / total:.0%} of the information of {between} is in each of them:"
            " few parameters suffice (mean, attn_pool, late_mean)."
        )
    return (
        "Each modality tells a part that the other lacks, and little is in the combination: late"
        " fusions and sums suffice (late_mean, mean, concat); compare with gmu."
    )


def _alone(share: float, name: str) -> str:
    return (
        f"{share:.0%} of the information is in {name} alone: compare any fusion with that modality"
        " by itself."
    )
