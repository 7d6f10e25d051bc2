"""Model folders of every released format are read for ever; a newer one is refused in one line.

`tests/fixtures/model-<version>/` was written once by `write_folder`, then never changed. A new
format gets a folder of its own beside the old ones (`model-0.1.0-2/`: two formats before the first
release). `trained-<commit>/` was trained by the code of that commit: a model keeps its answers also
where the format's number stays. `late-37761f2/` has the fusions whose layers format 2 changed.
"""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import fusionzoo
from fusionzoo.errors import FusionZooError
from fusionzoo.model import UnimodalHeads, create_model
from fusionzoo.model_folder import FORMAT
from fusionzoo.standardise import Standardise
from fusionzoo.targets import Level, Number, OneOf
from fusionzoo.trained_on import Row, RunResults, TrainedOn

# What model-0.1.0 says of a photo was recorded again when images came to be resized as timm does.
FIXTURES = Path(__file__).parent / "fixtures"
FOLDERS = sorted(FIXTURES.glob("model-*"))
TRAINED = sorted(FIXTURES.glob("trained-*"))
NET = {"pretrained": False, "channels": [8, 8, 8, 8], "stem_width": 8}
ENCODERS: dict[str, dict[str, Any]] = {
    "text": {"name": "chars", "dim": 8, "num_layers": 1, "num_heads": 2, "max_length": 20},
    "photo": {"name": "timm/resnet10t", "kind": "image", "size": 32, **NET},
    "table": {
        "name": "tabular/mlp",
        "kind": "tabular",
        "dim": 8,
        "hidden": 8,
        "columns": [
            {"name": "age", "mean": 40.0, "std": 12.0},
            {"name": "colour", "values": ["red", "blue"]},
        ],
    },
}
SAMPLES: list[dict[str, Any]] = [
    {
        "text": "a red thing",
        "photo": np.arange(32 * 40 * 3, dtype=np.uint8).reshape(32, 40, 3),
        "table": {"age": 31, "colour": "red"},
    },
    {"text": "no picture"},
    {"table": {"age": None, "colour": "green"}},
    {},
]


def write_folder(folder: Path) -> None:
    """Write a folder with everything that a format can hold, and what the model answers."""
    torch.manual_seed(0)
    targets = [OneOf("weather", classes=("rain", "sun")), Number("price", mean=2.0, deviation=3.0)]
    targets += [Level("size", classes=("1", "2", "3"))]
    model = create_model({"name": "gmu", "dim": 8}, ENCODERS, targets=targets)
    dims = {name: encoder.dim for name, encoder in model.named_encoders()}
    outputs = model.fusion.num_outputs
    row = Row(given=["text"], samples=9, metrics={"loss": [0.5]})
    results = RunResults(
        fingerprint="0" * 16, samples={"test": 9}, best_epoch=1, titles={"loss": "loss"}, rows=[row]
    )
    model.complete(
        prior=torch.full((outputs,), 0.4),
        standardise={"text": Standardise.measure(torch.randn(20, dims["text"]))},
        align={name: torch.nn.Linear(dims[name], 4) for name in ("text", "table")},
        matryoshka=[4, 8],
        heads=UnimodalHeads(dims, 8, torch.full((outputs,), 0.4)),
        trained_on=TrainedOn(
            settings={"name": "digits"}, ids={"train": torch.arange(3)}, results=results
        ),
    )
    model.eval().save(folder)
    (folder / "expected.json").write_text(json.dumps(answers(model)))


def answers(model: fusionzoo.FusionModel) -> dict[str, Any]:
    vectors = {name: x.tolist() for name, x in model.embed(SAMPLES).items()}
    predicted = [model.predict(SAMPLES), model.predict(SAMPLES, fallback="unimodal")]
    return {"vectors": vectors, "predicted": json.loads(json.dumps(predicted))}


def test_each_format_has_a_folder() -> None:
    formats = {json.loads((x / "config.json").read_text())["format"] for x in FOLDERS}
    assert formats == {*range(1, FORMAT + 1)}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda x: x.name)
def test_a_released_format_is_read_for_ever(folder: Path, tmp_path: Path) -> None:
    expected = json.loads((folder / "expected.json").read_text())
    model = fusionzoo.load(folder)
    assert_near(answers(model), expected)
    assert model.trained_on is not None
    assert model.trained_on.results is not None
    assert_near(answers(fusionzoo.load(model.save(tmp_path / "again"))), expected)


def test_fusions_keep_the_layers_that_they_had_before_format_2(tmp_path: Path) -> None:
    folder = FIXTURES / "late-37761f2"
    expected = json.loads((folder / "expected.json").read_text())
    model = fusionzoo.load(folder / "model")
    for loaded in (model, fusionzoo.load(model.save(tmp_path / "again"))):
        samples = expected["samples"]
        assert_near(loaded.embed(samples)["fused"].tolist(), expected["fused"])
        found = [dict(answer.probabilities) for answer in loaded.predict(samples)]
        assert_near(found, expected["probabilities"])
    members = json.loads((tmp_path / "again" / "config.json").read_text())["fusion"]["members"]
    kept = [x for x in members if x["name"] != "ume"]  # whose default is as it was
    assert all(x.get("project", x.get("join")) for x in kept)


@pytest.mark.parametrize("folder", TRAINED, ids=lambda x: x.name)
def test_a_model_trained_by_earlier_code_answers_as_it_did_then(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSIONZOO_CACHE", str(tmp_path))
    expected = json.loads((folder / "expected.json").read_text())
    model, new = folder / "model", folder / "new.csv"
    here: dict[str, Any] = {"num_workers": 0, "device": "cpu"}
    path = fusionzoo.embed(model, new, out=tmp_path / "e.parquet", **here)
    columns = pq.read_table(path).to_pydict()
    predictions = fusionzoo.predict(model, new, **here)
    answers = {
        "predictions": predictions.select([*expected["predictions"][0]]).to_pylist(),
        "fused": columns["fused"],
        "loss": fusionzoo.evaluate(model, new, split="all", **here)["loss"],
    }
    assert columns["id"] == [row["id"] for row in expected["predictions"]]
    assert_near(answers, expected, tolerance=1e-4)
    without_id = [{name: row[name] for name in ("weight", "ward", "note")} for row in rows_of(new)]
    again = [row.probabilities["severe"] for row in fusionzoo.load(model).predict(without_id)]
    assert_near(again, [row["p_severe"] for row in expected["predictions"]], tolerance=1e-4)


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def assert_near(value: Any, expected: Any, tolerance: float = 1e-5) -> None:
    if isinstance(expected, dict):
        assert value.keys() == expected.keys()
        expected, value = list(expected.values()), list(value.values())
    if isinstance(expected, list):
        assert len(value) == len(expected)
        for x, y in zip(value, expected, strict=True):
            assert_near(x, y, tolerance)
    elif isinstance(expected, float):
        assert value == pytest.approx(expected, rel=1e-4, abs=tolerance)
    else:
        assert value == expected


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (FORMAT + 1, "is that of a newer fusionzoo .* pip install --upgrade"),
        (0, "format 0 is not one"),
        (None, "format None is not one"),
        (True, "format True is not one"),
    ],
)
def test_an_unknown_format_is_one_line(number: Any, words: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FOLDERS[-1], tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    unknown = {**config, "format": number, "a key of the future": 1}
    (folder / "config.json").write_text(json.dumps(unknown))
    with pytest.raises(FusionZooError, match=words) as error:
        fusionzoo.load(folder)
    assert "\n" not in str(error.value)
