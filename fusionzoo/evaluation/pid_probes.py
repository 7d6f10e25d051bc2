"""The modes of `pid` that need no clusters: `batch` and `sample`, from probes of the features."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import ceil, log, sqrt
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from .pid import (
    FEWEST,
    MOST_ROWS,
    Codes,
    FeatureArray,
    FoldFeatures,
    InformationParts,
    Pair,
    PidInputs,
    ProbeLimits,
    Sources,
    information,
    is_usable,
    joined,
    make_pair,
    pairs_of,
    pid,
    usable_rows,
)

Probabilities = NDArray[np.float64]
Predict = Callable[[FeatureArray], Probabilities]  # (N, D) -> (N, C)
FLOOR = 1e-6  # share of the class frequencies in every prediction, so that no logarithm is infinite
HIDDEN, BATCH = 32, 200
EPOCHS, FEWEST_STEPS = 40, 640  # of the network: as many epochs as both need
COUPLING_BATCH, EMBEDDING, COUPLING_HIDDEN = 256, 10, 64
RATE, COUPLING_EPOCHS, COUPLING_FEWEST_STEPS = 1e-3, 10, 200
ROUNDS, TOLERANCE = 500, 0.01  # of Sinkhorn's scaling while it learns, in p(y | x)
LAST_ROUNDS, LAST_TOLERANCE = 5000, 1e-7  # of the scaling that is measured
Values = NDArray[np.float64]
COMPONENTS = 5  # of the Gaussian mixture
WIDEST = 16  # principal components of which a density is estimated
ROWS_PER_COMPONENT = 50  # training rows for each of them, at least
DIRECTION = np.array([1.0, -1.0, -1.0, 1.0])  # of the shift of (r, u_1, u_2, s)
CLEARLY = 0.005  # bits by which a part was clipped, from which on it is said


class Probe:
    """Estimate p(y | x), by logistic regression or a small network.

    A third of the training rows chooses: the network, which sees interactions of features, where
    its log loss there is lower by more than one standard error. The same third gives the
    temperature T: predictions become p(y) (p(y | x) / p(y))^(1/T), normalised, so that a probe
    that has learnt nothing returns the class frequencies p(y). The chosen model is then fitted to
    all training rows.

    Trees (HistGradientBoosting) were tried and left out: on an exclusive or of two bits in rotated
    features of width 32 they see 0.06 of 1 bit from 3,200 rows, the network 0.99.
    """

    def __init__(self, train: FeatureArray, target: Codes, classes: int, seed: int) -> None:
        order = np.random.default_rng(seed).permutation(len(target))[:MOST_ROWS]
        train, target = train[order], target[order]
        self.frequencies = (np.bincount(target, minlength=classes) + 1.0) / (len(target) + classes)
        third = len(target) // 3
        used, left_out = slice(third, None), slice(third)
        tried = []
        for network in (False, True):
            predict = self._fit(train[used], target[used], seed, network=network)
            logits = np.log(predict(train[left_out]) / self.frequencies)
            temperature = self._temperature(logits, target[left_out])
            tried.append((self._losses(logits, target[left_out], temperature), temperature))
        gains = tried[0][0] - tried[1][0]
        self.network = bool(gains.mean() > gains.std() / np.sqrt(len(gains)))
        self.temperature = tried[self.network][1]
        self.predict = self._fit(train, target, seed, network=self.network)

    def __call__(self, x: FeatureArray) -> Probabilities:
        """Return the probability of each class: (N, D) -> (N, C), all above 0."""
        return self._tempered(np.log(self.predict(x) / self.frequencies), self.temperature)

    def _fit(self, train: FeatureArray, target: Codes, seed: int, *, network: bool) -> Predict:
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.linear_model import LogisticRegression
        from sklearn.neural_network import MLPClassifier
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        names = np.unique(target)
        if len(names) < 2:  # nothing to learn
            return lambda x: np.tile(self.frequencies, (len(x), 1))
        batch = min(BATCH, len(target))
        settings = {"alpha": 0.3, "learning_rate_init": 3e-3, "batch_size": batch}
        epochs = max(EPOCHS, ceil(FEWEST_STEPS / ceil(len(target) / batch)))
        model = make_pipeline(
            StandardScaler(),
            MLPClassifier((HIDDEN,), max_iter=epochs, random_state=seed, **settings)
            if network
            else LogisticRegression(max_iter=500),
        )
        with warnings.catch_warnings():  # both stop where their rounds end
            warnings.simplefilter("ignore", ConvergenceWarning)
            model.fit(train, target)

        def predict(x: FeatureArray) -> Probabilities:
            raw = np.zeros((len(x), len(self.frequencies)))
            raw[:, names] = model.predict_proba(x)
            return (1 - FLOOR) * raw + FLOOR * self.frequencies

        return predict

    def _temperature(self, logits: NDArray[np.float64], target: Codes) -> float:
        """Return the temperature of the least log loss: logits (N, C), classes (N,)."""
        from scipy.optimize import minimize_scalar

        def loss(log_temperature: float) -> float:
            return float(self._losses(logits, target, float(np.exp(log_temperature))).mean())

        return float(np.exp(minimize_scalar(loss, bounds=(-2.0, 5.0), method="bounded").x))

    def _losses(
        self, logits: NDArray[np.float64], target: Codes, temperature: float
    ) -> NDArray[np.float64]:
        probabilities = self._tempered(logits, temperature)
        return np.asarray(-np.log(probabilities[np.arange(len(target)), target]))

    def _tempered(self, logits: NDArray[np.float64], temperature: float) -> Probabilities:
        raw = self.frequencies * np.exp(logits / temperature)
        return np.asarray(raw / raw.sum(1, keepdims=True))


class Coupling(nn.Module):
    """Give each pair of a batch a weight for each class.

    A_y(i, j) = exp(g_1(x_1i)_y g_2(x_2j)_y / sqrt H), with networks g_m of one hidden layer, whose
    outputs are standardised over their H entries.
    """

    def __init__(self, widths: Sequence[int], classes: int) -> None:
        super().__init__()
        self.classes = classes
        self.networks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, COUPLING_HIDDEN),
                nn.ReLU(),
                nn.Linear(COUPLING_HIDDEN, classes * EMBEDDING),
            )
            for width in widths
        )

    def forward(self, sources: Sequence[Tensor]) -> Tensor:
        """Return A: (B, D_1), (B, D_2) -> (C, B, B)."""
        first, second = (
            layer_norm(g(x).unflatten(1, (self.classes, EMBEDDING)), (EMBEDDING,)).transpose(0, 1)
            for g, x in zip(self.networks, sources, strict=True)
        )
        return (first @ second.mT / sqrt(EMBEDDING)).exp()


def scale(a: Tensor, first: Tensor, second: Tensor, rounds: int, tolerance: float) -> Tensor:
    """Scale A (C, B, B) to the marginals (C, B) of both sources, class by class, by Sinkhorn.

    Ends where no p(y, x) misses its target by more than `tolerance` / B.
    """
    column = torch.ones_like(second)[..., None]
    row = first[..., None] / (a @ column)
    for _ in range(rounds):
        column = second[..., None] / (a.mT @ row)
        sums = a @ column
        error = (row * sums)[..., 0] - first
        row = first[..., None] / sums
        if error.detach().abs().max() * first.shape[1] < tolerance:
            break
    return a * row * (second[..., None] / (a.mT @ row)).mT


def coupled_information(q: Tensor) -> Tensor:
    """Return I_q(X1 X2; Y) in bits: (C, B, B) -> ()."""
    shares = q.sum((1, 2), keepdim=True)
    return (q * (q / (q.sum(0) * shares)).log()).sum() / log(2)


def marginals(probabilities: Sequence[Probabilities]) -> tuple[Probabilities, ...]:
    """Return p(x, y) of a batch for p(y | x_1), p(y | x_2), p(y | x_12), each (B, C).

    The shares of the classes are those of the last, so that a coupling exists.
    """
    joint = probabilities[2] / len(probabilities[2])
    shares = joint.sum(0)
    return (*(p * (shares / p.sum(0)) for p in probabilities[:2]), joint)


def decompose_batches(
    sources: Sequence[FeatureArray], probabilities: Sequence[Probabilities], seed: int
) -> InformationParts:
    """Return the mean parts of batches of up to 256 rows: two (N, D), three (N, C) -> bits.

    The networks g learn for 10 epochs, at least 200 steps, to lower I_q of the batches, whose q has
    the marginals p(y | x_1) and p(y | x_2) of the probes. R = I_1 + I_2 - I_q, U_m = I_m - R and
    S = I_12 - I_q, of the probes' probabilities in the batch (Liang et al. 2023, NeurIPS,
    arXiv:2302.12247). Memory: C x 256 x 256 numbers.
    """
    order = np.random.default_rng(seed).permutation(len(sources[0]))
    batches = np.array_split(order, ceil(len(order) / COUPLING_BATCH))
    scaled = [torch.from_numpy((x - x.mean(0)) / np.maximum(x.std(0), 1e-12)) for x in sources]
    tables = [marginals([p[rows] for p in probabilities]) for rows in batches]
    coupling = _learn(scaled, batches, tables, seed)
    parts = []
    with torch.no_grad():
        for rows, (first, second, joint) in zip(batches, tables, strict=True):
            q = _couple(coupling, scaled, rows, first, second, LAST_ROUNDS, LAST_TOLERANCE)
            least, alone_1, alone_2 = (
                float(coupled_information(q)),
                information(first),
                information(second),
            )
            redundancy = alone_1 + alone_2 - least
            both = information(joint)
            parts.append((redundancy, alone_1 - redundancy, alone_2 - redundancy, both - least))
    return InformationParts(*np.mean(parts, axis=0).tolist())


def _learn(
    sources: Sequence[Tensor],
    batches: Sequence[NDArray[np.int64]],
    tables: Sequence[tuple[Probabilities, ...]],
    seed: int,
) -> Coupling:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        coupling = Coupling([x.shape[1] for x in sources], tables[0][0].shape[1]).double()
    optimizer = torch.optim.Adam(coupling.parameters(), lr=RATE)
    for _ in range(max(COUPLING_EPOCHS, ceil(COUPLING_FEWEST_STEPS / len(batches)))):
        for rows, (first, second, _joint) in zip(batches, tables, strict=True):
            q = _couple(coupling, sources, rows, first, second, ROUNDS, TOLERANCE)
            optimizer.zero_grad()
            coupled_information(q).backward()
            optimizer.step()
    return coupling


def _couple(
    coupling: Coupling,
    sources: Sequence[Tensor],
    rows: NDArray[np.int64],
    first: Probabilities,
    second: Probabilities,
    rounds: int,
    tolerance: float,
) -> Tensor:
    a = coupling([x[torch.from_numpy(rows)] for x in sources])
    return scale(a, torch.from_numpy(first).mT, torch.from_numpy(second).mT, rounds, tolerance)


def split_samples(information: Values, surprise: Values) -> Values:
    """Split each sample's information: (N, 3) of x_1, x_2 and both, (N, 2) -> (N, 4).

    i_m = log2 p(y | x_m) / p(y) and h_m = -log2 p(x_m), of the sample's class and features.
    r = min(h_1, h_2) - min(h_1 - i_1, h_2 - i_2), u_m = i_m - r, s = i_12 - i_1 - i_2 + r, so that
    r + u_1 + u_2 + s = i_12 (Yang, Wang, Hu 2025, ICML, arXiv:2506.17248). Not shifted: `shift`.

    >>> split_samples(np.array([[1.0, 0.0, 1.0]]), np.array([[1.0, 1.0]]))
    array([[ 1.,  0., -1.,  1.]])
    """
    single, joint = information[:, :2], information[:, 2]
    r = surprise.min(1) - (surprise - single).min(1)
    return np.stack([r, single[:, 0] - r, single[:, 1] - r, joint - single.sum(1) + r], axis=1)


def shift(values: Values) -> Values:
    """Move all samples alike until no mean is negative, if one number can: (N, 4) -> (N, 4).

    (r + t, u_1 - t, u_2 - t, s + t), with t = -min(mean r, mean s) where that is above 0, else the
    least mean of u_1 and u_2 where that is below 0. Sums stay. A mean may remain negative where
    both would need another t.
    """
    r, u_1, u_2, s = values.mean(0)
    t = 0.0
    if min(r, s) < 0:
        t = -min(r, s)
    elif min(u_1, u_2) < 0:
        t = min(u_1, u_2)
    return np.asarray(values + t * DIRECTION)


class Density:
    """A Gaussian mixture over the first principal components of features, whitened."""

    def __init__(self, train: FeatureArray, seed: int) -> None:
        from sklearn.decomposition import PCA
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        self.train, self.seed, self.rank = train[:MOST_ROWS], seed, 0
        if not np.ptp(self.train, axis=0).any():  # constant: no density
            return
        most = min(WIDEST, max(1, len(self.train) // ROWS_PER_COMPONENT), train.shape[1])
        pca = PCA(most, whiten=True, random_state=seed)
        self.whiten = make_pipeline(StandardScaler(), pca).fit(self.train)
        # Standardised columns have variance 1, or 0 where they are constant.
        self.rank = int((pca.explained_variance_ > 1e-9).sum())

    def fit(self, width: int) -> None:
        """Fit the mixture to so many components, at most `rank`."""
        from sklearn.mixture import GaussianMixture

        self.width = width
        if width:
            count = min(COMPONENTS, len(self.train))
            self.mixture = GaussianMixture(count, reg_covar=1e-3, random_state=self.seed)
            self.mixture.fit(self.whiten.transform(self.train)[:, :width])

    def surprise(self, x: FeatureArray) -> Values:
        """Return -log2 p(x) of each row: (N, D) -> (N,)."""
        if not self.width:
            return np.zeros(len(x))
        log_density = self.mixture.score_samples(self.whiten.transform(x)[:, : self.width])
        return np.asarray(-log_density / np.log(2))


def surprises(train: Sequence[FeatureArray], test: Sequence[FeatureArray], seed: int) -> Values:
    """Return -log2 p(x_m) of the test rows, both sources in as many dimensions: (N, 2).

    A density's unit is that of its features: were x_1 scaled to 0, r would tend to i_1, and were it
    scaled to infinity, to i_2. So both are whitened, to the same number of components.
    """
    densities = [Density(x, seed) for x in train]
    width = min(density.rank for density in densities)
    for density in densities:
        density.fit(width)
    return np.stack([d.surprise(x) for d, x in zip(densities, test, strict=True)], axis=1)


def decompose_data(
    setup: PidInputs, mode: str, ids: Sequence[str], *, may_take_minutes: bool = True
) -> list[Pair]:
    """Decompose each pair of modalities by a mode (`cvx`: clusters), within what probes allow.

    Probes of each source, read out of fold, bound what the other can add (`ProbeLimits`): parts and
    intervals are clipped to that, and `notes` say so. Where a probe knows more than the chosen
    clusters (`clusters` None) tell of its source, the pair is decomposed by the mode `batch`
    instead, if that may take minutes. The mode `sample` is not clipped: its table is the mean of
    its samples.
    """
    if mode == "sample":
        return pid_by_probes(setup, mode, ids)
    decompositions = pid(setup) if mode == "cvx" else pid_by_probes(setup, mode, ids)
    pairs = []
    for sources, pair in zip(pairs_of(list(setup.folds[0].features)), decompositions, strict=True):
        limits = limits_of(setup, *sources)
        if limits is not None and mode == "cvx" and setup.clusters is None:
            pair = _without_clusters(
                setup, ids, sources, pair, limits, may_take_minutes=may_take_minutes
            )
        pairs.append(pair if limits is None else _clipped(pair, limits))
    return pairs


def _without_clusters(
    setup: PidInputs,
    ids: Sequence[str],
    sources: Sources,
    pair: Pair,
    limits: ProbeLimits,
    *,
    may_take_minutes: bool,
) -> Pair:
    """Decompose a pair by the mode `batch` if clusters tell less of a source than a probe."""
    number = limits.lost(pair.parts)
    if number is None:
        return pair
    explained, known = (
        pair.parts.redundancy + pair.parts[1 + number],
        limits.entropy - limits[1 + number],
    )
    name = (pair.first, pair.second)[number]
    said = f"Clusters tell {explained:.2f} bits of {name}, a probe {known:.2f}"
    names = (*sources[0], *sources[1])
    counts = [
        is_usable(fold, part, names).sum()
        for fold in setup.folds
        for part in (fold.train, fold.test)
    ]
    if min(counts) < FEWEST:
        note = f"{said}; a fold has too few rows for --pid_mode batch."
        return replace(pair, notes=(note,))
    if not may_take_minutes:
        note = f"{said}: `fusionzoo analyse` decomposes them by probes instead, in minutes."
        return replace(pair, notes=(note,))
    by_probes = _pair(setup, "batch", ids, *sources)
    note = f"{said}: {pair.first} and {pair.second} are decomposed by probes (--pid_mode batch)."
    return replace(by_probes, notes=(note,))


def _clipped(pair: Pair, limits: ProbeLimits) -> Pair:
    """Clip parts and intervals, and note what a part was before."""
    clipped = limits.clip(pair.parts)
    names = (f"only {pair.first}", f"only {pair.second}")
    others = ((pair.second, limits.left_2), (pair.first, limits.left_1))
    changes = zip(names, others, pair.parts[1:3], clipped[1:3], strict=True)
    notes = [
        f"{name} is at most {left:.3f} bits, all that {other} alone leaves open (a probe on rows"
        f" left out); it was {before:.3f} before that limit."
        for name, (other, left), before, after in changes
        if before - after > CLEARLY
    ]
    return replace(
        pair,
        parts=clipped,
        low=limits.clip(pair.low),
        high=limits.clip(pair.high),
        limits=limits,
        notes=(*pair.notes, *notes),
    )


def limits_of(
    setup: PidInputs, first: tuple[str, ...], second: tuple[str, ...]
) -> ProbeLimits | None:
    """Return what probes of both sources allow; None with fewer than `FEWEST` held-out rows.

    H(Y | X) is at most a probe's cross-entropy on rows that it was not fitted to, and by Fano's
    inequality at most h(e) + e log2(C - 1), e the share of its errors there.
    """
    names = (*first, *second)
    targets: list[NDArray[np.int64]] = []
    chosen: tuple[list[Probabilities], list[Probabilities]] = ([], [])
    for fold in setup.folds:
        train, test = (part[is_usable(fold, part, names)] for part in (fold.train, fold.test))
        if len(train) < FEWEST or not len(test):
            continue
        targets.append(fold.target[test])
        for answers, source in zip(chosen, (first, second), strict=True):
            x = joined(fold, source)
            answers.append(Probe(x[train], fold.target[train], setup.classes, setup.seed)(x[test]))
    target = np.concatenate([np.zeros(0, np.int64), *targets])
    if len(target) < FEWEST:
        return None
    shares = np.bincount(target) / len(target)
    return ProbeLimits(_entropy(shares), *(_left(np.concatenate(p), target) for p in chosen))


def _left(probabilities: Probabilities, target: NDArray[np.int64]) -> float:
    """Return the most that H(Y | X) may be: (N, C), (N,) -> bits."""
    crossed = -np.log2(probabilities[np.arange(len(target)), target]).mean()
    wrong = float((probabilities.argmax(1) != target).mean())
    others = max(1, probabilities.shape[1] - 1)
    return min(float(crossed), _entropy(np.array([wrong, 1 - wrong])) + wrong * np.log2(others))


def _entropy(shares: NDArray[np.float64]) -> float:
    """Return the entropy of shares in bits."""
    positive = shares[shares > 0]
    return float(-(positive * np.log2(positive)).sum()) + 0.0


class FoldEstimate(NamedTuple):
    """The parts of one fold's test rows."""

    values: NDArray[np.float64]  # (N, 4) of each row; (1, 4) of all in mode `batch`
    rows: NDArray[np.int64]  # (N,)


