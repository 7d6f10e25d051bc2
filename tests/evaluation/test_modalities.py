"""Shapley values and interactions follow their axioms; expected scores their definition."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from fusionzoo.evaluation.shapley import expected, interactions, shapley, subsets

NAMES = ("a", "b", "c", "d")
DRAW = np.random.default_rng(0)
SCORES = {some: float(DRAW.random()) for some in subsets(NAMES)}


def test_values_are_means_over_all_orders_and_sum_to_the_gain() -> None:
    gain = SCORES[frozenset(NAMES)] - SCORES[frozenset()]
    assert sum(shapley(SCORES, NAMES).values()) == pytest.approx(gain)
    gains = []
    for order in permutations(NAMES):
        before = frozenset(order[: order.index("c")])
        gains.append(SCORES[before | {"c"}] - SCORES[before])
    assert shapley(SCORES, NAMES)["c"] == pytest.approx(np.mean(gains))
    scores = {some: SCORES[some - {"d"}] for some in subsets(NAMES)}
    assert shapley(scores, NAMES)["d"] == pytest.approx(0)
    assert all(
        v == pytest.approx(0) for pair, v in interactions(scores, NAMES).items() if "d" in pair
    )


def test_interactions_of_sums_products_and_copies_and_expected_scores() -> None:
    sums = {some: 0.1 * len(some) for some in subsets("ab")}
    both = {some: float(len(some) == 2) for some in subsets("ab")}
    copy = {some: float(len(some) > 0) for some in subsets("ab")}
    assert interactions(sums, "ab")["a", "b"] == pytest.approx(0)
    assert interactions(both, "ab")["a", "b"] == 1
    assert interactions(copy, "ab")["a", "b"] == -1
    rates = {"a": 0.3, "b": 0.6, "c": 0.0, "d": 0.5}
    drawn = [
        SCORES[frozenset(n for n in NAMES if DRAW.random() >= rates[n])] for _ in range(40_000)
    ]
    assert expected(SCORES, rates) == pytest.approx(np.mean(drawn), abs=0.01)
