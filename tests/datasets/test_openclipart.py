"""Open Clip Art: which drawings are asked for, what a text says, which stay together."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fusionzoo.datasets.builtin import openclipart
from fusionzoo.errors import FusionZooError


def svg(title: str = "", description: str = "", creator: str = "me", body: str = "") -> str:
    return f"""<?xml version="1.0" encoding="UTF-8"?>
<svg xmlns="http://www.w3.org/2000/svg" xmlns:dc="http://purl.org/dc/elements/1.1/" width="40mm"
 height="20mm" viewBox="0 0 40 20"><metadata><dc:title>{title}</dc:title>
<dc:description>{description}</dc:description><dc:subject>keyword</dc:subject>
<dc:creator><dc:title>{creator}</dc:title></dc:creator></metadata>{body}</svg>"""


def bar(width: int) -> str:
    return f'<rect width="{width}" height="20"/>'


def built(
    folder: Path, monkeypatch: pytest.MonkeyPatch, files: Mapping[str, str], smallest: int = 1
) -> dict[str, list[Any]]:
    monkeypatch.setattr(openclipart, "MIN_CLASS_SIZE", smallest)
    for key, contents in files.items():
        path = folder / f"{key}.svg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(contents, encoding="utf-8")
    return openclipart.build(folder).to_pydict()


def test_the_text_is_title_and_description_without_keywords(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "animals/ant": svg("Ant &amp; bee", "seen\n  from above."),
        "animals/bat": svg("Bat", "BAT."),
        "animals/cow": svg(),
    }
    rows = built(tmp_path, monkeypatch, files)
    assert rows["text"] == ["Ant & bee. seen from above", "Bat", None]
    assert rows["target"] == ["animals"] * 3


def test_made_series_links_and_small_folders_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "food").mkdir()
    (tmp_path / "food" / "link.svg").symlink_to("../animals/ant.svg")
    keys = ["animals/ant", "animals/bat", "shapes/stars/5", "computer/icons/a", "special/b"]
    keys += ["food/bread", "shapes/starfish/a", "unsorted/c"]
    rows = built(tmp_path, monkeypatch, {key: svg(body=bar(len(key))) for key in keys})
    assert rows["id"] == ["animals/ant", "animals/bat", "food/bread", "shapes/starfish/a"]
    rows = built(tmp_path, monkeypatch, {}, smallest=2)
    assert rows["id"] == ["animals/ant", "animals/bat"]
    with pytest.raises(FusionZooError, match=r"no folder in .* has 3 drawings"):
        built(tmp_path, monkeypatch, {}, smallest=3)


def test_series_and_equal_content_share_a_group_and_a_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "animals/dog_01": svg("one", body=bar(1)),
        "animals/2_dog_sits": svg("two", body=bar(2)),  # the same first word
        "food/dog": svg("three", body=bar(3)),  # in another folder
        "food/ham": svg("set", creator="a", body=bar(4)),
        "tools/saw": svg("set", "no. 2", creator="a", body=bar(5)),  # a title by one creator
        "tools/axe": svg("set", "no. 3", creator="b", body=bar(6)),
        "tools/nail": svg("nail", creator="a", body=bar(6)),  # the same picture
        "tools/vice": svg(body=bar(7)),
        "tools/wood": svg(body=bar(8)),  # neither has a text
    }
    rows = built(tmp_path, monkeypatch, files)
    groups = dict(zip(rows["id"], rows["group"], strict=True))
    together = {frozenset(k for k in groups if groups[k] == own) for own in groups.values()}
    pairs = {("animals/dog_01", "animals/2_dog_sits"), ("food/ham", "tools/saw")}
    pairs.add(("tools/axe", "tools/nail"))
    assert {x for x in together if len(x) > 1} == {frozenset(pair) for pair in pairs}
    splits = dict(zip(rows["group"], rows["split"], strict=True))
    assert all(splits[g] == s for g, s in zip(rows["group"], rows["split"], strict=True))


def test_a_drawing_is_rendered_whatever_the_unit_of_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = built(tmp_path, monkeypatch, {"animals/ant": svg(body=bar(10))})
    image = Image.open(io.BytesIO(rows["image"][0]))
    assert max(image.size) == 224
    inked = np.asarray(image.convert("RGBA"))[..., 3].any(0)
    assert np.isclose(inked.mean(), 0.25, atol=0.02)  # 10 of 40 mm
