"""An exported folder answers as the model does, without it, or is not written."""

from __future__ import annotations

import ast
import builtins
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor, nn

import fusionzoo as fz
from fusionzoo.cli import main
from fusionzoo.errors import FusionZooError
from fusionzoo.fusion import Fusion
from fusionzoo.fusion.early.sum import Sum
from fusionzoo.model.folder import write_digests
from fusionzoo.model.fusion_model import FusionModel, create_model
from fusionzoo.structures import Features, FusionOutput, Sample
from fusionzoo.targets import AnyOf, Level, Number
from fusionzoo.tools.export.export import ExportFiles, export
from fusionzoo.tools.export.folder import EXAMPLE, example
from fusionzoo.tools.export.graph import layout_of
from fusionzoo.tools.export.runtime import FORMAT, OnnxModel
from fusionzoo.training.seeds import join
from helpers.raw_files import raw_files

pytest.importorskip("onnxruntime")
pytestmark = [
    pytest.mark.needs("onnxruntime"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch's exporters
]
COLUMNS = (
    {"name": "age", "mean": 40.0, "std": 12.0},
    {"name": "colour", "values": ["blue", "red", "yellow"]},
)
ENCODERS = {
    "vector": {"name": "vector/mlp", "in_dim": 6, "dim": 8, "hidden": 8},
    "tabular": {"name": "tabular/mlp", "columns": COLUMNS, "dim": 8, "hidden": 8},
}
VECTOR = [0.1, -2.0, 0.5, 1.0, 0.0, 3.0]
CELLS = {"age": 31.0, "colour": "red"}
SAMPLES = [
    {"vector": np.array(VECTOR, np.float32), "tabular": CELLS},
    {"vector": np.ones(6, np.float32)},
    {"tabular": {"age": None, "colour": "green"}},
    {},
]


def small_model(**settings: object) -> FusionModel:
    torch.manual_seed(0)
    settings = {"classes": ["a", "b", "c"], **settings}
    model = create_model("gmu", ENCODERS, dim=8, **settings)  # type: ignore[arg-type]
    return model.complete(prior=torch.tensor([0.2, 0.3, 0.5])).eval()


@pytest.fixture(scope="module")
def model() -> FusionModel:
    return small_model()


@pytest.fixture(scope="module")
def exported(model: FusionModel, tmp_path_factory: pytest.TempPathFactory) -> ExportFiles:
    return export(model, tmp_path_factory.mktemp("export") / "model")


def assert_same_answers(model: FusionModel, other: OnnxModel, samples: list[object]) -> None:
    answers = zip(model.predict(samples), other.predict(samples), strict=True)
    for expected, answer in answers:
        assert answer.label == expected.label
        assert answer.probabilities == pytest.approx(expected.probabilities, abs=1e-5)
    vectors = other.embed(samples)
    torch.testing.assert_close(vectors["fused"], model.embed(samples)["fused"])


def test_it_answers_and_embeds_as_the_model_on_every_subset(
    model: FusionModel, exported: ExportFiles
) -> None:
    assert exported.difference < 1e-5
    assert_same_answers(model, fz.load(exported.folder, runtime="onnx"), SAMPLES)


def test_the_inputs_have_fixed_names_and_free_sizes(exported: ExportFiles) -> None:
    session = OnnxModel(exported.folder)._session
    shapes = {one.name: one.shape for one in session.get_inputs()}
    assert set(shapes) == {
        "present",
        "vector.values",
        *(f"tabular.{name}" for name in ("values", "codes", "known")),
    }
    assert all(isinstance(shape[0], str) for shape in shapes.values())


def test_the_folder_says_how_values_are_prepared_and_labels_read(exported: ExportFiles) -> None:
    files = {x.name for x in exported.folder.iterdir()}
    assert files == {
        *("model.onnx", "preprocess.json", "labels.json", "digests.json", "example.py")
    }
    about = json.loads((exported.folder / "preprocess.json").read_text())["modalities"]
    assert about["vector"]["processor"] == {"by": "vector", "width": 6}
    assert about["tabular"]["processor"]["columns"][1]["values"] == ["blue", "red", "yellow"]
    (target,) = json.loads((exported.folder / "labels.json").read_text())["decode"]
    assert (target["classes"], target["first"], target["last"]) == (["a", "b", "c"], 0, 3)


def test_a_changed_file_is_named(model: FusionModel, exported: ExportFiles, tmp_path: Path) -> None:
    for file in exported.folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "labels.json").write_text("{}")
    with pytest.raises(FusionZooError, match=r"labels\.json was changed"):
        OnnxModel(tmp_path)


