"""A model folder whose config.json was changed: it loads and answers, or one line says why not."""

from __future__ import annotations

import copy
import csv
import json
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import fusionzoo
from fusionzoo.encoders._torchaudio import torchaudio_or_none
from fusionzoo.errors import FusionZooError
from fusionzoo.model.folder import FORMAT, files_of_model, write_digests
from fusionzoo.model.fusion_model import FusionModel, UnimodalHeads, create_model
from fusionzoo.model.loading import _check_finite
from fusionzoo.model.standardise import Standardise
from fusionzoo.model.trained_on import Row, RunResults, TrainedOn
from fusionzoo.targets import Level, Number, OneOf

NET = {"pretrained": False, "channels": [8, 8, 8, 8], "stem_width": 8}
ENCODERS: dict[str, dict[str, dict[str, Any]]] = {
    "words": {
        "text": {"name": "chars", "dim": 8, "num_layers": 1, "num_heads": 2, "max_length": 20},
        "table": {"name": "vector/mlp", "kind": "vector", "in_dim": 3, "dim": 8, "hidden": 8},
        "steps": {
            "name": "sequence/transformer",
            "kind": "sequence",
            **{"in_dim": 3, "dim": 8, "num_layers": 1, "num_heads": 2, "max_length": 9},
        },
    },
    "image": {"image": {"name": "timm/resnet10t", "size": 32, **NET}},
    "audio": {
        "audio": {"name": "mel/resnet10t", "rate": 8000, "num_mels": 20, "duration": 0.3, **NET}
    },
    "stats": {"audio": {"name": "mel/stats", "rate": 8000, "num_mels": 20, "longest": 0.3}},
    "conformer": {
        "audio": {
            "name": "torchaudio/conformer",
            **{"dim": 8, "num_layers": 1, "num_heads": 2, "num_mels": 20, "longest": 0.3},
        }
    },
}
TARGETS = [
    OneOf("weather", classes=("rain", "sun")),
    Number("price", mean=2.0, deviation=3.0),
    Level("size", classes=("1", "2", "3")),
]
SAMPLE: dict[str, Any] = {
    "text": "a red thing of some length",
    "table": np.ones(3, np.float32),
    "steps": np.ones((4, 3), np.float32),
    "image": np.full((20, 30, 3), 200, np.uint8),
    "audio": (0.1 * np.sin(np.arange(9000) / 7).astype(np.float32), 8000),
}


def build(group: str) -> FusionModel:
    torch.manual_seed(0)
    if group == "words":
        return create_model({"name": "lmf", "dim": 8, "rank": 2}, ENCODERS[group], targets=TARGETS)
    return create_model({"name": "gmu", "dim": 8}, ENCODERS[group], classes=["cat", "dog"])


