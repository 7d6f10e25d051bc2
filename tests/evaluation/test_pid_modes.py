"""The modes `sample` and `batch` of `pid`: exact on gates, near the planted parts on features."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch

import fusionzoo as fz
from fusionzoo.cli import main
from fusionzoo.errors import FusionZooError
from fusionzoo.evaluation import pid_probes
from fusionzoo.evaluation.pid import (
    InformationParts,
    Pair,
    PidInputs,
    ProbeLimits,
    advise_fusion,
    decompose,
    information,
    least_informative,
    pid,
)
from fusionzoo.evaluation.pid_probes import (
    Coupling,
    Probe,
    coupled_information,
    decompose_batches,
    decompose_data,
    marginals,
    pid_by_probes,
    shift,
    split_samples,
    surprises,
)
from fusionzoo.tools.analyse import write_samples
from helpers.gates import GATES, planted, planted_letters, table_of


def exact_values(name: str) -> np.ndarray:
    """The parts of the equally frequent samples of a gate, from its exact probabilities."""
    table = table_of(name)
    cells = np.argwhere(table > 0)
    assert np.allclose(table[table > 0], table[table > 0][0])
    a, b, y = cells.T
    frequencies = table.sum((0, 1))
    first, second = table.sum(1), table.sum(0)
    chosen = (first[a, y] / first[a].sum(1), second[b, y] / second[b].sum(1), np.ones(len(y)))
    sums = (first.sum(1)[a], second.sum(1)[b])
    surprise = -np.log2(np.stack(sums, axis=1))
    return split_samples(np.log2(np.stack(chosen, axis=1) / frequencies[y][:, None]), surprise)


def test_samples_of_gates_have_the_known_parts_before_and_after_the_shift() -> None:
    before = exact_values("and")
    np.testing.assert_allclose(before.mean(0), (0.5613, -0.25, -0.25, 0.75), atol=5e-5)
    np.testing.assert_allclose(exact_values("unique").mean(0), (1, 0, -1, 1), atol=1e-12)
    for name, (_, parts) in GATES.items():
        after = shift(exact_values(name))
        np.testing.assert_allclose(after.mean(0), parts, atol=5e-5)
        np.testing.assert_allclose(after.sum(1), exact_values(name).sum(1), atol=1e-12)


def test_the_parts_of_each_sample_add_up_to_its_information() -> None:
    draw = np.random.default_rng(0)
    information_of_samples = draw.normal(size=(50, 3))
    values = split_samples(information_of_samples, draw.normal(size=(50, 2)))
    for parts in (values, shift(values)):
        r, first, second, s = parts.T
        np.testing.assert_allclose(r + first, information_of_samples[:, 0], atol=1e-12)
        np.testing.assert_allclose(r + second, information_of_samples[:, 1], atol=1e-12)
        np.testing.assert_allclose(r + first + second + s, information_of_samples[:, 2], atol=1e-12)


def test_the_shift_raises_the_most_negative_mean_to_0_and_leaves_others_alone() -> None:
    for values, means in (
        ([[-0.2, 0.5, 0.6, 0.1]], [0.0, 0.3, 0.4, 0.3]),
        ([[0.3, -0.1, 0.2, 0.4]], [0.2, 0.0, 0.3, 0.3]),
        ([[0.3, 0.1, 0.2, 0.4]], [0.3, 0.1, 0.2, 0.4]),
    ):
        np.testing.assert_allclose(shift(np.array(values)).mean(0), means, atol=1e-12)


def test_densities_do_not_depend_on_units_and_constants_surprise_nobody() -> None:
    draw = np.random.default_rng(0)
    first, second = draw.normal(size=(300, 3)), draw.normal(size=(300, 2))
    found = surprises([first, second], [first, second], 0)
    scaled = surprises([1e-3 * first + 7, 1e3 * second], [1e-3 * first + 7, 1e3 * second], 0)
    np.testing.assert_allclose(found, scaled, atol=1e-5)
    assert found.std(0).min() > 0.5
    constant = np.ones((300, 2))
    assert not surprises([first, constant], [first, constant], 0).any()


def test_a_probe_sees_interactions_and_returns_frequencies_where_nothing_is_known() -> None:
    setup = planted("xor", 800)
    fold = setup.folds[0]
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


def batch_of(count: int, classes: int) -> list[np.ndarray]:
    draw = np.random.default_rng(1)
    return [draw.dirichlet(np.ones(classes), size=count) for _ in range(3)]


def test_a_coupling_has_the_marginals_of_both_probes() -> None:
    first, second, joint = marginals(batch_of(40, 3))
    np.testing.assert_allclose(joint.sum(1), 1 / 40)
    np.testing.assert_allclose(first.sum(0), joint.sum(0))
    np.testing.assert_allclose(second.sum(0), joint.sum(0))
    torch.manual_seed(0)
    a = Coupling((2, 5), 3).double()([torch.randn(40, 2).double(), torch.randn(40, 5).double()])
    assert a.shape == (3, 40, 40)
    q = pid_probes.scale(a, *(torch.from_numpy(x).mT for x in (first, second)), 5000, 1e-7).detach()
    np.testing.assert_allclose(q.sum(2).mT, first, atol=1e-8)
    np.testing.assert_allclose(q.sum(1).mT, second, atol=1e-8)
    least = least_informative(first, second, 300)
    assert coupled_information(q) > information(least.reshape(-1, 3))
    found = information(q.permute(1, 2, 0).reshape(-1, 3).numpy())
    assert float(coupled_information(q)) == pytest.approx(found, abs=1e-9)


@pytest.mark.parametrize("name", GATES)
def test_batches_of_a_gate_come_near_its_parts_and_add_up(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the exact probabilities of a gate, whose least informative coupling is known."""
    monkeypatch.setattr(pid_probes, "COUPLING_FEWEST_STEPS", 30)
    monkeypatch.setattr(pid_probes, "RATE", 2e-2)
    table = table_of(name) + 1e-9
    a, b = np.repeat([[0, 0, 1, 1], [0, 1, 0, 1]], 6, axis=1)
    if name == "copy":
        b = a
    first, second = table.sum(1), table.sum(0)
    tables = (first[a], second[b], table[a, b])
    probabilities = [x / x.sum(1, keepdims=True) for x in tables]
    sources = [np.eye(2)[codes] for codes in (a, b)]
    parts = decompose_batches(sources, probabilities, seed=0)
    np.testing.assert_allclose(parts, decompose(table), atol=0.02)
    shares = marginals(probabilities)
    assert sum(parts) == pytest.approx(information(shares[2]), abs=1e-9)
    assert parts.redundancy + parts.unique_1 == pytest.approx(information(shares[0]), abs=1e-9)
    assert parts.redundancy + parts.unique_2 == pytest.approx(information(shares[1]), abs=1e-9)
    assert min(parts) > -1e-4


