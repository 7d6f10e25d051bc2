"""The figures of odd benchmarks: each is drawn, without a warning, and has no undefined place."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from xml.etree import ElementTree

import pytest

from fusionzoo.benchmark.report.leaderboard import leaderboard
from fusionzoo.benchmark.report.page import sections
from fusionzoo.benchmark.report.results import Summary
from fusionzoo.evaluation.metrics import COMPARED_BY
from helpers.planted import candidate, damaged, summary

pytestmark = pytest.mark.drawn

ALL = {"intervals", "missing", "corruptions", "calibration", "pareto"}
SCORES = {"gmu": 0.8, "sum": 0.7, "max": 0.75, "alone:image": 0.6, "alone:audio": 0.5}


def usual(modalities: tuple[str, ...] = ("image", "audio")) -> Summary:
    """Three fusions and two modalities alone, of two seeds, tested in every way that is drawn."""
    candidates = []
    for number, (name, score) in enumerate(SCORES.items()):
        results = candidate(name, [score, score + 0.02], shift=number)
        damaged(results, score, modalities)
        candidates.append(results)
    return summary(candidates)


def regression() -> Summary:
    """Errors, of which less is better: no classes, and scores below zero."""
    whole = usual()
    for results in whole.candidates:
        for row in results.rows:
            row["score"] *= -10.0
        results.scores *= -10.0
    whole = replace(whole, bench=replace(whole.bench, metric=COMPARED_BY["regression"]))
    whole.leaderboard = leaderboard(whole)
    for line in whole.leaderboard:
        line.pop("ece")
    return whole


def undefined(*names: str) -> Summary:
    """Candidates whose score is no number, such as a correlation of constant answers."""
    whole = usual()
    for results in whole.candidates:
        if results.name in (names or SCORES):
            results.scores[:] = math.nan
            for row in results.rows:
                row["score"] = math.nan
    whole.leaderboard = leaderboard(whole)
    return whole


def one_candidate() -> Summary:
    """One fusion, trained once, with nothing to compare it with."""
    results = candidate("gmu", [0.8])
    damaged(results, 0.8)
    return summary([results])


def all_equal() -> Summary:
    """Candidates that all give the same answers, at the same cost."""
    candidates = [candidate(name, [0.7, 0.7]) for name in ("gmu", "sum", "max", "alone:image")]
    for results in candidates:
        damaged(results, 0.7)
    return summary(candidates)


def six_modalities() -> Summary:
    """Six modalities: 64 subsets, and two rows of panels for each."""
    names = tuple("abcdef")
    whole = usual(names)
    return replace(whole, bench=replace(whole.bench, modalities=dict.fromkeys(names, "vector")))


@pytest.mark.parametrize(
    ("benchmark", "drawn"),
    [
        (usual, ALL),
        (regression, ALL - {"calibration"}),
        (partial(undefined, "gmu"), ALL),
        (undefined, ALL - {"missing"}),
        (one_candidate, ALL),
        (all_equal, ALL),
        (six_modalities, ALL),
    ],
)
def test_every_figure_of_an_odd_benchmark_is_drawn(
    benchmark: Callable[[], Summary], drawn: set[str]
) -> None:
    whole = benchmark()
    figures = {
        name: section["svg"]
        for name, section in sections(whole, whole.bench.metric.name).items()
        if "svg" in section
    }
    assert figures.keys() == drawn
    for name, svg in figures.items():
        root = ElementTree.fromstring(svg)
        assert float(root.attrib["viewBox"].split()[2]) == pytest.approx(316.8, abs=1e-3), name
        assert len([*root.iter("path")]) > 2, name
        assert len([*root.iter("text")]) > 4, name
        assert not re.search(r"\b(nan|inf)\b", svg), name
        ids = {element.attrib["id"] for element in root.iter() if "id" in element.attrib}
        uses = {element.attrib["href"][1:] for element in root.iter("use")}
        assert uses <= ids, name
        assert len({x.rpartition("-")[0] for x in ids}) <= 1, name  # the figure's name
        assert not re.search(r"#[0-9a-f]{6}\b|font", svg), name  # those of the page


def test_a_long_name_at_an_axis_is_broken_and_a_dollar_sign_is_no_formula() -> None:
    results = candidate("late_confidence + $x_multimodal_balance$", [0.8, 0.9])
    svg = sections(summary([results, candidate("gmu", [0.5, 0.6])]), "accuracy")["intervals"]["svg"]
    words = [text.text for text in ElementTree.fromstring(svg).iter("text")]
    assert "late_confidence + $x_" in words and "multimodal_balance$" in words
