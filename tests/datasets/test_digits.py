"""Digits: fixed, cheap, and such that no modality suffices while all together nearly do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from fusionzoo import PairedDataset, create_dataset
from fusionzoo.datasets.builtin.digits import COLUMNS, RATE, ROWS, WORDS
from fusionzoo.errors import FusionZooError


@pytest.fixture(scope="module")
def digits() -> PairedDataset:
    return create_dataset("digits")


def test_the_split_is_fixed_and_stratified(digits: PairedDataset) -> None:
    assert digits.splits == {"train": 1078, "val": 362, "test": 357}
    for split, share in (("train", 0.6), ("val", 0.2), ("test", 0.2)):
        part, whole = (torch.bincount(x.targets) for x in (digits.split(split), digits))
        assert (part - share * whole).abs().max() <= 1
    assert digits.classes == [str(digit) for digit in range(10)]


def test_one_seed_is_one_damage(digits: PairedDataset) -> None:
    same, other = create_dataset("digits"), create_dataset("digits", seed=1)
    for i in (0, 700, 1796):
        one, two, three = (x[i].values for x in (digits, same, other))
        assert torch.equal(one["image"], two["image"])
        assert not torch.equal(one["image"], three["image"])
        assert one["text"] == two["text"]
        assert torch.equal(one["audio"].samples, two["audio"].samples)


def test_words_lose_letters_but_gain_none(digits: PairedDataset) -> None:
    for i in range(100):
        sample = digits[i]
        assert set(sample.values["text"]) <= set(WORDS[sample.target]) | {"."}
    lengths = [len(digits[i].values["audio"].samples) for i in range(100)]
    assert RATE * 0.15 - 1 <= min(lengths) < max(lengths) <= RATE * 0.3


def features(digits: PairedDataset) -> dict[str, np.ndarray]:
    """What a simple reader sees: pixels, the letters that are left, the power of each tone."""
    values = [digits[i].values for i in range(len(digits))]
    letters = sorted(set("".join(WORDS)))

    def tones(wave: np.ndarray) -> list[float]:
        time = np.arange(len(wave)) / RATE
        return [abs((wave * np.exp(-2j * np.pi * f * time)).mean()) for f in ROWS + COLUMNS]

    return {
        "image": np.stack([x["image"][0, ::4, ::4].numpy().ravel() for x in values]),
        "text": np.array([[x["text"].count(letter) for letter in letters] for x in values]),
        "audio": np.log([tones(x["audio"].samples.numpy()) for x in values]),
    }


def test_no_modality_suffices_and_all_together_nearly_do(digits: PairedDataset) -> None:
    train, target = np.array(digits.split_names) == "train", digits.targets.numpy()

    def score(*given: np.ndarray) -> float:
        x = np.concatenate(given, axis=1)
        model = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=300))
        return float(model.fit(x[train], target[train]).score(x[~train], target[~train]))

    found = features(digits)
    alone = {name: score(x) for name, x in found.items()}
    assert all(0.6 < accuracy < 0.85 for accuracy in alone.values()), alone
    assert score(*found.values()) > 0.95


def test_the_first_samples_are_those_of_the_whole() -> None:
    few, whole = create_dataset("digits", samples=60), create_dataset("digits")
    assert few.ids == whole.ids[:60]
    assert few.classes == whole.classes
    assert few[7].values["text"] == whole[7].values["text"]
    with pytest.raises(FusionZooError, match="samples=5"):
        create_dataset("digits", samples=5)
