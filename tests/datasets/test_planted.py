"""Interactions: the information is where the task says, and nowhere else."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from fusionzoo import PairedDataset, create_dataset
from fusionzoo.datasets.builtin.planted import (
    SITUATIONS,
    TASKS,
    Floats,
    Setup,
    bayes_aurc,
    interactions_bayes_accuracy,
    situations_bayes_accuracy,
)
from fusionzoo.errors import FusionZooError
from fusionzoo.evaluation.calibration import risk_coverage


def bits(data: PairedDataset, name: str) -> list[int]:
    """Read one modality's bit: on which side of its mean, along its main direction."""
    values = torch.stack([data[i].values[name] for i in range(len(data))])
    direction = torch.linalg.svd(values - values.mean(0), full_matrices=False).Vh[0]
    return (values @ direction > 0).int().tolist()


def best_accuracy(data: PairedDataset, names: tuple[str, ...]) -> float:
    """Guess, for each pattern of bits, its most frequent target."""
    seen: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    columns = [bits(data, name) for name in names]
    for pattern, target in zip(zip(*columns, strict=True), data.targets.tolist(), strict=True):
        seen[pattern][target] += 1
    return sum(max(counts.values()) for counts in seen.values()) / len(data)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("num_modalities", "flip"), [(2, 0.0), (3, 0.0), (2, 0.2)])
def test_the_best_accuracy_is_the_known_one(task: str, num_modalities: int, flip: float) -> None:
    data = create_dataset("interactions", task=task, num_modalities=num_modalities, flip=flip)
    for known in range(1, num_modalities + 1):
        # The first ones: for `unique` it is a that knows.
        names = tuple(data.modalities)[:known]
        wanted = interactions_bayes_accuracy(task, num_modalities, flip, known)
        assert best_accuracy(data, names) == pytest.approx(wanted, abs=0.04)


def test_what_only_one_modality_knows_the_others_do_not() -> None:
    data = create_dataset("interactions", task="unique", num_modalities=3)
    assert best_accuracy(data, ("b", "c")) == pytest.approx(0.5, abs=0.04)


def test_xor_is_hidden_from_every_proper_subset() -> None:
    data = create_dataset("interactions", task="xor", num_modalities=3)
    for pair in itertools.combinations(data.modalities, 2):
        assert best_accuracy(data, pair) == pytest.approx(0.5, abs=0.05)
    assert best_accuracy(data, ("a", "b", "c")) == 1.0


def test_splits_and_encoders_are_given() -> None:
    data = create_dataset("interactions", samples=500, width=5)
    assert data.splits == {"train": 300, "val": 100, "test": 100}
    assert data.default_encoders["b"] == {
        "name": "vector/mlp",
        "dim": 32,
        "hidden": 32,
        "in_dim": 5,
    }


# ---- situations


SAMPLES = 6000
Values = Mapping[str, Floats]  # of one sample, without modalities that it lacks
Pattern = tuple[int, ...]
Directions = Sequence[Floats]  # in the order in which they are drawn


@cache
def opened(
    situation: str, share: float | None = None
) -> tuple[PairedDataset, Sequence[Values], Directions]:
    """Draw a situation; return its test split, read, and the directions that an oracle knows."""
    drawn = []
    draw = Setup.directions

    def record(setup: Setup, count: int) -> Floats:
        drawn.append(draw(setup, count))
        return drawn[-1]

    settings = {"situation": situation, "share": share, "samples": SAMPLES}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Setup, "directions", record)
        data = create_dataset("situations", **settings).split("test")
    rows = [data[row] for row in range(len(data))]
    values = [
        {name: x.double().numpy() for name, x in row.values.items() if x is not None}
        for row in rows
        if row is not None
    ]
    return data, values, drawn


def nearest(x: Floats, directions: Floats) -> int:
    return int((directions @ x).argmax())


def marked(tokens: Floats, mark: Floats) -> Floats:
    return np.asarray(tokens[(tokens @ mark).argmax()])


def cue(x: Floats, directions: Floats) -> int:
    """Return the class that the marked token shows, -1 without one."""
    has_cue = (x @ directions[4]).max() > 0.4
    return nearest(marked(x, directions[4]), directions[:4]) if has_cue else -1


def symbols(situation: str, values: Values, known: Directions) -> dict[str, Pattern]:
    """Read what each modality of a sample shows."""
    columns = {name: known[i] for i, name in zip(range(len(known)), "abcd", strict=False)}
    if situation == "missing_at_test":
        return {m: (nearest(x, columns[m]),) for m, x in values.items()}
    if situation == "reliability":
        return {
            m: (int(np.linalg.norm(x) > 2.5), nearest(x, columns[m])) for m, x in values.items()
        }
    if situation == "starved":
        a, b = values["a"], values["b"]
        shown = nearest(a, known[0])
        is_blank = int(np.linalg.norm(a - known[0][shown] * (known[0][shown] @ a)) > 0.6)
        code = (nearest(b, known[1][4:]) - nearest(b, known[1][:4])) % 4
        return {"a": (is_blank, -1 if is_blank else shown), "b": (code,)}
    if situation == "modifier":
        x = values["content"]
        slots = tuple(nearest(x, known[0][4 * slot : 4 * slot + 4]) for slot in range(4))
        return {"content": slots, "modifier": (nearest(values["modifier"], known[1]),)}
    if situation == "alignment":
        pairs = {nearest(x, known[0][:6]): nearest(x, known[0][6:]) for x in values["a"]}
        return {
            "a": tuple(pairs.get(key, -1) for key in range(6)),
            "b": (nearest(marked(values["b"], known[1][6]), known[1][:6]),),
        }
    if situation == "long":
        return {m: (cue(x, columns[m]),) for m, x in values.items()}
    return {m: tuple(sorted((columns[m] @ x).argsort()[-2:].tolist())) for m, x in values.items()}