def test_the_example_answers_without_fusionzoo(model: FusionModel, exported: ExportFiles) -> None:
    script = exported.folder / "example.py"
    source = script.read_text()
    assert len(source.splitlines()) <= 170
    assert "fusionzoo" not in source
    code = (
        f"import json, runpy\nanswer = runpy.run_path({str(script)!r})['answer']\n"
        f"samples = [{{'vector': {VECTOR}, 'tabular': {CELLS}}}, {{}}]\n"
        "import sys; assert 'torch' not in sys.modules\n"
        "print(json.dumps([answer(sample) for sample in samples]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    expected = model.predict([SAMPLES[0], {}])
    for answer, wanted in zip(json.loads(done.stdout), expected, strict=True):
        assert answer["target"] == pytest.approx(wanted.probabilities, abs=1e-5)


TEMPLATE_NAMES = {  # what the template defines or imports
    x.name if isinstance(x, ast.FunctionDef) else x.names[0].name
    for x in ast.parse(EXAMPLE.read_text()).body
    if isinstance(x, ast.FunctionDef | ast.Import)
}


def test_the_example_for_every_kind_of_value_is_whole() -> None:
    """Whatever is left out, what remains names nothing that is gone."""
    kinds = {"image", "wave", "bytes", "tokenizer", "vector", "sequence", "tabular"}
    for kind in kinds:
        source = example({kind, "classification"}, {"fit": {"crop"}, "least": {0.1}})
        tree = ast.parse(source)
        functions = {x.name for x in tree.body if isinstance(x, ast.FunctionDef)}
        assert functions >= {kind, "classification", "answer"}
        names = {x.id for x in ast.walk(tree) if isinstance(x, ast.Name)}
        imported = {x.names[0].name for x in tree.body if isinstance(x, ast.Import)}
        known = {*functions, *imported, *dir(builtins)}
        assert names & TEMPLATE_NAMES <= known, kind
        assert functions - {kind, "classification", "answer"} <= names
        assert len(source.splitlines()) <= (170 if kind == "tabular" else 90)
        assert ("import math" in source) is (kind in ("wave", "image"))


def test_a_path_a_model_and_the_command_write_the_same(
    model: FusionModel, exported: ExportFiles, tmp_path: Path
) -> None:
    folder = model.save(tmp_path / "model")
    written = fz.export(folder)
    assert written.folder == tmp_path / "model" / "exported"
    assert main(["export", str(folder), "--out", str(tmp_path / "out")]) == 0
    for other in (written.folder, tmp_path / "out"):
        assert_same_answers(model, fz.load(other, runtime="onnx"), SAMPLES)
        about = (x / "preprocess.json" for x in (other, exported.folder))
        assert next(about).read_text() == next(about).read_text()


def test_a_model_in_training_mode_is_exported_as_it_answers(tmp_path: Path) -> None:
    model = small_model().train()
    written = fz.export(model, tmp_path / "out")
    assert model.training
    assert_same_answers(model.eval(), fz.load(written.folder, runtime="onnx"), SAMPLES)


def test_mistakes_name_the_settings_of_the_function(model: FusionModel, tmp_path: Path) -> None:
    with pytest.raises(FusionZooError, match="out= is missing"):
        fz.export(model)
    with pytest.raises(FusionZooError, match="Did you mean 'format='"):
        fz.export(model, tmp_path / "out", formt="onnx")
    with pytest.raises(FusionZooError, match="there is no such folder"):
        fz.export(tmp_path / "none")


def test_a_folder_in_use_is_not_overwritten(model: FusionModel, exported: ExportFiles) -> None:
    with pytest.raises(FusionZooError, match="is not empty"):
        export(model, exported.folder)


class Frozen(Sum):
    """A fusion whose graph adds a number that depends on the rows it was traced with."""

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        output = super().forward(features)
        return output._replace(logits=output.logits + int(output.logits.shape[0]))


def test_a_graph_that_froze_a_size_is_not_written(tmp_path: Path) -> None:
    model = small_model()
    model.fusion = Frozen({"vector": 8, "tabular": 8}, 8, 3).eval()
    with pytest.raises(FusionZooError):
        export(model, tmp_path / "out")
    assert [*tmp_path.iterdir()] == []


def test_a_graph_that_answers_otherwise_is_not_written(
    model: FusionModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def off(self: Fusion, features: Mapping[str, Features]) -> FusionOutput:
        output = original(self, features)
        wrong = 1e-3 if torch.compiler.is_exporting() else 0.0
        return output._replace(logits=output.logits + wrong)

    original = type(model.fusion).forward
    monkeypatch.setattr(type(model.fusion), "forward", off)
    with pytest.raises(FusionZooError, match=r"differs by 0\.00\d+ on every subset"):
        export(model, tmp_path / "out")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.slow
def test_torch_export_writes_a_program_that_answers_alike(
    model: FusionModel, tmp_path: Path
) -> None:
    export(model, tmp_path / "out", format="torch-export")
    program = torch.export.load(str(tmp_path / "out" / "model.pt2")).module()
    batch = model.batch(SAMPLES)
    with torch.no_grad():
        fused, logits, *_ = program(batch.present, batch.inputs)
        expected = model(batch)
    torch.testing.assert_close(fused, expected.embedding)
    torch.testing.assert_close(logits, expected.logits)


@pytest.mark.slow
def test_several_targets_of_every_kind_are_decoded(tmp_path: Path) -> None:
    targets = [
        Number("price", mean=3.0, deviation=2.0),
        AnyOf("tags", ("sea", "sun")),
        Level("stars", ("1", "2", "3")),
    ]
    torch.manual_seed(0)
    model = create_model("concat", ENCODERS, targets=targets, dim=8).eval()
    export(model, tmp_path / "out")
    other = OnnxModel(tmp_path / "out")
    (expected,), (answer,) = model.predict(SAMPLES[:1]), other.predict(SAMPLES[:1])
    assert answer["price"] == pytest.approx(expected["price"], abs=1e-5)
    assert answer["tags"].labels == expected["tags"].labels
    assert answer["stars"].label == expected["stars"].label
    code = (
        f"import json, runpy\nrun = runpy.run_path({str(tmp_path / 'out' / 'example.py')!r})\n"
        f"print(json.dumps(run['answer']({{'vector': {VECTOR}, 'tabular': {CELLS}}})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["price"] == pytest.approx(expected["price"], abs=1e-5)
    assert found["tags"] == pytest.approx(expected["tags"].probabilities, abs=1e-5)
    assert found["stars"] == pytest.approx(expected["stars"].probabilities, abs=1e-5)


@pytest.mark.slow
def test_models_of_several_seeds_are_one_graph(model: FusionModel, tmp_path: Path) -> None:
    other = small_model()
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    joined = join([model, other])
    export(joined, tmp_path / "out")
    assert_same_answers(joined, OnnxModel(tmp_path / "out"), SAMPLES)


class MeanOverTime(nn.Module):
    """An encoder that padding would change."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x - x.mean(1, keepdim=True))


@pytest.mark.slow
def test_rows_of_one_length_are_run_together_where_an_encoder_needs_that(tmp_path: Path) -> None:
    torch.manual_seed(0)
    encoder = fz.wrap_encoder(MeanOverTime(), dim=8, kind="sequence", blank=torch.zeros(1, 6))
    encoder.in_dim = 6  # type: ignore[assignment]
    model = create_model("concat", {"sequence": encoder}, 3, dim=8).eval()
    export(model, tmp_path / "out")
    rows = [torch.randn(length, 6) for length in (3, 5, 3, 4)]
    samples = [Sample(str(n), "", None, {"sequence": x}) for n, x in enumerate([*rows, None])]
    batch = model.collate()(samples)
    found = OnnxModel(tmp_path / "out").answer(batch)
    with torch.no_grad():
        torch.testing.assert_close(found["logits"], model(batch).logits)


def test_free_sizes_are_bounded_as_the_processor_bounds_them() -> None:
    encoder = fz.create_encoder("text", "chars", dim=16, num_layers=1, max_length=40)
    size, places = layout_of(encoder)
    assert (size.least, size.most) == (1, 40)  # type: ignore[union-attr]
    assert places == {"input_ids": 1, "attention_mask": 1}


def test_predict_writes_the_same_table_from_an_exported_folder(
    model: FusionModel, exported: ExportFiles, tmp_path: Path
) -> None:
    model.save(tmp_path / "model")
    table = pa.table(
        {
            "id": ["1", "2", "3"],
            "split": ["test"] * 3,
            "vector": pa.array([VECTOR, None, VECTOR[::-1]], pa.list_(pa.float32())),
            "age": [31.0, None, 50.0],
            "colour": ["red", "blue", None],
        }
    )
    pa.parquet.write_table(table, tmp_path / "data.parquet")
    data = ["--data.name", "manifest", "--data.root", str(tmp_path / "data.parquet")]
    data += ["--data.columns.tabular", "[age, colour]"]
    for words, out in (([str(tmp_path / "model")], "a"), ([str(exported.folder)], "b")):
        assert main(["predict", *words, *data, "--out", str(tmp_path / f"{out}.csv")]) == 0
    first, second = (pa.csv.read_csv(tmp_path / f"{x}.csv") for x in "ab")
    assert first.column_names == second.column_names
    assert first["label"] == second["label"]
    assert first["p_a"].to_pylist() == pytest.approx(second["p_a"].to_pylist(), abs=1e-5)


# ---- raw samples in an environment that holds neither torch nor fusionzoo


@pytest.fixture(scope="module")
def fresh_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an environment with what the example needs and nothing else."""
    folder = tmp_path_factory.mktemp("fresh")
    python = folder / "bin" / "python"
    needed = ["numpy", "onnxruntime", "pillow", "soundfile", "tokenizers"]
    try:
        for command in (
            [sys.executable, "-m", "venv", str(folder)],
            [str(python), "-m", "pip", "install", "-q", *needed],
        ):
            subprocess.run(command, check=True, capture_output=True, timeout=300)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"no fresh environment can be made here: {error}")
    for package in ("torch", "fusionzoo"):
        code = [str(python), "-c", f"import {package}"]
        done = subprocess.run(code, capture_output=True, check=False, cwd=folder)
        assert done.returncode != 0
    return python


def assert_the_example_agrees(
    model: FusionModel, out: ExportFiles, samples: list[dict[str, str]], python: Path, folder: Path
) -> None:
    script = out.folder / "example.py"
    assert len(script.read_text().splitlines()) <= 120
    (folder / "samples.json").write_text(json.dumps(samples))
    code = (
        f"import json, runpy\nanswer = runpy.run_path({str(script)!r})['answer']\n"
        f"samples = json.load(open({str(folder / 'samples.json')!r}))\n"
        "print(json.dumps([answer(sample)['target'] for sample in samples]))"
    )
    done = subprocess.run(
        [str(python), "-c", code], capture_output=True, text=True, check=False, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    expected = model.predict(samples)
    same, off = 0, 0.0
    for answer, wanted in zip(json.loads(done.stdout), expected, strict=True):
        same += max(answer, key=answer.__getitem__) == wanted.label
        off = max(off, *(abs(answer[k] - p) for k, p in wanted.probabilities.items()))
    print(f"{same} of {len(samples)} the same answers, probabilities within {off:.4f}")
    assert same >= 0.98 * len(samples)
    assert off <= 0.02


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits", "stamps"])
def test_a_fresh_environment_answers_raw_samples_as_the_model_does(
    name: str, fresh_python: Path, tmp_path: Path
) -> None:
    try:
        dataset = fz.create_dataset(name)
    except FusionZooError as error:
        pytest.skip(f"{name} is not here: {error}")
    config = {"config": "stamps"} if name == "stamps" else {"data": "digits"}
    run = fz.train(**config, epochs=1, out=tmp_path / "run")  # type: ignore[arg-type]
    model = run.model.to("cpu")
    out = export(model, tmp_path / "out")
    (tmp_path / "raw").mkdir()
    samples = raw_files(dataset.split("test"), tmp_path / "raw", 50)
    assert_the_example_agrees(model, out, samples, fresh_python, tmp_path)


def as_digests_say(folder: Path) -> Path:
    """Write the digests of changed files anew, as one who means harm would."""
    write_digests(folder, [x for x in folder.iterdir() if x.name != "digests.json"])
    return folder


@pytest.mark.parametrize("what", ["two answers", "equal answers", "a number", "nothing", "cut off"])
def test_a_folder_that_was_altered_is_one_clear_error(
    what: str, exported: ExportFiles, tmp_path: Path
) -> None:
    folder = shutil.copytree(exported.folder, tmp_path / "altered")
    labels = json.loads((folder / "labels.json").read_text())
    classes = {"two answers": ["a", "b", "c", "d"], "equal answers": ["a"] * len(labels["classes"])}
    if what == "cut off":
        (folder / "model.onnx").write_bytes((folder / "model.onnx").read_bytes()[:1000])
    elif what == "nothing":
        (folder / "preprocess.json").write_text(json.dumps({"format": FORMAT}))
    else:
        labels["classes"] = classes.get(what, 3)
        (folder / "labels.json").write_text(json.dumps(labels))
    says = r"no whole export, export the model again: |labels.json has \d answers, the graph"
    with pytest.raises(FusionZooError, match=says):
        fz.load(as_digests_say(folder), runtime="onnx")


def test_weights_beside_the_graph_are_not_read(exported: ExportFiles, tmp_path: Path) -> None:
    import onnx

    folder = shutil.copytree(exported.folder, tmp_path / "altered")
    graph = onnx.load(str(folder / "model.onnx"))
    onnx.save(graph, str(folder / "model.onnx"), save_as_external_data=True, size_threshold=0)
    with pytest.raises(FusionZooError, match="no whole export"):
        fz.load(as_digests_say(folder), runtime="onnx")
