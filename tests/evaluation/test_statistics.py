"""Intervals cover, tests keep their level, and other people's libraries agree."""

from __future__ import annotations

import math
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scikit_posthocs
from scipy import stats
from statsmodels.stats.contingency_tables import mcnemar as reference_mcnemar
from statsmodels.stats.multitest import multipletests

from fusionzoo.evaluation.statistics import (
    auroc_interval,
    by_group,
    compare,
    crossed,
    holm,
    mcnemar,
    rank,
    seed_interval,
    share_interval,
)

Record = Callable[[str, object], None]  # pytest's record_property
DRAW = np.random.default_rng(0)


@pytest.fixture(scope="module")
def coverage() -> dict[str, Any]:
    """The functions of the simulations whose results are in results/coverage.csv."""
    return runpy.run_path(str(Path(__file__).parents[2] / "perf/coverage.py"))


def test_one_seed_leaves_the_paired_t_test_and_equal_models_tie() -> None:
    a, b = DRAW.random((1, 60)), DRAW.random((1, 60))
    reference = stats.ttest_rel(a[0], b[0])
    found = compare(a, b)
    assert found.p == pytest.approx(reference.pvalue)
    low, high = reference.confidence_interval(0.95)
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))
    same = (DRAW.random((3, 40)) < 0.7).astype(float)
    found = compare(same, same)
    assert (found.difference, found.low, found.high, found.p) == (0, 0, 0, 1)
    assert (found.permutation_p, found.mcnemar_p) == (1, 1)


def test_the_crossed_variance_is_that_of_the_analysis_of_variance_with_a_step() -> None:
    seeds = DRAW.standard_normal((4, 1))
    scores = 0.5 + seeds + DRAW.standard_normal((4, 50))
    interval, _ = crossed(scores)
    by_item, by_seed, mean = scores.mean(0), scores.mean(1), scores.mean()
    items = 4 * by_item.var(ddof=1)
    luck = 50 * by_seed.var(ddof=1)
    rest = ((scores - by_item - by_seed[:, None] + mean) ** 2).sum() / (3 * 49)
    variance = (items + luck - rest) / 200
    freedom = (items + luck - rest) ** 2 / (items**2 / 49 + luck**2 / 3)
    half = stats.t.ppf(0.975, freedom) * math.sqrt(variance)
    assert interval.high - interval.mean == pytest.approx(half)
    draw = np.random.default_rng(0)
    rest = draw.standard_normal((3, 300))
    rest -= rest.mean(0) + rest.mean(1)[:, None] - rest.mean()
    rest /= math.sqrt((rest**2).sum() / (2 * 299))  # MS_rest is 1
    items = draw.standard_normal(300)
    items *= math.sqrt(4.8 / 3) / items.std(ddof=1)  # MS_items is 4.8
    seeds = np.array([[-1.0], [0.0], [1.0]]) / math.sqrt(300)  # MS_seeds is 1
    below, above = (crossed(items + rest + seeds * (1 + change))[0] for change in (-1e-7, 1e-7))
    assert below.mean == pytest.approx(above.mean)
    widths = [interval.high - interval.low for interval in (below, above)]
    assert widths[1] / widths[0] == pytest.approx(1.027, abs=0.002)


def test_bootstrap_and_permutation_agree_with_scipys() -> None:
    a, b = DRAW.random((1, 80)), DRAW.random((1, 80)) - 0.08
    gain = (a - b)[0]
    found = compare(a, b, resamples=20_000)
    boot = stats.bootstrap((gain,), np.mean, method="percentile", n_resamples=20_000, rng=1)
    assert found.bootstrap_low == pytest.approx(boot.confidence_interval.low, abs=0.005)
    assert found.bootstrap_high == pytest.approx(boot.confidence_interval.high, abs=0.005)
    flips = stats.permutation_test(
        (gain,), np.mean, permutation_type="samples", n_resamples=20_000, rng=1
    )
    assert found.permutation_p == pytest.approx(flips.pvalue, abs=0.01)