def answer(situation: str, values: Values, known: Directions) -> int:
    """Return the likeliest class given all modalities."""
    shown = symbols(situation, values, known)
    if situation == "missing_at_test":
        return Counter(reading for (reading,) in shown.values()).most_common(1)[0][0]
    if situation == "reliability":
        clear = [reading for is_noisy, reading in shown.values() if not is_noisy]
        scores = sum(known[i] @ values[m] for i, m in enumerate("abc"))
        return clear[0] if clear else int(np.asarray(scores).argmax())
    if situation == "starved":
        is_blank, plain = shown["a"]
        return shown["b"][0] if is_blank else plain
    if situation == "modifier":
        return shown["content"][shown["modifier"][0]]
    if situation == "alignment":
        return shown["a"][shown["b"][0]]
    if situation == "long":
        return next((label for (label,) in shown.values() if label >= 0), 0)
    return min(set(shown["a"]) & set(shown["b"]))


def accuracy(guesses: Sequence[int], data: PairedDataset) -> float:
    return float((torch.tensor(guesses) == data.targets).double().mean())


def most_frequent(patterns: Sequence[Hashable], data: PairedDataset) -> float:
    """Guess a pattern's most frequent class, counted in one half, in the other half."""
    counts: dict[Hashable, Counter[int]] = defaultdict(Counter)
    half = len(data) // 2
    targets = data.targets.tolist()
    for pattern, target in zip(patterns[:half], targets[:half], strict=True):
        counts[pattern][target] += 1
    guesses = [counts[x].most_common(1)[0][0] if counts[x] else 0 for x in patterns[half:]]
    return accuracy(guesses, data.subset(range(half, len(data))))


@pytest.mark.parametrize("situation", SITUATIONS)
def test_an_oracle_with_all_modalities_is_as_good_as_stated(situation: str) -> None:
    data, samples, known = opened(situation)
    guesses = [answer(situation, values, known) for values in samples]
    assert accuracy(guesses, data) == pytest.approx(situations_bayes_accuracy(situation), abs=0.025)


# Content and a's pairs have hundreds of patterns, too many to count classes of.
FEWER: dict[tuple[str, str], Callable[[Pattern], Hashable]] = {
    ("modifier", "content"): lambda slots: Counter(slots).most_common(1)[0][0],
    ("alignment", "a"): lambda pairs: pairs[:2],
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_one_modality_alone_falls_short_by_as_much_as_stated(situation: str) -> None:
    data, samples, known = opened(situation)
    shown = [symbols(situation, values, known) for values in samples]
    for name in data.modalities:
        fewer = FEWER.get((situation, name), lambda pattern: pattern)
        reached = most_frequent([fewer(row.get(name, ())) for row in shown], data)
        stated = situations_bayes_accuracy(situation, name)
        assert stated < situations_bayes_accuracy(situation) - 0.1
        assert reached == pytest.approx(stated, abs=0.06)


@pytest.mark.parametrize("situation", [x for x in SITUATIONS if SITUATIONS[x].share is not None])
def test_the_share_moves_the_best_accuracy(situation: str) -> None:
    data, samples, known = opened(situation, share=0.9)
    guesses = [answer(situation, values, known) for values in samples]
    expected = situations_bayes_accuracy(situation, share=0.9)
    assert accuracy(guesses, data) == pytest.approx(expected, abs=0.035)
    assert expected < situations_bayes_accuracy(situation) - 0.04 or situation == "starved"


def test_answering_undecided_samples_last_has_the_stated_area() -> None:
    data, samples, known = opened("ambiguous")
    logits = torch.zeros(len(data), 4)
    for row, values in enumerate(samples):
        shown = symbols("ambiguous", values, known)
        logits[row, list(set(shown["a"]) & set(shown["b"]))] = 9.0
    logits += 1e-3 * torch.rand(logits.shape, generator=torch.Generator().manual_seed(0))
    assert risk_coverage(logits, data.targets).mean() == pytest.approx(bayes_aurc(), abs=0.01)


def test_only_test_samples_lack_sensors_and_none_lacks_all() -> None:
    data = create_dataset("situations", situation="missing_at_test", share=0.9)
    assert data.split("train").present.all()
    assert data.split("val").present.all()
    present = data.split("test").present
    assert present.any(1).all()
    assert present.double().mean() < 0.35


def test_equal_seeds_draw_equal_data() -> None:
    first, again, other = (
        create_dataset("situations", situation="long", samples=20, tokens=9, seed=seed)
        for seed in (1, 1, 2)
    )
    for row in range(20):
        assert torch.equal(first.reference("b", row), again.reference("b", row))
        assert not torch.equal(first.reference("b", row), other.reference("b", row))
    assert first.reference("a", 0).shape == (9, 16)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"situation": "reliable"}, "Did you mean 'reliability'"),
        ({"situation": "modifier", "share": 0.5}, "share=0.5 has no effect"),
        ({"situation": "modifier", "width": 8}, "at least 16"),
        ({"share": 1.5}, "share=1.5"),
        ({"tokens": 8}, "tokens=8 has no effect"),
        ({"situation": "long", "tokens": 0}, "at least 1"),
    ],
)
def test_a_wrong_setting_is_one_clear_error(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(FusionZooError, match=message):
        create_dataset("situations", **settings)
