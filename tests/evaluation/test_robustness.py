"""Corruptions keep the kind of a value, grow with severity and are the same each time."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from fusionzoo import create_dataset
from fusionzoo.errors import FusionZooError
from fusionzoo.evaluation.robustness import CORRUPTIONS, SEVERITIES, corrupt, corrupted
from fusionzoo.structures import Audio

EVERY = [(kind, name) for kind, found in CORRUPTIONS.items() for name in found]
DRAW = torch.Generator().manual_seed(0)
WORDS = "a small brown horse is standing in front of an old red barn near the green river bank"


def sample(kind: str) -> Any:
    return {
        "image": torch.randint(256, (3, 40, 60), dtype=torch.uint8, generator=DRAW),
        "text": WORDS,
        "audio": Audio((torch.rand(8000, generator=DRAW) - 0.5) * 0.8, 16_000),
        "vector": torch.randn(64, generator=DRAW),
        "sequence": torch.randn(9, 16, generator=DRAW),
        "tabular": {f"column {n}": 40.0 + n if n % 2 else f"{3 * n}.5" for n in range(20)},
    }[kind]


def plain(value: Any) -> Any:
    return value.samples if isinstance(value, Audio) else value


@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_a_damaged_value_is_of_the_same_kind_and_each_time_the_same(kind: str, name: str) -> None:
    value = sample(kind)
    before = copy.deepcopy(value)
    for severity in SEVERITIES:
        out = corrupt(value, kind, name, severity)
        assert type(out) is type(value)
        if kind == "tabular":
            assert list(out) == list(value)
        elif kind != "text":
            assert plain(out).shape == plain(value).shape
            assert plain(out).dtype == plain(value).dtype
            assert plain(out).float().isfinite().all()
    assert _same(value, before)
    one, two = (plain(corrupt(value, kind, name, 4, seed=3)) for _ in range(2))
    assert _same(one, two)


def _same(value: Any, other: Any) -> bool:
    tensors = plain(value), plain(other)
    return torch.equal(*tensors) if isinstance(tensors[0], torch.Tensor) else value == other


@pytest.mark.parametrize(("kind", "name"), [pair for pair in EVERY if pair[0] != "text"])
def test_damage_grows_with_severity(kind: str, name: str) -> None:
    value = sample(kind)
    off = [
        np.mean([_off(value, corrupt(value, kind, name, s, seed)) for seed in range(5)])
        for s in SEVERITIES
    ]
    assert off[0] > 0
    assert all(a < b for a, b in pairwise(off)), off


def _off(value: Any, out: Any) -> float:
    if isinstance(value, dict):
        numbers = {name: float(cell or 0) for name, cell in out.items()}
        return float(np.mean([abs(numbers[name] - float(cell)) for name, cell in value.items()]))
    return float((plain(out).float() - plain(value).float()).abs().mean())


@pytest.mark.parametrize("name", ["word_drop", "truncation"])
def test_less_text_is_left(name: str) -> None:
    lengths = [len(corrupt(WORDS, "text", name, s, seed=1)) for s in SEVERITIES]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] < len(WORDS) / 3


def test_empty_clips_texts_and_cells_of_text_survive() -> None:
    for name in CORRUPTIONS["audio"]:
        assert len(corrupt(Audio(torch.zeros(0), 8000), "audio", name, 5).samples) == 0
        assert corrupt(Audio(torch.zeros(50), 8000), "audio", name, 5).samples.abs().max() == 0
    for name in CORRUPTIONS["text"]:
        assert corrupt("", "text", name, 5) == ""
    cells = {"age": 31.0, "size": "12.5", "colour": "red", "place": None}
    out = corrupt(cells, "tabular", "inexact_numbers", 5)
    assert (out["colour"], out["place"]) == ("red", None)
    assert all(isinstance(out[name], float) for name in ("age", "size"))
    assert out["age"] != 31.0 and out["size"] != 12.5
    for seed in range(50):
        emptied = corrupt(cells, "tabular", "empty_cells", 5, seed)
        filled = [name for name, cell in emptied.items() if cell is not None]
        assert filled and all(emptied[name] == cells[name] for name in filled)


def test_one_modality_is_damaged_and_what_is_missing_stays_missing() -> None:
    clean = create_dataset("digits", missing=0.3)
    damaged = corrupted(clean, "image", "noise", 3)
    for row in range(20):
        a, b = clean[row], damaged[row]
        assert a is not None and b is not None
        assert a.values["text"] == b.values["text"]
        if a.values["image"] is None:
            assert b.values["image"] is None
        else:
            assert not torch.equal(a.values["image"], b.values["image"])
            again = damaged[row]
            assert again is not None
            assert torch.equal(b.values["image"], again.values["image"])


def test_an_unknown_corruption_names_the_nearest() -> None:
    with pytest.raises(FusionZooError, match=r"'blurr' of image.*'blur'"):
        corrupt(sample("image"), "image", "blurr", 1)
    with pytest.raises(FusionZooError, match="severity 6"):
        corrupt(sample("image"), "image", "blur", 6)