def test_mcnemar_and_holm_agree_with_statsmodels() -> None:
    a, b = (DRAW.random((1, 50)) < 0.8).astype(float), (DRAW.random((1, 50)) < 0.6).astype(float)
    table = [[np.sum((a == i) & (b == j)) for j in (1, 0)] for i in (1, 0)]
    assert mcnemar(a, b) == pytest.approx(reference_mcnemar(table, exact=True).pvalue)
    assert math.isnan(mcnemar(a + 0.5, b))
    values = DRAW.random(20) ** 3
    assert holm(values.tolist()) == pytest.approx(multipletests(values, method="holm")[1].tolist())
    assert holm([]) == []


def test_ranks_agree_with_scikit_posthocs_and_one_block_has_no_difference() -> None:
    scores = DRAW.random((6, 5)) + np.array([0, 0, 0.3, 0.6, 0.9])
    found = rank(scores)
    p = scikit_posthocs.posthoc_nemenyi_friedman(scores).to_numpy()
    apart = np.abs(found.ranks[:, None] - found.ranks) > found.critical_difference
    assert (apart == (p < 0.05)).all()
    assert apart.any()
    assert found.p == pytest.approx(stats.friedmanchisquare(*scores.T).pvalue)
    found = rank(np.array([[0.3, 0.5, 0.5]]))
    assert found.ranks.tolist() == [3.0, 1.5, 1.5]
    assert math.isnan(found.critical_difference)


def test_one_seed_has_no_interval() -> None:
    assert math.isnan(seed_interval([0.5]).low)
    values = [0.1, 0.3, 0.2, 0.4, 0.2]
    low, high = stats.t.interval(0.95, 4, np.mean(values), stats.sem(values))
    found = seed_interval(values)
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))


def answers(
    accuracies: list[float], seeds: int, items: int, draw: np.random.Generator
) -> list[np.ndarray]:
    """Models that are right with given chances, on the same hard and easy items, with seeds that
    are lucky or not: a probit model whose mean over items and seeds is exact."""
    hard = 0.8 * draw.standard_normal(items)
    own = [0.5 * draw.standard_normal(items) for _ in accuracies]
    luck = [0.15 * draw.standard_normal((seeds, 1)) for _ in accuracies]
    total = math.sqrt(1 + 0.8**2 + 0.5**2 + 0.15**2)
    return [
        (stats.norm.ppf(a) * total + hard + o + u + draw.standard_normal((seeds, items)) > 0) * 1.0
        for a, o, u in zip(accuracies, own, luck, strict=True)
    ]


@pytest.mark.nightly
def test_intervals_cover_the_truth_as_often_as_they_say(record_property: Record) -> None:
    draw, covered, runs = np.random.default_rng(7), 0, 500
    for _ in range(runs):
        a, b = answers([0.84, 0.80], seeds=5, items=184, draw=draw)
        found = compare(a, b, resamples=10)
        covered += found.low <= 0.04 <= found.high
    record_property("coverage", covered / runs)
    assert 0.93 <= covered / runs <= 0.97


@pytest.mark.nightly
def test_corrected_tests_keep_the_family_wise_error(record_property: Record) -> None:
    draw, wrong, runs = np.random.default_rng(8), 0, 500
    for _ in range(runs):
        first, *rest = answers([0.8] * 6, seeds=5, items=184, draw=draw)
        wrong += min(holm([compare(one, first, resamples=10).p for one in rest])) < 0.05
    record_property("family_wise_error", wrong / runs)
    assert wrong / runs < 0.06


@pytest.mark.nightly
def test_a_planted_difference_is_found_and_a_planted_tie_called_one() -> None:
    draw, found, runs = np.random.default_rng(9), 0, 100
    for _ in range(runs):
        a, b = answers([0.88, 0.72], seeds=5, items=184, draw=draw)
        found += compare(a, b, resamples=10).p < 0.05
    assert found / runs > 0.95


