"""`pid` on gates whose parts are known, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import fusionzoo as fz
from fusionzoo.cli import main
from fusionzoo.datasets import create_dataset
from fusionzoo.errors import FusionZooError
from fusionzoo.evaluation.pid import (
    FoldFeatures,
    InformationParts,
    Pair,
    PidInputs,
    advise_fusion,
    debiased,
    decompose,
    information,
    least_informative,
    pid,
)
from helpers.gates import GATES, planted, table_of


@pytest.mark.parametrize("name", GATES)
def test_the_parts_of_a_gate_are_the_known_ones(name: str) -> None:
    np.testing.assert_allclose(decompose(table_of(name)), GATES[name][1], atol=5e-5)


def test_parts_add_up_keep_marginals_and_swap_with_the_sources() -> None:
    table = np.random.default_rng(0).dirichlet(np.ones(18)).reshape(2, 3, 3)
    parts = decompose(table)
    joint = information(table.reshape(-1, 3))
    single = [information(table.sum(axis)) for axis in (1, 0)]
    assert sum(parts) == pytest.approx(joint, abs=1e-9)
    assert parts.redundancy - parts.synergy == pytest.approx(sum(single) - joint, abs=1e-9)
    assert min(parts) > -1e-6
    swapped = decompose(table.transpose(1, 0, 2))
    np.testing.assert_allclose(swapped, (parts[0], parts[2], parts[1], parts[3]), atol=1e-5)
    q = least_informative(table.sum(1), table.sum(0), 300)
    np.testing.assert_allclose(q.sum(1), table.sum(1), atol=1e-9)
    np.testing.assert_allclose(q.sum(0), table.sum(0), atol=1e-9)
    assert information(q.reshape(-1, 3)) < joint


@pytest.mark.parametrize("name", GATES)
def test_planted_gates_are_measured_within_two_hundredths_of_a_bit(name: str) -> None:
    (pair,) = pid(planted(name))
    np.testing.assert_allclose(pair.parts, GATES[name][1], atol=0.02)
    assert pair.rows == 4000
    for low, high in zip(pair.low, pair.high, strict=True):
        assert high - low < 0.05


def test_features_that_labels_shaped_are_counted_on_the_rows_left_out() -> None:
    (pair,) = pid(planted("xor", 400, fixed=False))
    assert pair.clusters == (2,) * 5
    assert pair.rows == 400
    np.testing.assert_allclose(pair.parts, GATES["xor"][1], atol=0.1)


def test_shuffled_labels_tell_nothing_however_many_clusters() -> None:
    setup = planted("xor", 800)
    fold = setup.folds[0]
    shuffled = np.random.default_rng(1).permutation(fold.target)
    folds = [FoldFeatures(**{**vars(one), "target": shuffled}) for one in setup.folds[:1]]
    (pair,) = pid(PidInputs(folds=folds, classes=2, clusters=12, seed=0, fixed=True))
    assert max(map(abs, pair.parts)) < 0.05


def test_ten_classes_and_few_rows_leave_the_synergy_where_it_is() -> None:
    classes, hits = 10, (0.7, 0.75)  # each source is a noisy copy of the class
    copies = [np.full((classes, classes), (1 - hit) / (classes - 1)) for hit in hits]
    for copy, hit in zip(copies, hits, strict=True):
        np.fill_diagonal(copy, hit)
    table = np.einsum("ya,yb->aby", *copies) / classes
    cells = np.random.default_rng(0).choice(table.size, size=(8, 360), p=table.ravel())
    draws = [np.unravel_index(rows, table.shape) for rows in cells]
    parts = np.mean([debiased(x[:2], x[2], classes, seed=0) for x in draws], axis=0)
    assert parts[3] == pytest.approx(decompose(table).synergy, abs=0.12)


def test_too_few_samples_are_one_clear_error() -> None:
    setup = planted("and", 40, fixed=False)
    with pytest.raises(FusionZooError, match="8 samples of a fold have a, b and a label"):
        pid(setup)


def pair_of(*parts: float) -> Pair:
    nan = InformationParts(*[float("nan")] * 4)
    known = {"first": "a", "second": "b", "low": nan, "high": nan, "clusters": (2,), "rows": 9}
    return Pair(parts=InformationParts(*parts), **known)


def test_the_advice_follows_the_largest_part() -> None:
    for parts, words in (
        ((0, 0, 0, 1), "multiplies or attends"),
        ((1, 0, 0, 0), "in each of them"),
        ((0, 1, 0, 0), "in a alone"),
        ((0, 0, 1, 0), "in b alone"),
        ((0, 1, 1, 0), "late fusions and sums suffice"),
        ((0.01, 0, 0, 0), "check labels"),
    ):
        assert words in advise_fusion([pair_of(*parts)])


def test_the_command_prints_and_stores_the_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "needs.json"
    words = ["analyse", "interactions", "--data.task", "xor", "--data.samples", "300"]
    assert main([*words, "--clusters", "2", "--jobs", "1", "--json", str(path)]) == 0
    assert "multiplies or attends" in capsys.readouterr().out
    (pair,) = json.loads(path.read_text())["pid"]
    assert pair["synergy"] > 0.9
    assert pair["low_synergy"] <= pair["synergy"] <= pair["high_synergy"]
    assert main(["analyse"]) == 2
    assert "--data is missing" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "largest"),
    [
        ("redundant", ["redundancy"]),
        ("unique", ["unique_1"]),
        ("xor", ["synergy"]),
        ("and", ["synergy", "redundancy"]),
        ("copy", ["unique_1", "unique_2"]),
    ],
)
def test_the_tasks_of_interactions_rank_as_planted(task: str, largest: list[str]) -> None:
    data = create_dataset("interactions", task=task, samples=1000)
    (pair,) = fz.analyse(data, jobs=1).pairs
    named = pair.parts._asdict()
    order = sorted(named, key=named.__getitem__, reverse=True)
    assert set(order[: len(largest)]) == set(largest)
    if task == "and":
        assert order[0] == "synergy"
    others = [named[name] for name in order[len(largest) :]]
    assert min(named[name] for name in largest) > max(others) + 0.2


@pytest.mark.nightly
def test_synergy_of_three_shows_against_all_others_only() -> None:
    data = create_dataset("interactions", task="xor", num_modalities=3, samples=2000)
    pairs = fz.analyse(data, jobs=1).pairs
    assert len(pairs) == 6
    for pair in pairs:
        wanted = 1.0 if "+" in pair.second else 0.0
        assert pair.parts.synergy == pytest.approx(wanted, abs=0.05)
    assert torch.tensor([pair.parts.total for pair in pairs]).isfinite().all()
