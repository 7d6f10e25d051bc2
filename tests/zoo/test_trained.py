"""Trained models of the zoo: they load by name, and their cards are true."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fusionzoo as fz
from fusionzoo.cli import main
from fusionzoo.errors import FusionZooError
from fusionzoo.model import trained_models
from fusionzoo.model.trained_models import FOLDERS
from fusionzoo.model.trained_on import TrainedOn

ROOT = Path(__file__).parents[2]
WITH_DATA = ("digits-gmu",)  # in the package; the data of the others are fetched
LARGEST = 5_000_000  # bytes of a model


def test_a_trained_model_answers_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert [x.label for x in fz.load("digits-gmu").predict([{"text": "seven"}])] == ["7"]


@pytest.mark.parametrize(
    ("name", "sample", "label"),
    [
        ("stamps-concat", {"text": "A blue bird with long legs."}, "animals"),
        ("hanzi-concat", {"gloss": "salmon"}, "195 fish"),
    ],
)
def test_a_model_whose_encoders_are_in_packages_answers_by_name(
    name: str, sample: dict[str, str], label: str
) -> None:
    assert [x.label for x in fz.load(name).predict([sample])] == [label]


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=() if x in WITH_DATA else pytest.mark.slow) for x in fz.list_models()],
)
def test_a_card_says_what_the_model_reaches_now(name: str) -> None:
    about = TrainedOn.load(FOLDERS / name)
    assert about is not None and about.results is not None
    row = about.results.rows[0]
    try:
        measured = fz.evaluate(FOLDERS / name, split="test")
    except FusionZooError as error:
        if "`fusionzoo data fetch" not in str(error):
            raise
        pytest.skip(str(error))
    # Rounding differs between machines: one sample may fall on the other side.
    accuracy = row.metrics["accuracy"][0]
    assert measured["accuracy"] == pytest.approx(accuracy, abs=1.5 / row.samples)
    card = (FOLDERS / name / "README.md").read_text(encoding="utf-8")
    assert "license: apache-2.0" in card and f"| {accuracy:.3f} [" in card
    assert sum(path.stat().st_size for path in (FOLDERS / name).iterdir()) < LARGEST


def test_trained_models_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zoo", "models"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in fz.list_models())


def test_a_folder_comes_before_a_model_of_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "digits-gmu").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FusionZooError, match=r"no model folder: it holds no config\.json"):
        fz.load("digits-gmu")
    with pytest.raises(FusionZooError, match="no such folder; models of the zoo: digits-gmu"):
        fz.load("digits-mbt")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Leave out what a wheel does, with an empty cache; return its folder of models."""
    shutil.copytree(FOLDERS / "digits-gmu", tmp_path / "package" / "digits-gmu")
    monkeypatch.setattr(trained_models, "FOLDERS", tmp_path / "package")
    monkeypatch.setenv("FUSIONZOO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def test_a_file_of_a_release_loads_by_name_where_the_error_says_to_put_it(
    installed: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        FusionZooError, match=r"hanzi-concat\.zip: `python -m zipfile -e"
    ) as refused:
        fz.load("hanzi-concat")
    subprocess.run([ROOT / ".ci" / "release", "models", tmp_path], check=True, capture_output=True)
    assert sorted(path.stem for path in tmp_path.glob("*.zip")) == ["hanzi-concat", "stamps-concat"]
    [command] = re.findall(r"`python (.+)`", str(refused.value))
    subprocess.run([sys.executable, *command.split()], cwd=tmp_path, check=True)
    assert [x.label for x in fz.load("hanzi-concat").predict([{"gloss": "salmon"}])] == ["195 fish"]
    assert fz.load("digits-gmu").classes


def test_a_file_of_another_release_is_not_taken_for_a_model_of_this_one(installed: Path) -> None:
    shutil.copytree(FOLDERS / "digits-gmu", installed / "hanzi-concat")
    with pytest.raises(FusionZooError, match=r"not the model of fusionzoo .*delete"):
        fz.load("hanzi-concat")
