"""Hanzi: which characters are asked for, what a gloss may say, which stay together."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from fusionzoo import create_dataset
from fusionzoo.datasets.builtin import hanzi
from fusionzoo.errors import FusionZooError

BAR = "M 100 {0} L 900 {0} L 900 {1} L 100 {1} Z"


def drawing(*of_radical: int, strokes: int = 3) -> hanzi.Strokes:
    """Horizontal strokes from the top down."""
    heights = [800 - 300 * number for number in range(strokes)]
    outlines = [BAR.format(y + 40, y - 40) for y in heights]
    medians = [np.array([[100.0, y], [900, y]]) for y in heights]
    return hanzi.Strokes(outlines, medians, frozenset(of_radical))


def properties(radical: str, gloss: str, **others: str) -> dict[str, str]:
    return {"kRSUnicode": radical, "kDefinition": gloss, **others}


def built(
    monkeypatch: pytest.MonkeyPatch, characters: Mapping[str, tuple[hanzi.Strokes, dict[str, str]]]
) -> dict[str, list[Any]]:
    monkeypatch.setattr(hanzi, "MIN_CLASS_SIZE", 1)
    table = hanzi.build(
        {c: own for c, (own, _) in characters.items()}, {c: u for c, (_, u) in characters.items()}
    )
    return table.to_pydict()


@pytest.mark.parametrize(
    ("definition", "gloss"),
    [
        ("profession, business; GB radical 111", "profession, business"),
        ("sun; KangXi radical number 72", "sun"),
        ("variant of U+6D1E 洞, cave; chamber; pit", "cave; chamber; pit"),
        ("(same as U+65D2 旒, a corrupted form of U+8352 荒) a cup, wild", "a cup, wild"),
        ("to obstruct, (same as 礙) to hinder", "to obstruct, to hinder"),
        ("bugle, 觱篥 bìlì Tatar horn", "bugle, bìlì Tatar horn"),
        ("equal to seven mou (U+755D 畝), or an area", "equal to seven mou, or an area"),
        ("(ancient form of 'thing'); thing", "thing"),
        ("simplified form of U+4E00", ""),
        # What only looks like it.
        ("cutting off feet as form of punishment", "cutting off feet as form of punishment"),
        ("bright, radical", "bright"),
        ("radiant; eradicate; variation", "radiant; eradicate; variation"),
        ("(Cant.) tongue", "(Cant.) tongue"),
    ],
)
def test_a_gloss_names_no_radical_and_no_other_character(definition: str, gloss: str) -> None:
    assert hanzi.clean_gloss(definition) == gloss


def test_the_sources_must_agree_on_the_strokes_of_the_radical(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = built(
        monkeypatch,
        {
            "a": (drawing(0), properties("85.2 64.1", "river")),
            "b": (drawing(0, 1), properties("85'.1", "lake")),
            "c": (drawing(0), properties("85.1 64.2", "two remain, but of another radical")),
            "d": (drawing(), properties("85.3", "no stroke is known to be the radical's")),
            "e": (drawing(0, 1, 2), properties("85.0", "nothing remains")),
            "f": (drawing(0), properties("85.2", "same as U+6D1E")),
            "g": (drawing(0), {"kRSUnicode": "85.2"}),
        },
    )
    assert rows["id"] == ["a", "b"]
    assert rows["target"] == ["85 water", "85 water"]


def test_rare_radicals_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    strokes = {c: drawing(0) for c in "abc"}
    unihan = {c: properties(f"{85 if c < 'c' else 9}.2", f"gloss of {c}") for c in "abc"}
    monkeypatch.setattr(hanzi, "MIN_CLASS_SIZE", 2)
    assert hanzi.build(strokes, unihan)["id"].to_pylist() == ["a", "b"]
    monkeypatch.setattr(hanzi, "MIN_CLASS_SIZE", 3)
    with pytest.raises(FusionZooError, match="no radical has 3 characters"):
        hanzi.build(strokes, unihan)


def test_variants_and_equal_glosses_share_a_group() -> None:
    keys = {c: (f"gloss of {c}",) for c in "abcdefg"} | {"h": ("gloss of g",)}
    unihan = {
        "a": {"kSimplifiedVariant": "U+0062"},  # of b
        "c": {"kSemanticVariant": "U+007A<kMatthews U+0079"},  # of y and z, as d is
        "z": {"kZVariant": "U+0064"},
        "e": {"kDefinition": "used for U+0066"},
    }
    groups = hanzi.find_groups(keys, unihan)
    together = {frozenset(c for c in groups if groups[c] == own) for own in groups.values()}
    assert together == {frozenset("ab"), frozenset("cd"), frozenset("ef"), frozenset("gh")}


def test_glosses_of_equal_words_share_a_group_and_a_split(monkeypatch: pytest.MonkeyPatch) -> None:
    glosses = {"a": "Far, distant", "b": "distant; far", "c": "near"}
    shapes = {"a": drawing(0), "b": drawing(1), "c": drawing(2)}
    rows = built(monkeypatch, {c: (shapes[c], properties("85.2", glosses[c])) for c in glosses})
    assert rows["group"] == ["a", "a", "c"]
    assert rows["split"][0] == rows["split"][1]


def test_the_map_starts_at_the_top_and_tells_directions_apart() -> None:
    cells = hanzi.map_strokes([np.array([[100.0, 800], [900, 800]])]).reshape(8, 8, 4)
    assert cells[:2].any() and not cells[2:].any()
    assert np.isclose((cells**2).sum(), 800 / 1024)  # the stroke's length
    ends = {0: (900, 450), 1: (450, 0), 2: (0, 450), 3: (450, 900)}  # right, down, left, up
    for direction, end in ends.items():
        cells = hanzi.map_strokes([np.array([(450.0, 450.0), end])]).reshape(-1, 4)
        assert np.flatnonzero(cells.any(0)).tolist() == [direction]


def test_the_picture_shows_the_remaining_strokes_where_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = built(monkeypatch, {"a": (drawing(1, 2), properties("85.1", "top"))})
    pixels = np.asarray(Image.open(io.BytesIO(rows["picture"][0])))
    assert pixels.shape == (64, 64)
    dark = np.flatnonzero((pixels < 128).any(1))
    assert 3 <= dark.min() <= dark.max() <= 9  # 900 - 840 to 900 - 760 of 1024, in 64 pixels


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with both packages, of two characters, as if they were unpacked by hand."""
    monkeypatch.setattr(hanzi, "MIN_CLASS_SIZE", 1)
    monkeypatch.setattr(hanzi, "STROKES", replace(hanzi.STROKES, sha256=""))
    monkeypatch.setattr(hanzi, "UNIHAN", replace(hanzi.UNIHAN, sha256=""))
    outlines, last = [BAR.format(9, 0), BAR.format(90, 80)], {"江": 90, "河": 0}
    lines = {
        "IRGSources": ["U+6C5F\tkRSUnicode\t85.1", "U+6CB3\tkRSUnicode\t85.1"],
        "Readings": ["# a\tb", "", "U+6C5F\tkDefinition\tlarge river", "U+6C5F\tkHangul\t강:0E"],
        "Variants": [],
    }
    lines["Readings"].append("U+6CB3\tkDefinition\triver")
    strokes, unihan = tmp_path / "hanzi" / "strokes", tmp_path / "hanzi" / "unihan"
    strokes.mkdir(parents=True)
    unihan.mkdir()
    for character, x in last.items():
        medians = [[[0, 0], [9, 0]], [[0, 9], [x, 99]]]
        stored = {"strokes": outlines, "medians": medians, "radStrokes": [0]}
        (strokes / f"{character}.json").write_text(json.dumps(stored))
    (strokes / "package.json").write_text("{}")
    for name, rows in lines.items():
        (unihan / f"Unihan_{name}.txt").write_text("\n".join(rows), encoding="utf-8")
    return tmp_path


