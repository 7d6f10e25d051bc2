"""What probes know: it bounds the parts that clusters count."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fusionzoo.evaluation.pid import ProbeLimits, advise_fusion, pid
from fusionzoo.evaluation.pid_probes import Probe, decompose_data
from helpers.gates import GATES, planted, planted_letters


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