def first_fold(setup: PidInputs) -> PidInputs:
    return PidInputs(**{**vars(setup), "folds": setup.folds[:1]})


def test_the_table_is_the_mean_of_the_samples_that_have_both_sources() -> None:
    setup = planted("unique", 400)
    present = dict(setup.folds[0].present)
    present["b"] = np.random.default_rng(1).random(400) > 0.25
    folds = [type(fold)(**{**vars(fold), "present": present}) for fold in setup.folds[:2]]
    ids = [f"s{row}" for row in range(400)]
    (pair,) = pid_by_probes(PidInputs(**{**vars(setup), "folds": folds}), "sample", ids)
    assert pair.by_sample is not None
    rows = [row for fold in folds for row in fold.test.tolist() if present["b"][row]]
    assert list(pair.by_sample) == [ids[row] for row in rows]
    assert pair.rows == len(rows) < 160
    np.testing.assert_allclose(pair.parts, np.mean([*pair.by_sample.values()], axis=0))
    np.testing.assert_allclose(pair.parts, (0, 1, 0, 0), atol=0.05)
    assert pair.clusters == ()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "mode"), [("and", "batch"), ("xor", "batch"), *((name, "sample") for name in GATES)]
)
def test_planted_gates_are_measured_by_each_mode(name: str, mode: str) -> None:
    (pair,) = pid_by_probes(first_fold(planted(name)), mode, [str(row) for row in range(4000)])
    np.testing.assert_allclose(pair.parts, GATES[name][1], atol=0.06)
    assert (pair.by_sample is None) == (mode == "batch")