def test_fetching_builds_the_table_once_and_the_same_each_time(home: Path) -> None:
    table = hanzi.fetch(home) / hanzi.TABLE
    first = table.read_bytes()
    modified = table.stat().st_mtime_ns
    hanzi.fetch(home)
    assert table.stat().st_mtime_ns == modified
    table.unlink()
    assert (hanzi.fetch(home) / hanzi.TABLE).read_bytes() == first
    assert sorted(path.name for path in table.parent.iterdir()) == [
        hanzi.TABLE,
        "strokes",
        "unihan",
    ]


def test_picture_and_readings_are_added_on_request(home: Path) -> None:
    root = str(hanzi.fetch(home))
    assert list(create_dataset("hanzi", root=root).modalities) == ["strokes", "gloss"]
    data = create_dataset("hanzi", root=root, picture=True, readings="korean")
    assert [data[row].values["korean"] for row in (0, 1)] == ["강", None]
    assert data[0].values["picture"].shape == (3, 64, 64)
    with pytest.raises(FusionZooError, match="readings='klingon': there are those in mandarin"):
        create_dataset("hanzi", root=root, readings="klingon")


@pytest.mark.slow
def test_the_real_characters_are_the_documented_ones(tmp_path: Path) -> None:
    if shutil.which("npm") is None:
        pytest.skip("no npm here to download hanzi-writer-data with")
    root = str(hanzi.fetch(tmp_path))
    data = create_dataset("hanzi", root=root)
    assert (len(data), len(set(data.groups)), len(data.classes)) == (6390, 4669, 40)
    sides: dict[str, set[str]] = {}
    for group, split in zip(data.groups, data.split_names, strict=True):
        sides.setdefault(group, set()).add(split)
    assert all(len(own) == 1 for own in sides.values())
    for split in ("train", "val", "test"):
        assert set(data.split(split).labels) == set(data.classes)
    glosses = " ".join(
        pq.read_table(hanzi.find_table("hanzi", hanzi.TABLE, root))["gloss"].to_pylist()
    )
    assert "radical" not in glosses and not hanzi.SIGN.search(glosses)
