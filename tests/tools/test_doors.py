"""One sample has one answer: of the model, its export, the example, the page and the server."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import fusionzoo as fz
from fusionzoo.cli import main
from fusionzoo.datasets.media.decode import decode_image
from fusionzoo.errors import FusionZooError
from fusionzoo.model.confidence import Calibration, TargetCalibration
from fusionzoo.model.fusion_model import FusionModel, create_model
from fusionzoo.model.trained_on import TrainedOn, hash_texts
from fusionzoo.targets import AnyOf, Number, OneOf
from fusionzoo.tools.export import web
from fusionzoo.tools.export.export import export
from fusionzoo.tools.export.folder import example
from fusionzoo.tools.export.preprocess import describe
from helpers.serving import serving

requests = pytest.importorskip("requests")
pytestmark = [pytest.mark.needs("onnxruntime"), pytest.mark.needs("fastapi")]
NODE = shutil.which("node")
JSON = {"Content-Type": "application/json"}
NOT_IN_JSON = ("nan", "numbers as text")  # which the server takes for no number
COLUMNS = (
    {"name": "weight", "mean": 60.0, "std": 9.0},
    {"name": "price", "mean": 9.0, "std": 900.0},
    {"name": "seen year", "mean": 2000.0, "std": 30.0},
    {"name": "seen days", "mean": 18000.0, "std": 9000.0},
    {"name": "seen month", "values": ["1", "10", "2", "3"]},
    {"name": "seen weekday", "values": ["Fri", "Mon", "Sun", "Wed"]},
    {"name": "seen hour", "mean": 11.0, "std": 6.0},
    {"name": "age", "mean": 40.0, "std": 12.0},
    {"name": "Ort", "values": ["1.5", "3", "Caf\u00e9", "true"]},
)
STORED = {
    "name": "manifest",
    "columns": {"table": ["weight", "price", "seen", "age", "Ort"]},
    "kinds": {
        **{"table": "tabular", "weight": "number kg", "price": "number $"},
        "seen": "date dmy time",
    },
    "decimal": ",",
    "na": ["n/a", "-"],
}
ROW = {"weight": "58,1 kg", "price": 3, "seen": "03.02.2021", "age": 31, "Ort": "3"}
CELLS: dict[str, list[Any]] = {
    "weight": [
        *(None, "", "  ", "n/a", "-", math.nan, True, "58.1", " 61,5 ", "1,234", "1.234,5 kg"),
        *("1 234 kg", "61,5 g", "61,5kg", "kg", "0x20", "1e2", "1,5e1", "abc", "Infinity", 1e400),
        [1],
    ],
    "price": ["$ 5", "5 $", "$5,25", "5 kg", "$"],
    "seen": [
        *(None, "2021-02-03", "3.2.21", "3/2/71", "03.02.2021 14:30", "2021-02-03T23:30:00-05:00"),
        *("2021-02-03T00:30Z", "2021/1/2 7:05:30", "31.02.2021", "13.13.2021", "44000", 44000),
        *("soon", "03.02-2021", "3.2.2021, 10:15", "0001-01-01", "2020-02-29", "1969-12-31"),
        *("2021-02-03T10", "2021-02-03 1030", "2021-02-03T103015.5", "2021-02-03T10:30:15,5"),
        *("2021-02-03T10+02", "2021-2-3T9:30 -05:30", "2021-02-03T93", "2021-02-03 at 7:05"),
        *("3.2.21 10", "3.2.21, 10:30+05:00", "2021-02-03T25:00", "2021-02-03T24:00"),
        *("20210203T1030", "9999-12-31T23:00-05:00", "0001-01-01T01:00+05:00", "2021-02-03 a 10"),
    ],
    "age": [None, "31", "31,5", "31.5", "31 kg", "\u0663", "true", -7, 1e9, "1_0", "٣", "+4", ".5"],
    "Ort": [
        *(None, "n/a", "caf\u00e9", "Cafe\u0301", " Caf\u00e9 ", 3, 3.0, "3.0", "03", True, "TRUE"),
        *("1,5", 1.5, "Rom", 1e6, -2.0),
    ],
}
SAMPLES: dict[str, Any] = {
    **{
        f"{x}={cell!r}": {"table": {**ROW, x: cell}} for x, cells in CELLS.items() for cell in cells
    },
    "no table": {"table": None, "scores": [1, 2, 3]},
    "nothing": {},
    "empty cells": {"table": dict.fromkeys(ROW)},
    "other case": {"table": {f" {name.upper()}": cell for name, cell in ROW.items()}},
    "unknown column": {"table": {**ROW, "shoe": 3}},
    "missing column": {"table": {"weight": 61}},
    "column twice": {"table": {**ROW, "AGE": 31}},
    "parts of a date": {"table": {**{x["name"]: None for x in COLUMNS}, "seen year": 2001}},
    "no row": {"table": 3},
    "unknown modality": {"tabel": ROW},
    "short vector": {"scores": [1, 2]},
    "deep vector": {"scores": [[1, 2, 3]]},
    "numbers as text": {"scores": ["1", "2.5", "3"]},
    "words in a vector": {"scores": ["1", "b", "3"]},
    "gap in a vector": {"scores": [1, None, 3]},
    "nan in a vector": {"scores": [1, math.nan, 3]},
    "empty sequence": {"steps": []},
    "flat sequence": {"steps": [1, 2]},
    "sequence": {"steps": [[0.5, 1], [2, 3]]},
    "gap in a sequence": {"steps": [[0.5, None]]},
    "no text": {"words": 3},
    "empty text": {"words": ""},
    "accents": {"words": "Cafe\u0301"},
}
Answers = dict[str, list[float] | None]  # of a sample, the shares; None: it is refused
Asked = Mapping[str, Any]


@pytest.fixture(scope="module")
def model() -> FusionModel:
    torch.manual_seed(0)
    encoders = {
        "table": {"name": "tabular/mlp", "columns": COLUMNS, "dim": 8, "hidden": 8},
        "scores": {"name": "vector/identity", "in_dim": 3},
        "steps": {"name": "sequence/transformer", "in_dim": 2, "dim": 8, "num_heads": 2},
        "words": {"name": "chars", "dim": 8, "num_layers": 1, "num_heads": 2, "max_length": 20},
    }
    kinds = {"table": "tabular", "scores": "vector", "steps": "sequence", "words": "text"}
    encoders = {x: {**settings, "kind": kinds[x]} for x, settings in encoders.items()}
    model = create_model({"name": "concat", "dim": 8}, encoders, classes=["no", "yes"])
    return model.complete(trained_on=TrainedOn(settings=STORED)).eval()


@pytest.fixture(scope="module")
def exported(model: FusionModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(model, tmp_path_factory.mktemp("doors") / "out").folder


def asked_one_by_one(ask: Callable[[Any], list[float]], errors: type[Exception]) -> Answers:
    answers: Answers = {}
    for name, sample in SAMPLES.items():
        try:
            answers[name] = ask(sample)
        except errors:
            answers[name] = None
    return answers


def by_predict(model: Any, folder: Path) -> Answers:
    def ask(sample: Asked) -> list[float]:
        return [*model.predict([sample])[0].probabilities.values()]

    return asked_one_by_one(ask, FusionZooError)


def by_runtime(model: Any, folder: Path) -> Answers:
    return by_predict(fz.load(folder, runtime="onnx"), folder)


def by_example(model: Any, folder: Path) -> Answers:
    module = imported(folder)
    return asked_one_by_one(lambda x: [*module.answer(x)["target"].values()], ValueError)


def by_server(model: Any, folder: Path) -> Answers:
    with serving(model) as url:

        def ask(sample: Asked) -> list[float]:
            answer = requests.post(f"{url}/predict", data=json.dumps(sample), headers=JSON)
            if answer.status_code != 200:
                raise FusionZooError(answer.text)
            return [*answer.json()["probabilities"].values()]

        return asked_one_by_one(ask, FusionZooError)


def by_page(model: Any, folder: Path) -> Answers:
    """What the page's script prepares in Node, answered by the graph."""
    if NODE is None:
        pytest.skip("needs Node.js")
    page = folder.parent / "page"
    (page / "packages").mkdir(parents=True)
    (page / "packages" / "tokenizers.min.mjs").write_text("export class Tokenizer {}\n")
    shutil.copy(Path(web.__file__).with_name("prepare.js"), page)
    about = (folder / "preprocess.json").read_text()
    samples = json.dumps([*SAMPLES.values()])
    (page / "ask.mjs").write_text(
        f'import {{ prepare }} from "./prepare.js";\nconst {{ modalities }} = {about};\n'
        "const plain = (x) => [Array.from(x.data, Number), x.dims];\n"
        "const ask = (x) => prepare(x, modalities).then((inputs) => Object.fromEntries("
        "Object.entries(inputs).map(([name, x]) => [name, plain(x)])), () => null);\n"
        f"console.log(JSON.stringify(await Promise.all({samples}.map(ask))));"
    )
    done = subprocess.run(
        [str(NODE), str(page / "ask.mjs")], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    session, module = fz.load(folder, runtime="onnx")._session, imported(folder)
    types = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(bool)": np.bool_}
    answers: Answers = {}
    for name, inputs in zip(SAMPLES, json.loads(done.stdout), strict=True):
        answers[name] = None
        if inputs is not None:
            feeds = {
                x.name: np.array(inputs[x.name][0], types[x.type]).reshape(inputs[x.name][1])
                for x in session.get_inputs()
            }
            logits = session.run(["logits"], feeds)[0][0]
            answers[name] = [*module.classification(logits, {"classes": ["no", "yes"]}).values()]
    return answers


def imported(folder: Path) -> Any:
    """Import the example of an exported folder."""
    spec = importlib.util.spec_from_file_location("example", folder / "example.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def expected(model: FusionModel, exported: Path) -> Answers:
    answers = by_predict(model, exported)
    assert 40 < sum(x is not None for x in answers.values()) < len(answers) - 20
    return answers


@pytest.mark.parametrize("door", [by_runtime, by_example, by_page, by_server])
def test_every_door_reads_odd_values_as_the_model_does(
    door: Callable[..., Answers], model: FusionModel, exported: Path, expected: Answers
) -> None:
    answers = door(model, exported)
    for name, answer in answers.items():
        if door is by_server and any(x in name for x in NOT_IN_JSON):
            continue
        said = f"{name}: the model {expected[name]}, {door.__name__} {answer}"
        assert (answer is None) == (expected[name] is None), said
        assert answer is None or answer == pytest.approx(expected[name], abs=1e-4), said


def test_a_row_of_the_table_and_its_cells_have_one_answer(model: FusionModel) -> None:
    row, cells = model.predict([ROW]), model.predict([{"table": ROW}])
    assert row[0].probabilities == pytest.approx(cells[0].probabilities, abs=1e-6)


@pytest.fixture(scope="module")
def predicted(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Predict a table by the folder of a model and by that of its export; returns both tables."""
    folder = tmp_path_factory.mktemp("predicted")
    torch.manual_seed(0)
    targets = [
        OneOf("sick", ("false", "true")),
        OneOf("grade", ("1", "2", "3")),
        AnyOf("tags", ("3", "7")),
        Number("price", mean=3.0, deviation=2.0),
    ]
    measured = {
        "sick": TargetCalibration(temperature=2.0, scores=[0.1 * x for x in range(10)]),
        "grade": TargetCalibration(scores=[0.1 * x for x in range(10)]),
        "tags": TargetCalibration(thresholds={"3": 0.45}, scores=[0.1 * x for x in range(10)]),
        "price": TargetCalibration(scores=[0.5 * x for x in range(10)]),
    }
    stored = {"name": "manifest", "columns": {"table": ["age", "town"], "id": "no"}}
    stored["kinds"] = {"table": "tabular"}
    columns = ({"name": "age", "mean": 40.0, "std": 12.0}, {"name": "town", "values": ["A", "B"]})
    encoders = {"table": {"name": "tabular/mlp", "columns": columns, "kind": "tabular"}}
    model = create_model({"name": "concat", "dim": 8}, encoders, targets=targets)
    types = {"sick": "bool", "grade": "int", "tags": "list of int"}
    ids = {"train": hash_texts(["7", "8"]), "val": hash_texts(["9"])}
    trained_on = TrainedOn(settings=stored, ids=ids, types=types)
    model.complete(trained_on=trained_on, calibration=Calibration(targets=measured)).eval()
    model.save(folder / "model")
    export(model, folder / "exported")
    lines = ["no,age,town", "6,31,A", "7,52,B", "8,64,Rome", "9,,A"]
    (folder / "new.csv").write_text("\n".join(lines) + "\n")

    def predict(*words: str) -> list[tuple[Any, int]]:
        tables = []
        for name in ("model", "exported"):
            out = folder / f"{name}.parquet"
            root = ["--data.root", str(folder / "new.csv"), "--out", str(out)]
            out.unlink(missing_ok=True)
            code = main(["predict", str(folder / name), *root, *words])
            tables.append((pq.read_table(out) if code == 0 else None, code))
        return tables

    return predict


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ([], 0),
        (["--coverage", "0.8"], 0),
        (["--threshold", "0.01", "--thresholds", '{"tags.7": 0.01, "3": 0.99}'], 0),
        (["--coverage", "0.99"], 2),  # more than ten samples allow
        (["--thresholds", '{"4": 0.5}'], 2),
    ],
)
def test_predict_writes_one_table_for_a_model_and_its_export(
    words: list[str], code: int, predicted: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (wanted, code_of_model), (table, code_of_export) = predicted(*words)
    assert code_of_model == code_of_export == code
    lines = capsys.readouterr().out.splitlines()
    if code:
        return
    assert table.schema == wanted.schema
    assert table["seen_in_training"].to_pylist() == [False, True, True, True]
    assert {*table["sick.label"].to_pylist()} <= {True, False}
    assert {*table["grade.label"].to_pylist()} <= {1, 2, 3}
    for name in wanted.column_names:
        ours, theirs = table[name].to_pylist(), wanted[name].to_pylist()
        is_real = pa.types.is_floating(table[name].type)
        assert ours == (pytest.approx(theirs, abs=1e-5) if is_real else theirs), name
    assert sum("Rome" in line for line in lines) == 2  # a town that training did not see


def test_an_export_of_a_model_with_a_threshold_answers_by_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    encoders = {"scores": {"name": "vector/identity", "in_dim": 3, "kind": "vector"}}
    model = create_model({"name": "concat", "dim": 8}, encoders, classes=["no", "yes"]).eval()
    for threshold, label in ((0.001, "yes"), (0.999, "no")):
        chosen = model.with_thresholds(threshold, {})
        exported = export(chosen, tmp_path / label).folder
        sample = {"scores": [0.1, 0.2, 0.3]}
        assert chosen.predict([sample])[0].label == label
        assert fz.load(exported, runtime="onnx").predict([sample])[0].label == label


def test_an_option_that_an_export_does_not_take_is_refused(
    exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--data.root", "new.csv", "--out", "p.csv", "--device", "cuda"]
    assert main(["predict", str(exported), *words]) == 2
    assert "was exported and runs on the CPU" in capsys.readouterr().err


RAMP = np.linspace(0, 4000, 900).reshape(30, 30)
PICTURES = {
    "16 bits": (RAMP.astype(np.uint16), "png"),
    "16 bits in TIFF": (RAMP.astype(np.uint16), "tiff"),
    "32 bits": (RAMP.astype(np.int32), "tiff"),
    "float": (RAMP.astype(np.float32), "tiff"),
    "grey": ((RAMP / 16).astype(np.uint8), "png"),
}


@pytest.mark.parametrize("image_range", [(0, 4095), (500, 2000), None])
@pytest.mark.parametrize("picture", PICTURES)
def test_the_example_decodes_images_as_the_model_does(
    picture: str, image_range: tuple[float, float] | None, exported: Path, tmp_path: Path
) -> None:
    values, ending = PICTURES[picture]
    path = tmp_path / f"a.{ending}"
    Image.fromarray(values).save(path)
    encoder = fz.create_encoder("image", "timm/resnet10t", pretrained=False, size=24)
    described = describe(encoder, tmp_path, {"image_range": image_range})
    folder = shutil.copytree(exported, tmp_path / "out")
    source = example({"image"}, {"fit": {"crop"}})
    (folder / "example.py").write_text(source)
    prepare = imported(folder).image
    try:
        wanted = encoder.processor(False)(decode_image(path, image_range))["pixels"].int()
    except FusionZooError:
        with pytest.raises(ValueError, match="knows no range"):
            prepare(path, described)
        return
    assert np.abs(prepare(path, described)["pixels"] - wanted.numpy()).max() <= 2
