"""`pid` on gates whose parts are known, and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

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
    ProbeLimits,
    advise_fusion,
    debiased,
    decompose,
    information,
    least_informative,
    pid,
)
from fusionzoo.evaluation.pid_probes import Probe, decompose_data

GATES = {
    "and": (lambda a, b: (a, b, a & b), (0.3113, 0, 0, 0.5)),
    "xor": (lambda a, b: (a, b, a ^ b), (0, 0, 0, 1)),
    "copy": (lambda a, b: (a, a, a), (1, 0, 0, 0)),
    "unique": (lambda a, b: (a, b, a), (0, 1, 0, 0)),
}


def table_of(name: str) -> np.ndarray:
    table = np.zeros((2, 2, 2))
    for a in (0, 1):
        for b in (0, 1):
            table[GATES[name][0](a, b)] += 0.25
    return table


def planted(name: str, samples: int = 4000, *, fixed: bool = True) -> PidInputs:
    """Noisy vectors of the two bits of a gate, in five folds."""
    draw = np.random.default_rng(0)
    bits = np.tile([[0, 0, 1, 1], [0, 1, 0, 1]], samples // 4)
    first, second, target = GATES[name][0](*bits)
    noise = 0.1 * draw.standard_normal((2, samples, 4))
    features = {"a": first[:, None] + noise[0], "b": second[:, None] + noise[1]}
    folds = folds_of(features, target.astype(np.int64), draw)
    return PidInputs(folds=folds, classes=2, clusters=2, seed=0, fixed=fixed)


def folds_of(
    features: dict[str, np.ndarray], target: np.ndarray, draw: np.random.Generator
) -> list[FoldFeatures]:
    order = draw.permutation(len(target))
    known = {"features": features, "target": target}
    known["present"] = dict.fromkeys(features, np.ones(len(target), bool))
    parts = np.array_split(order, 5)
    return [FoldFeatures(**known, train=np.setdiff1d(order, x), test=x) for x in parts]


def planted_letters() -> PidInputs:
    """Ten classes in five folds: audio tells nearly all, half of its width tells the speaker
    instead, as clusters then do; text tells most."""
    samples, draw = 679, np.random.default_rng(0)
    target, speaker = draw.integers(10, size=samples), draw.integers(4, size=samples)
    noise = draw.standard_normal((2, samples, 48))
    letters, speakers = draw.standard_normal((10, 16)), draw.standard_normal((4, 32))
    audio = np.concatenate([letters[target], 2.5 * speakers[speaker]], axis=1) + 0.7 * noise[0]
    text = draw.standard_normal((10, 16))[target] + 0.9 * noise[1, :, :16]
    folds = folds_of({"audio": audio, "text": text}, target, draw)
    return PidInputs(folds=folds, classes=10, clusters=None, seed=0, fixed=True)


# ---- gates whose parts are known


@pytest.mark.parametrize("name", GATES)
def test_the_parts_of_a_gate_are_the_known_ones(name: str) -> None:
    np.testing.assert_allclose(decompose(table_of(name)), GATES[name][1], atol=5e-5)


def test_parts_add_up_keep_marginals_and_swap_with_the_sources() -> None:
    table = np.random.default_rng(0).dirichlet(np.ones(18)).reshape(2, 3, 3)
    parts = decompose(table)
    joint = information(table.reshape(-1, 3))
    single = [information(table.sum(axis)) for axis in (1, 0)]
    assert sum(parts) == pytest.approx(joint, abs=1e-9)
    coinformation = sum(single) - joint
    assert parts.redundancy - parts.synergy == pytest.approx(coinformation, abs=1e-9)
    assert min(parts) > -1e-6
    swapped = decompose(table.transpose(1, 0, 2))
    expected = (parts[0], parts[2], parts[1], parts[3])
    np.testing.assert_allclose(swapped, expected, atol=1e-5)
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


def test_features_are_counted_on_the_rows_left_out_and_shuffled_labels_tell_nothing() -> None:
    (pair,) = pid(planted("xor", 400, fixed=False))
    assert pair.clusters == (2,) * 5
    assert pair.rows == 400
    np.testing.assert_allclose(pair.parts, GATES["xor"][1], atol=0.1)
    setup = planted("xor", 800)
    fold = setup.folds[0]
    shuffled = np.random.default_rng(1).permutation(fold.target)
    folds = [FoldFeatures(**{**vars(one), "target": shuffled}) for one in setup.folds[:1]]
    (pair,) = pid(PidInputs(folds=folds, classes=2, clusters=12, seed=0, fixed=True))
    assert max(map(abs, pair.parts)) < 0.05


def test_ten_classes_and_few_rows_leave_the_synergy_and_too_few_are_an_error() -> None:
    classes, hits = 10, (0.7, 0.75)  # each source is a noisy copy of the class
    copies = [np.full((classes, classes), (1 - hit) / (classes - 1)) for hit in hits]
    for copy, hit in zip(copies, hits, strict=True):
        np.fill_diagonal(copy, hit)
    table = np.einsum("ya,yb->aby", *copies) / classes
    cells = np.random.default_rng(0).choice(table.size, size=(8, 360), p=table.ravel())
    draws = [np.unravel_index(rows, table.shape) for rows in cells]
    parts = np.mean([debiased(x[:2], x[2], classes, seed=0) for x in draws], axis=0)
    assert parts[3] == pytest.approx(decompose(table).synergy, abs=0.12)
    setup = planted("and", 40, fixed=False)
    with pytest.raises(FusionZooError, match="8 samples of a fold have a, b and a label"):
        pid(setup)


def pair_of(*parts: float) -> Pair:
    nan = InformationParts(*[float("nan")] * 4)
    sizes: dict[str, Any] = {"low": nan, "high": nan, "clusters": (2,), "rows": 9}
    return Pair(first="a", second="b", parts=InformationParts(*parts), **sizes)


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


# ---- probes


def test_a_probe_sees_interactions_and_returns_frequencies_where_nothing_is_known() -> None:
    fold = planted("xor", 800).folds[0]
    both = np.concatenate([*fold.features.values()], axis=1)
    joint = Probe(both[fold.train], fold.target[fold.train], 3, 0)
    assert joint.network
    chosen = joint(both[fold.test])[np.arange(len(fold.test)), fold.target[fold.test]]
    assert (chosen > 0.9).mean() > 0.95
    single = Probe(fold.features["a"][fold.train], fold.target[fold.train], 3, 0)
    probabilities = single(fold.features["a"][fold.test])
    np.testing.assert_allclose(probabilities.sum(1), 1)
    assert (probabilities > 0).all()
    np.testing.assert_allclose(probabilities, [single.frequencies] * len(fold.test), atol=0.1)
    alone = Probe(both[:40], np.ones(40, dtype=np.int64), 2, 0)
    np.testing.assert_allclose(alone(both[:2]), [alone.frequencies] * 2, atol=1e-9)


def test_no_part_is_above_what_a_probe_of_the_other_source_leaves_open() -> None:
    setup = planted_letters()
    (raw,) = pid(setup)
    (pair,) = decompose_data(setup)
    assert raw.parts.unique_2 > 1.5  # half of the audio's clusters are those of the speaker
    fold = setup.folds[0]
    probe = Probe(fold.features["audio"][fold.train], fold.target[fold.train], 10, 0)
    wrong = (probe(fold.features["audio"][fold.test]).argmax(1) != fold.target[fold.test]).mean()
    assert wrong < 0.04 and pair.limits is not None
    fano = -np.log2([wrong, 1 - wrong]) @ [wrong, 1 - wrong] + wrong * np.log2(9)
    assert pair.parts.unique_2 <= pair.limits.left_1 < fano + 0.1
    assert pair.high.unique_2 <= pair.limits.left_1 and pair.high.synergy <= pair.limits.left_1
    assert pair.parts.redundancy > 3 and min(pair.clusters) >= 10
    assert any("only text is at most" in note for note in pair.notes)
    assert any(note.startswith("Clusters tell 1.1") and "of audio" in note for note in pair.notes)
    assert "each of them" in advise_fusion([pair])
    limits = ProbeLimits(3.3, 0.05, 0.18)
    assert "No advice" in advise_fusion([replace(pair, parts=raw.parts, limits=limits)])


def test_a_limit_leaves_the_parts_of_gates_where_they_are() -> None:
    for name, (_, parts) in GATES.items():
        setup = planted(name, 800)
        (raw,), (pair,) = pid(setup), decompose_data(setup)
        np.testing.assert_allclose(pair.parts, raw.parts, atol=0.01)
        assert np.abs(np.subtract(pair.parts, parts)).max() < 0.05