def leaves(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every mapping, list and value in a JSON tree."""
    if path:
        yield path
    lists = enumerate(tree) if isinstance(tree, list) else ()
    for key, value in tree.items() if isinstance(tree, dict) else lists:
        yield from leaves(value, (*path, key))


def spoil(config: dict[str, Any], path: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    """Yield copies in which one entry is gone, of another type, huge, or negative."""

    def changed() -> tuple[dict[str, Any], Any]:
        whole = copy.deepcopy(config)
        branch: Any = whole
        for key in path[:-1]:
            branch = branch[key]
        return whole, branch

    whole, branch = changed()
    del branch[path[-1]]
    yield whole
    for value in (None, "words", [], {}, True, 0, -1, 10**6, 10**40):
        whole, branch = changed()
        branch[path[-1]] = value
        yield whole


SECTIONS = ["format", "classes", "num_outputs", "fusion", "kinds", "targets", "encoders", "align"]
CASES = [
    *[("words", part) for part in (*SECTIONS, *ENCODERS["words"])],
    ("stats", "audio"),
    pytest.param("image", "image", marks=pytest.mark.slow),
    pytest.param("audio", "audio", marks=pytest.mark.slow),
    pytest.param("conformer", "audio", marks=[pytest.mark.slow, pytest.mark.torchaudio]),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders without digests, which would name every change before anything else is checked."""
    root = tmp_path_factory.mktemp("folders")
    groups = [x for x in ENCODERS if x != "conformer" or torchaudio_or_none() is not None]
    saved = {group: build(group).save(root / group) for group in groups}
    for folder in saved.values():
        (folder / "digests.json").unlink()
    return saved


def test_a_full_disk_is_one_error_and_keeps_the_model_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise SafetensorError("No space left on device")

    encoder = {"name": "vector/mlp", "kind": "vector", "in_dim": 3, "dim": 8, "hidden": 8}
    model = create_model({"name": "gmu", "dim": 8}, {"vector": encoder}, classes=["a", "b"])
    before = (model.save(tmp_path) / "model.safetensors").read_bytes()
    monkeypatch.setattr("safetensors.torch.save_model", full)
    with pytest.raises(OSError, match=r"model\.safetensors cannot be written: No space left"):
        model.save(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(("group", "part"), CASES)
def test_a_changed_config_loads_and_answers_or_is_one_line(
    group: str, part: str, folders: dict[str, Path]
) -> None:
    """Each entry of a top-level key, or of one encoder, is spoilt in turn."""
    folder = folders[group]
    config = json.loads((folder / "config.json").read_text())
    deep = {path for path in leaves(config) if path[:2] == ("encoders", part)}
    paths = deep or {path for path in leaves(config) if path[0] == part and len(path) < 5}
    if part == "encoders":
        paths = {path for path in paths if len(path) < 3}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for path in sorted(paths, key=str):
        for spoilt in spoil(config, path):
            with config_of(folder, json.dumps(spoilt)):
                answers_or_is_refused(folder)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after - before < 300_000  # kB


@contextmanager
def config_of(folder: Path, text: str | None = None, **changes: Any) -> Iterator[Path]:
    """Replace a folder's config.json, or some of its keys, for a while."""
    config = folder / "config.json"
    whole = config.read_text()
    config.write_text(json.dumps(json.loads(whole) | changes) if text is None else text)
    try:
        yield folder
    finally:
        config.write_text(whole)


def answers_or_is_refused(folder: Path) -> None:
    try:
        model = fusionzoo.load(folder)
    except FusionZooError as error:
        assert "\n" not in str(error)
        assert str(folder) in str(error)
    else:
        samples = [{name: SAMPLE[name] for name in model.modalities}]
        model.predict(samples) if model.classes or model.targets else model.embed(samples)


@pytest.mark.parametrize(
    ("group", "config", "says"),
    [
        ("stats", '{"format": 1', "config.json cannot be read as JSON"),
        ("stats", "[" * 100_000, "config.json cannot be read as JSON"),
        ("stats", "[]", "config.json must hold a JSON object, found list"),
        ("stats", '{"format": 3}', "format 3 is that of a newer fusionzoo; 0.1.0 reads formats up"),
        ("stats", '{"format": 1}', "num_outputs: field required"),
        ("stats", '{"format": 1, "format": 1}', "key 'format' occurs twice in one object"),
        ("stats", '{"format": 1, "num_outputs": NaN}', "NaN is no number in JSON"),
        ("stats", '{"format": 1, "num_output": 2}', "'num_output'. Did you mean 'num_outputs'?"),
        ("stats", {"classes": ["cat"]}, "num_outputs is 2, and the classes make 1"),
        ("stats", {"fusion": {"name": "gmu", "dim": 10**9}}, "far larger tensors than"),
        ("stats", {"fusion": {"name": "gmu", "dim": 16}}, "size mismatch"),
        ("stats", {"prior": [1.0]}, "prior must be 2 finite numbers"),
        ("stats", {"prior": [-1.0, 2.0]}, "prior must be 2 finite numbers of at least 0"),
        ("words", {"num_outputs": 7}, "num_outputs is 7, and the targets make 5"),
        ("words", {"kinds": {"pose": "vector"}}, "kinds names 'pose', which has no encoder"),
        ("words", {"kinds": {"text": "smell"}}, "kinds.text is 'smell', none of image, text"),
        ("stats", {"encoders": {"../a": {"name": "chars"}}}, "'../a' is no name of a modality"),
        ("stats", {"plugins": "my_file.py"}, "plugins: input should be a valid array"),
        ("stats", {"plugins": [1]}, "plugins.0: input should be a valid string"),
    ],
)
def test_a_config_that_does_not_fit_is_one_line_before_anything_large_is_allocated(
    group: str, config: str | dict[str, Any], says: str, folders: dict[str, Path]
) -> None:
    changes = {"text": config} if isinstance(config, str) else config
    with config_of(folders[group], **changes) as folder, pytest.raises(FusionZooError) as caught:
        fusionzoo.load(folder)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_setting_of_an_encoder_never_asks_a_hub(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its `pretrained` the default would be true."""
    encoders = json.loads((folders["image"] / "config.json").read_text())["encoders"]
    del encoders["image"]["pretrained"]
    monkeypatch.setattr("fusionzoo.encoders.weights.from_hub", lambda *_: pytest.fail("asked"))
    with config_of(folders["image"], encoders=encoders) as folder:
        fusionzoo.load(folder)


def test_a_folder_without_its_tokenizer_asks_no_hub(folders: dict[str, Path]) -> None:
    encoders = json.loads((folders["words"] / "config.json").read_text())["encoders"]
    encoders["text"] = {"name": "hf/somebody/something", "kind": "text"}
    with config_of(folders["words"], encoders=encoders) as folder:  # noqa: SIM117
        with pytest.raises(FusionZooError, match=r"text is missing: the model folder is not comp"):
            fusionzoo.load(folder)


def test_a_checkpoint_that_a_config_names_is_not_opened(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    encoders = json.loads((folders["image"] / "config.json").read_text())["encoders"]
    (tmp_path / "pickle.pth").write_bytes(b"not even a pickle")
    encoders["image"]["checkpoint_path"] = str(tmp_path / "pickle.pth")
    with config_of(folders["image"], encoders=encoders) as folder:
        loaded = fusionzoo.load(folder)
    expected = fusionzoo.load(folders["image"]).state_dict()
    assert all(torch.equal(x, expected[key]) for key, x in loaded.state_dict().items())


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return build("words").save(tmp_path / "model")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_that_was_changed_is_named(name: str, saved: Path) -> None:
    fusionzoo.load(saved)
    contents = (saved / name).read_bytes()
    (saved / name).write_bytes(contents[:-1] + bytes([contents[-1] ^ 42]))  # a space in config.json
    with pytest.raises(FusionZooError, match=rf"{name} was changed since the model was saved"):
        fusionzoo.load(saved)


def test_a_file_that_is_missing_or_was_added_is_named(saved: Path) -> None:
    digests = json.loads((saved / "digests.json").read_text())
    digests["files"]["text/tokenizer.json"] = "0"
    (saved / "digests.json").write_text(json.dumps(digests))
    with pytest.raises(FusionZooError, match=r"tokenizer\.json is missing: .*digests\.json lists"):
        fusionzoo.load(saved)
    del digests["files"]["text/tokenizer.json"]
    (saved / "digests.json").write_text(json.dumps(digests))
    (saved / "README.md").write_text("a model of mine")
    fusionzoo.load(saved)
    (saved / "text").mkdir()
    (saved / "text" / "added_tokens.json").write_text("{}")
    with pytest.raises(FusionZooError, match=r"added_tokens\.json was added since"):
        fusionzoo.load(saved)


@pytest.mark.parametrize(
    "contents",
    [
        *("", "[]", '{"algorithm": "md5", "files": {}}'),
        '{"algorithm": "sha256", "files": {"../secret.txt": "0"}}',
        '{"algorithm": "sha256", "files": {"/etc/passwd": "0"}}',
        '{"algorithm": "sha256", "files": {"config.json": 1}}',
    ],
)
def test_digests_that_cannot_be_read_are_one_line(contents: str, saved: Path) -> None:
    (saved / "digests.json").write_text(contents)
    with pytest.raises(FusionZooError, match=r"digests\.json cannot be read: ") as caught:
        fusionzoo.load(saved)
    assert "\n" not in str(caught.value)


def test_digests_cover_the_config_and_the_weights(saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    tensors["fusion.head.bias"] = tensors["fusion.head.bias"].flip(0)
    save_file(tensors, saved / "model.safetensors")
    digests = json.loads((saved / "digests.json").read_text())
    for missing in ("model.safetensors", "config.json"):
        del digests["files"][missing]
        (saved / "digests.json").write_text(json.dumps(digests))
        with pytest.raises(FusionZooError, match=r"digests.json has no digest of .*: copy"):
            fusionzoo.load(saved)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_by_name(value: float, saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    tensors["fusion.head.weight"][0, 1] = value
    save_file(tensors, saved / "model.safetensors")
    write_digests(saved, files_of_model(saved, []))
    message = r"model.safetensors: fusion.head.weight has 1 of [\d,]+ values that are not finite"
    with pytest.raises(FusionZooError, match=message):
        fusionzoo.load(saved)


def test_large_weights_and_infinite_masks_load(saved: Path) -> None:
    model = fusionzoo.load(saved)
    with torch.no_grad():
        model.fusion.head.weight.fill_(3e38)  # type: ignore[union-attr]
    model.fusion.register_buffer("mask", torch.tensor([float("-inf")]))
    _check_finite(model, saved)


def test_a_folder_of_an_earlier_version_loads_and_says_that_it_is_unchecked(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (saved / "digests.json").unlink()
    fusionzoo.load(saved)
    assert "has no digests.json (saved by an earlier version)" in caplog.text


# ---- formats of earlier versions


# What model-0.1.0 says of a photo was recorded again when images came to be resized as timm does.
FIXTURES = Path(__file__).parents[1] / "fixtures"
FOLDERS = sorted(FIXTURES.glob("model-*"))
TRAINED = sorted(FIXTURES.glob("trained-*"))
OLDER: dict[str, dict[str, Any]] = {
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
    model = create_model({"name": "gmu", "dim": 8}, OLDER, targets=targets)
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
    rows = csv.DictReader(new.read_text().splitlines())
    without_id = [{name: row[name] for name in ("weight", "ward", "note")} for row in rows]
    again = [row.probabilities["severe"] for row in fusionzoo.load(model).predict(without_id)]
    assert_near(again, [row["p_severe"] for row in expected["predictions"]], tolerance=1e-4)


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