def pid_by_probes(setup: PidInputs, mode: str, ids: Sequence[str]) -> list[Pair]:
    """Decompose as `pid` does, by the mode `batch` or `sample`; ids of all rows (N,).

    Probes of p(y | x_1), p(y | x_2) and p(y | x_1, x_2) learn on a fold's training rows and are
    read on its test rows, of those that have both sources: the mean over folds, with the interval
    of that mean. Samples have values of their own in mode `sample`, whose mean is the table.

    Pitfalls. `batch`: what the joint probe knows and the unimodal ones miss becomes synergy, and
    what it misses is lost; probes are calibrated on rows left out. The search for q is not convex.
    `sample`: a density depends on the features' unit, so they are whitened, and on their width, so
    only as many principal components as both sources have count (at most 16). Parts of a single
    sample may be negative, and one of means may be after the shift. Authors' programs print nats
    or bits: here all is in bits.
    """
    names = list(setup.folds[0].features)
    return [_pair(setup, mode, ids, first, second) for first, second in pairs_of(names)]


def _pair(
    setup: PidInputs, mode: str, ids: Sequence[str], first: tuple[str, ...], second: tuple[str, ...]
) -> Pair:
    estimates = [_fold(setup, mode, fold, first, second) for fold in setup.folds]
    values = np.concatenate([fold.values for fold in estimates])
    rows = np.concatenate([fold.rows for fold in estimates])
    shifted = shift(values) if mode == "sample" else values
    by_fold = np.array(
        [(shift(fold.values) if mode == "sample" else fold.values).mean(0) for fold in estimates]
    )
    spread = by_fold.std(0, ddof=1) if len(by_fold) > 1 else np.full(4, np.nan)
    by_sample: Mapping[str, InformationParts] | None = None
    if mode == "sample":
        by_sample = {
            ids[row]: InformationParts(*parts)
            for row, parts in zip(rows.tolist(), shifted.tolist(), strict=True)
        }
    return make_pair(
        (first, second),
        shifted.mean(0),
        spread / np.sqrt(len(by_fold)),
        groups=len(by_fold),
        rows=len(rows),
        by_sample=by_sample,
    )


