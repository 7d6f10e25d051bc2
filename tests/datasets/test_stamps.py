"""Stamps: what is speech, which text, which side of the split; on a small tree and on the data."""

from __future__ import annotations

import shutil
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image

from fusionzoo import create_dataset
from fusionzoo.datasets.builtin import stamps
from fusionzoo.errors import FusionZooError

EIGHT = "be,bg,ca,el,es,fr,ro,ru"  # the languages of at least 500 recordings
SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="4" height="4"/>'
FILES = {
    "animals/birds/owl.png": "",
    "animals/birds/owl.txt": "An owl.\nfr.utf8=Un hibou.\nfro.utf8=Uns huiboz.\nde.utf8=\n",
    "animals/birds/owl.ogg": "",  # it hoots: a sound effect
    "animals/birds/owl_desc_fr.ogg": "",
    "animals/birds/owl_desc_pt_BR.wav": "",
    "animals/birds/owl_mirror.png": "",
    "animals/birds/hen.png": "",
    "animals/birds/hen.ogg": "",
    "animals/birds/hen.txt": "",
    "animals/birds/emu.svg": SVG,
    "animals/birds/owl.svg": SVG,  # of a stamp that is a PNG as well, the PNG counts
    "food/pear.png": "",
    "food/pear.txt": "\nfr.utf8=Une poire.\n",
    "town/bus.png": "",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    top = tmp_path / "root" / stamps.INSIDE
    for name, text in FILES.items():
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".png":
            Image.new("RGBA", (4, 4), (9, 9, 9, 255)).save(path)
        elif path.suffix in (".ogg", ".wav"):
            soundfile.write(path, np.zeros(400), 8000)
        else:
            path.write_text(text, encoding="utf-8")
    return tmp_path / "root"


def opened(tree: Path, **settings: Any) -> dict[str, tuple[Any, Any]]:
    """Each sample's text and recording; the split of so few is chance, so all may be train."""
    data = create_dataset("stamps", root=str(tree), **{"min_class_size": 1, **settings})
    paths = [data.reference("audio", row) for row in range(len(data))]
    texts = data.table["text"].to_pylist()
    names = [path and path.name for path in paths]
    return dict(zip(data.ids, zip(texts, names, strict=True), strict=True))


@pytest.fixture(autouse=True)
def _all_train(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "tree" in request.fixturenames:
        monkeypatch.setattr(stamps, "SHARES", (1.0, 0.0, 0.0))


def test_a_stamp_has_its_description_and_its_spoken_name(tree: Path) -> None:
    assert opened(tree) == {
        "animals/birds/hen": (None, None),
        "animals/birds/owl": ("An owl.", "owl_desc_fr.ogg"),
        "animals/birds/owl_mirror": (None, None),
        "food/pear": (None, None),
        "town/bus": (None, None),
    }


def test_text_and_recording_may_be_of_another_language_and_format(tree: Path) -> None:
    for language, text in (("fr", "Un hibou."), ("fro", "Uns huiboz.")):
        found = opened(tree, text_language=language, speech_language="pt_BR")
        assert found["animals/birds/owl"] == (text, "owl_desc_pt_BR.wav")


@pytest.mark.parametrize("languages", ["fr, pt_BR", ["fr", "pt_BR", "fr"]])
def test_several_languages_give_a_sample_per_recording_in_its_stamp_s_group(
    tree: Path, languages: str | list[str]
) -> None:
    found = opened(tree, speech_language=languages)
    assert {key: value for key, value in found.items() if "/owl_desc" in key} == {
        "animals/birds/owl_desc_fr": ("An owl.", "owl_desc_fr.ogg"),
        "animals/birds/owl_desc_pt_BR": ("An owl.", "owl_desc_pt_BR.wav"),
    }
    assert len(found) == len(opened(tree)) + 1  # a stamp that nobody speaks stays, without audio
    assert found["food/pear"] == (None, None)
    settings = {"root": str(tree), "min_class_size": 1, "speech_language": languages}
    data = create_dataset("stamps", **settings)
    groups = dict(zip(data.ids, data.groups, strict=True))
    assert {groups[key] for key in found if "owl" in key} == {"animals/owl"}


def test_small_classes_are_left_out_and_drawings_added_on_request(tree: Path) -> None:
    data = create_dataset("stamps", root=str(tree), min_class_size=3)
    assert data.classes == ["animals"]
    assert set(opened(tree, svg=True)) - set(opened(tree)) == {"animals/birds/emu"}
    assert opened(tree) == opened(tree / stamps.INSIDE)  # the root may be the stamps' own folder


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"speech_language": "xx"}, "spoken in 'xx'; languages: fr, pt_BR"),
        ({"speech_language": "fr,xx"}, "spoken in 'xx'; languages: fr, pt_BR"),
        ({"text_language": "xx"}, "described in 'xx'"),
        ({"min_class_size": 9}, "no class of at least 9 images"),
    ],
)
def test_what_the_stamps_do_not_have_is_an_error(
    tree: Path, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(FusionZooError, match=says):
        opened(tree, **settings)


def test_without_the_data_the_error_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSIONZOO_CACHE", str(tmp_path))
    with pytest.raises(FusionZooError, match="`fusionzoo data fetch stamps`"):
        create_dataset("stamps")


@pytest.mark.parametrize(
    "alike",
    [
        ("animals/mammals/horse", "animals/mammals/horse2", "animals/mammals/horse_mirror"),
        ("seasonal/halloween/grave-a", "seasonal/halloween/grave-b"),
        ("plants/flowers/flower1", "plants/flowers/flower10"),
        ("space/rocket1", "space/rocket-2"),
        ("seasonal/hanukkah/dreydl-gimel", "seasonal/hanukkah/dreydl-nun"),
        ("symbols/money/us/coins/001penny", "symbols/money/us/coins/025quarter"),
        ("symbols/chess/b_1_king", "symbols/chess/w_1_king"),
        ("symbols/alphabets/english/A_filled", "symbols/alphabets/english/outlined/a_outline"),
        ("food/fruit/apple_red", "food/fruit/AppleGreen_half"),
        ("clothes/little_black_dress", "clothes/dress_blue"),
    ],
)
def test_near_duplicates_share_a_group(alike: tuple[str, ...]) -> None:
    assert len({stamps.group(key) for key in alike}) == 1


def test_what_differs_has_groups_of_its_own() -> None:
    keys = ("food/fruit/apple", "food/fruit/pear", "symbols/a", "symbols/c", "town/apple")
    assert len({stamps.group(key) for key in keys}) == len(keys)


@pytest.fixture
def apt(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Stand in for apt and dpkg: without package lists until they are updated."""
    ran: list[list[str]] = []

    def run(command: list[str], cwd: Path, **_: Any) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        if "download" in command:
            if not any("update" in own for own in ran):
                return subprocess.CompletedProcess(command, 100, stderr="no lists")
            (cwd / f"{stamps.PACKAGE}_1_all.deb").touch()
        if command[0] == "dpkg-deb":
            (Path(command[-1]) / stamps.INSIDE / "animals").mkdir(parents=True)
        return subprocess.CompletedProcess(command, 0, stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(shutil, "which", lambda tool: f"/usr/bin/{tool}")
    return ran


def test_fetching_needs_no_lists_and_no_root_and_happens_once(
    apt: list[list[str]], tmp_path: Path
) -> None:
    assert stamps.fetch(tmp_path) == tmp_path / "stamps"
    (update,) = (own for own in apt if "update" in own)
    assert f"Dir::State={tmp_path}" in " ".join(update)  # not the system's, which need root
    assert [path.name for path in tmp_path.iterdir()] == ["stamps"]  # and nothing half done
    done = len(apt)
    assert stamps.fetch(tmp_path) == tmp_path / "stamps"
    assert len(apt) == done


def test_fetching_that_fails_leaves_nothing_and_says_why(
    apt: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 100, stderr="E: disk full")

    monkeypatch.setattr(subprocess, "run", fails)
    with pytest.raises(FusionZooError, match="update failed: E: disk full"):
        stamps.fetch(tmp_path)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(FusionZooError, match="there is no apt-get here"):
        stamps.fetch(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("languages", "samples", "recordings"), [("fr", 773, 749), (EIGHT, 5613, 5589)]
)
def test_the_real_stamps_are_the_documented_ones(
    languages: str, samples: int, recordings: int, real_stamps: Path
) -> None:
    data = create_dataset("stamps", root=str(real_stamps), speech_language=languages)
    assert (len(data), len(data.classes), len(set(data.groups))) == (samples, 12, 457)
    assert int(data.present[:, 2].sum()) == recordings
    sides = defaultdict(set)
    for group, split in zip(data.groups, data.split_names, strict=True):
        sides[group].add(split)
    assert all(len(own) == 1 for own in sides.values())
    for split in ("train", "val", "test"):
        assert set(data.split(split).labels) == set(data.classes)
    for i in range(0, len(data), len(data) // 30):
        sample = data[i]
        assert sample.values["image"].shape[0] == 3
