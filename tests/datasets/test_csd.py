"""Computational sequences of the CMU-MultimodalSDK, written as the SDK writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from fusionzoo.cli import main as console
from fusionzoo.datasets import create_dataset
from fusionzoo.errors import FusionZooError
from fusionzoo.tools.csd import convert_csd

LABELS = {"v-1": ([[0, 2], [2, 4]], [[1.5, 0], [-2, 1]]), "w[3]": ([[7, 8]], [[0.5, 0]])}
SOUND = {
    "v-1": ([[0, 1], [1, 2], [2, 3], [3, 4]], [[0, 0], [1, 1], [2, 2], [3, 3]]),
    "w[3]": ([[7, 8]], [[9, 9]]),
}
WORDS = {"v-1": ([[0, 1], [1, 2.5], [2.5, 4]], [[b"so"], [b"good"], [b"sp"]])}


def sequences(path: Path, name: str, parts: dict[str, tuple[Any, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for key, (intervals, features) in parts.items():
            file[f"{name}/data/{key}/intervals"] = np.array(intervals, np.float32)
            rows = np.array(features)
            file[f"{name}/data/{key}/features"] = rows if rows.dtype.kind == "S" else 1.0 * rows
        file[f"{name}/metadata/root name"] = name


def folder(top: Path) -> Path:
    sequences(top / "MOSEI_Labels.csd", "All Labels", LABELS)
    sequences(top / "MOSEI_COVAREP.csd", "COVAREP", SOUND)
    sequences(top / "MOSEI_TimestampedWords.csd", "words", WORDS)
    return top


def test_a_segment_has_the_rows_that_overlap_with_it(tmp_path: Path) -> None:
    converted = convert_csd(folder(tmp_path / "in"), tmp_path / "out")
    dataset = create_dataset(str(converted.manifest), targets={"target": "regression"})
    assert list(dataset.ids) == ["v-1[0]", "v-1[1]", "w[3]"]
    assert dataset.modalities == {"COVAREP": "sequence", "words": "text"}
    assert list(dataset.groups) == ["v-1", "v-1", "w"]
    assert [float(label or "nan") for label in dataset.labels] == [1.5, -2, 0.5]
    steps = [[0, 1], [2, 3], [9]]
    texts = ["so good", "good", None]  # a word at a boundary is in both; pauses are no words
    for row, (numbers, text) in enumerate(zip(steps, texts, strict=True)):
        sample = dataset[row]
        assert sample is not None
        assert sample.values["COVAREP"][:, 0].tolist() == numbers
        assert sample.values["words"] == text
    assert any("also label_2" in note for note in converted.notes)


def test_the_command_converts_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = folder(tmp_path / "in")
    assert console(["data", "convert", str(source), f"{tmp_path}/out"]) == 0
    assert "sequence: COVAREP, 3 samples, width 2" in capsys.readouterr().out
    one = str(source / "MOSEI_COVAREP.csd")
    assert console(["data", "convert", one, f"{tmp_path}/other"]) == 2
    assert "name the folder that has it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"v-1": ([[0, 1]], [[1, 2], [3, 4]])}, "has 2 features, but 1 intervals"),
        ({"v-1": ([[0, 1, 2]], [[1, 2]])}, r"intervals, of shape \(1, 3\): expected"),
        ({"v-1": ([[0, 1]], [[np.inf, 2]])}, "not finite: --nonfinite zero"),
        ({"other": ([[0, 1]], [[1, 2]])}, "no row within a segment of the labels"),
    ],
)
def test_files_that_do_not_fit_are_one_error(parts: Any, message: str, tmp_path: Path) -> None:
    source = folder(tmp_path / "in")
    sequences(source / "MOSEI_COVAREP.csd", "COVAREP", parts)
    with pytest.raises(FusionZooError, match=message):
        convert_csd(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (source / "MOSEI_Labels.csd").unlink()
    with pytest.raises(FusionZooError, match="expected one of labels"):
        convert_csd(source, tmp_path / "out")