def _fold(
    setup: PidInputs, mode: str, fold: FoldFeatures, first: tuple[str, ...], second: tuple[str, ...]
) -> FoldEstimate:
    train, test = (usable_rows(fold, part, (*first, *second)) for part in (fold.train, fold.test))
    sources = [joined(fold, names) for names in (first, second)]
    both = np.concatenate(sources, axis=1)
    target = fold.target[test]
    probes = [
        Probe(x[train], fold.target[train], setup.classes, setup.seed) for x in (*sources, both)
    ]
    probabilities = [probe(x[test]) for probe, x in zip(probes, (*sources, both), strict=True)]
    if mode == "batch":
        parts = decompose_batches([x[test] for x in sources], probabilities, setup.seed)
        return FoldEstimate(np.array([parts]), test)
    information = information_of(probabilities, target, probes[0].frequencies)
    surprise = surprises([x[train] for x in sources], [x[test] for x in sources], setup.seed)
    return FoldEstimate(split_samples(information, surprise), test)


def information_of(
    probabilities: Sequence[Probabilities], target: NDArray[np.int64], frequencies: FeatureArray
) -> NDArray[np.float64]:
    """Return log2 p(y | x) / p(y) of each row's class: three (N, C), (N,), (C,) -> (N, 3)."""
    chosen = [p[np.arange(len(target)), target] for p in probabilities]
    return np.asarray(np.log2(np.stack(chosen, axis=1) / frequencies[target][:, None]))