def test_the_command_writes_the_parts_of_every_sample(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pid_probes, "FEWEST_STEPS", 100)
    words = ["analyse", "interactions", "--data.task", "xor", "--data.samples", "100"]
    words += ["--jobs", "1", "--folds", "0", "--pid_mode", "sample"]
    path = tmp_path / "new" / "samples.csv"
    assert main([*words, "--by_sample", str(path)]) == 0
    assert "clusters" not in capsys.readouterr().out
    table = pyarrow.csv.read_csv(path)
    names = ["id", "first", "second", "redundancy", "unique_1", "unique_2", "synergy"]
    assert table.column_names == names
    data = fz.create_dataset("interactions", task="xor", samples=100)
    ids = np.array(data.ids)[[split == "test" for split in data.split_names]]
    assert list(map(str, table["id"].to_pylist())) == ids.tolist()
    assert np.mean(table["synergy"].to_numpy()) > 0.5


@pytest.mark.parametrize("csv_safe", [False, True])
def test_ids_that_look_like_formulas_are_text_if_asked(csv_safe: bool, tmp_path: Path) -> None:
    parts = InformationParts(0.0, 0.0, 0.0, -1.5)
    pair = Pair(
        first="a",
        second="+b",
        **dict.fromkeys(("parts", "low", "high"), parts),
        clusters=(),
        rows=3,
        by_sample=dict.fromkeys(["=1+1", "-2", "@a"], parts),
    )
    write_samples(tmp_path / "p.csv", [pair], csv_safe=csv_safe)
    with (tmp_path / "p.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    mark = "'" if csv_safe else ""
    assert [row["id"] for row in rows] == [f"{mark}=1+1", "-2", f"{mark}@a"]
    assert {(row["first"], row["second"], row["synergy"]) for row in rows} == {
        ("a", f"{mark}+b", "-1.5")
    }


def test_settings_of_another_mode_are_refused(tmp_path: Path) -> None:
    data = fz.create_dataset("interactions", task="xor", samples=100)
    for settings, message in (
        ({"pid_mode": "batch", "clusters": 2}, 'pid_mode="batch" needs no clusters'),
        ({"by_sample": "x.csv"}, "only pid_mode= sample has parts of each sample, not cvx"),
        ({"pid_mode": "sample", "by_sample": "x.txt"}, "written as .csv or .parquet"),
        ({"csv_safe": True}, "csv_safe= is for a .csv, by_sample= is ''"),
        ({"pid_mode": "sample", "model": str(tmp_path)}, "a model is analysed by emap"),
    ):
        with pytest.raises(FusionZooError, match=message):
            fz.analyse(data, **settings)


def test_no_part_is_above_what_a_probe_of_the_other_source_leaves_open() -> None:
    setup = planted_letters()
    (raw,) = pid(setup)
    (pair,) = decompose_data(setup, "cvx", (), may_take_minutes=False)
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


@pytest.mark.nightly
def test_a_pair_of_which_a_probe_knows_more_than_clusters_is_decomposed_by_probes() -> None:
    (pair,) = decompose_data(planted_letters(400), "cvx", ())
    assert not pair.clusters and "decomposed by probes" in pair.notes[0]
    assert pair.parts.unique_2 < 0.1 and pair.parts.redundancy > 2.8


def test_a_limit_leaves_the_parts_of_gates_where_they_are() -> None:
    for name, (_, parts) in GATES.items():
        setup = planted(name, 800)
        (raw,), (pair,) = pid(setup), decompose_data(setup, "cvx", ())
        np.testing.assert_allclose(pair.parts, raw.parts, atol=0.01)
        assert np.abs(np.subtract(pair.parts, parts)).max() < 0.05