def test_groups_are_the_items_keep_the_mean_and_copies_add_no_certainty() -> None:
    scores = np.random.default_rng(0).normal(size=(3, 12))
    groups = [*"aabbbbccdefg"]
    grouped = by_group(scores, groups)
    assert grouped.shape == (3, 7)
    assert grouped.mean() == pytest.approx(scores.mean())
    assert by_group(scores, [str(k) for k in range(12)]) is scores
    gain = np.random.default_rng(1).normal(0.2, 1, (1, 40))
    once, _ = crossed(gain)
    copies = np.repeat(gain, 5, axis=1)
    grouped, _ = crossed(copies, groups=[str(k // 5) for k in range(200)])
    naive, _ = crossed(copies)
    assert grouped == pytest.approx(once)
    assert naive.high - naive.low < 0.6 * (once.high - once.low)


def test_the_interval_of_auroc_is_delongs_and_copies_in_a_group_add_no_certainty() -> None:
    draw = np.random.default_rng(0)
    truth, scores = np.arange(40) % 3 == 0, draw.normal(size=40).round(1)
    names = np.arange(40).astype(str)
    order = scores[truth][:, None] - scores[~truth]
    beats = (order > 0) + 0.5 * (order == 0)  # (positive, negative)
    found = auroc_interval(scores, truth, names)
    assert found.mean == pytest.approx(beats.mean())
    variance = beats.mean(1).var() / truth.sum() + beats.mean(0).var() / (~truth).sum()
    slope = found.mean * (1 - found.mean)  # of the log-odds
    half = stats.t.ppf(0.975, 39) * math.sqrt(variance * 40 / 39) / slope
    odds = math.log(found.mean / (1 - found.mean))
    assert found[1:] == pytest.approx([1 / (1 + math.exp(-x)) for x in (odds - half, odds + half)])
    twice = np.arange(40).repeat(2)
    copies = auroc_interval(scores[twice], truth[twice], names[twice])
    assert copies == pytest.approx(found)
    assert auroc_interval(scores, truth, names, np.full(40, 3.0)) == pytest.approx(found)
    perfect = auroc_interval(truth * 1.0, truth, names)
    assert perfect == (1, *share_interval(1, int(truth.sum())))


@pytest.mark.nightly
@pytest.mark.parametrize(("size", "least"), [(1, 0.89), (4, 0.85)])
@pytest.mark.parametrize(
    ("items", "share", "shift"), [(50, 0.5, 1.0), (100, 0.2, 2.0), (400, 0.1, 1.5), (400, 0.1, 2.5)]
)
def test_the_interval_of_auroc_covers_the_truth(
    items: int, share: float, shift: float, size: int, least: float, record_property: Record
) -> None:
    draw, covered, runs = np.random.default_rng(1), 0, 0
    group = np.arange(items) // size
    area = stats.norm.cdf(shift / math.sqrt(2))
    while runs < 1000:
        truth = (draw.random(group[-1] + 1) < share)[group]
        common = draw.normal(size=group[-1] + 1)[group] if size > 1 else draw.normal(size=items)
        scores = math.sqrt(0.5) * (draw.normal(size=items) + common) + shift * truth
        if 2 <= truth.sum() <= items - 2:
            found = auroc_interval(scores, truth, group.astype(str))
            covered, runs = covered + int(found.low <= area <= found.high), runs + 1
    record_property("coverage", covered / runs)
    assert least <= covered / runs <= 0.98


def test_a_group_of_half_the_samples_widens_the_interval_and_no_freedom_is_below_one() -> None:
    draw = np.random.default_rng(0)
    sizes = np.array([40, *[4] * 10])
    groups = np.repeat(np.arange(11), sizes).astype(str)
    scores = draw.normal(size=(1, 80))
    left_out = [scores[:, groups != str(k)].mean() for k in range(11)]
    error = math.sqrt(10 / 11 * ((left_out - np.mean(left_out)) ** 2).sum())
    # 80 ** 2 / (40 ** 2 + 10 * 4 ** 2) is 3.6, so 4 groups of equal size: 3 degrees of freedom.
    interval, _ = crossed(scores, groups=groups)
    assert interval.high - interval.mean == pytest.approx(stats.t.ppf(0.975, 3) * error)
    whole = np.append(scores[:, 40:].reshape(10, 4).mean(1), scores[0, :40].mean())[None]
    by_weight, _ = crossed(whole, weights=np.array([*[4.0] * 10, 40.0]))
    assert by_weight == pytest.approx(interval)  # one sample that counts as much is no other case
    assert crossed(scores, groups=["a"] * 80)[0][1:] == (-math.inf, math.inf)
    opposite = np.array([[1.0], [-1.0]]) * draw.normal(size=20)
    residual = ((opposite - opposite.mean(1)[:, None]) ** 2).sum() / 19
    luck = np.array([[1.0], [-1.0]]) * math.sqrt((residual + 1e-6) / 40) - opposite.mean(1)[:, None]
    interval, _ = crossed(opposite + luck)
    error = math.sqrt(1e-6 / 40)
    assert interval.high == pytest.approx(stats.t.ppf(0.975, 1) * error, rel=1e-3)


@pytest.mark.nightly
@pytest.mark.parametrize("largest", [4, 40, 100, 200])
def test_intervals_over_groups_of_which_one_is_large_cover_the_truth(
    largest: int, coverage: dict[str, Any], record_property: Record
) -> None:
    covered, _ = coverage["simulate_groups"](largest, 1000)
    record_property("coverage", covered)
    assert covered >= 0.94


@pytest.mark.nightly
@pytest.mark.parametrize("number", [0, 2])
def test_intervals_over_folds_cover_the_truth_and_are_not_too_wide(
    number: int, coverage: dict[str, Any], record_property: Record
) -> None:
    setting, simulate = coverage["SETTINGS"][number], coverage["simulate"]
    covered, width = simulate(setting, 500)["ours"]
    record_property("coverage", covered)
    assert 0.93 <= covered <= 0.98  # in 2,000 data sets 0.95 to 0.98: it rather is too wide
    assert simulate(setting, 500, tie=True)["ours"][0] > 0.94
    assert width < 0.8 * simulate(setting, 20)["Nadeau and Bengio"][1]


@pytest.mark.nightly
def test_intervals_over_random_splits_cover_the_truth(
    coverage: dict[str, Any], record_property: Record
) -> None:
    simulate_random, setting = coverage["simulate_random"], coverage["SETTINGS"][0]
    for tie in (False, True):
        covered = simulate_random(setting, 200, (10, 0.2), tie)["ours"]
        record_property("coverage of a tie" if tie else "coverage", covered)
        assert 0.92 <= covered <= 0.995


@pytest.mark.slow
def test_a_whole_benchmark_covers_its_true_gain_and_seldom_calls_a_tie_a_difference(
    coverage: dict[str, Any],
) -> None:
    simulate = coverage["simulate_procedure"]
    procedure = coverage["PROCEDURES"][1]  # groups of three samples
    assert procedure.group == 3 and coverage["FUSIONS"] == 30
    figures = simulate(procedure, 200, draws=200)
    in_folds, over_all = (figures[x, "best single in truth"] for x in coverage["CHOICES"])
    assert 0.92 <= in_folds.coverage <= 0.995
    assert in_folds.bias < over_all.bias  # the choice over all folds is made on test samples, too
    assert figures["in each fold", "best single on the test split"].bias < 0.005
    ties = simulate(procedure, 200, tie=True, draws=200)
    assert ties["in each fold", "best single on the test split"].called_different <= 0.08
