"""Models that timm saved, in a folder or on the hub: built, prepared, refused, saved again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import fusionzoo
from fusionzoo.encoders import create_encoder
from fusionzoo.errors import FusionZooError
from fusionzoo.testing.encoders import CHECKS, maker
from helpers import hub_stand_in as hub

MEAN, STD = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained classifier of seven classes, with a preparation and an argument of its own."""
    import timm

    torch.manual_seed(0)
    net = timm.create_model("test_vit", num_classes=7, img_size=64)
    data = {"input_size": (3, 64, 64), "mean": MEAN, "std": STD, "crop_pct": 0.8}
    folder = tmp_path_factory.mktemp("timm") / "mine"
    timm.models.save_for_hf(net, str(folder), safe_serialization=True, data_config=data)
    return folder


def features(encoder: Any, image: Tensor) -> Tensor:
    with torch.no_grad():
        pooled: Tensor = encoder.eval()({"pixels": image[None]}).pooled
    return pooled


def pixels() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(256, (3, 64, 64), dtype=torch.uint8, generator=generator)


def expected(folder: Path, image: Tensor) -> Tensor:
    import timm

    net = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    mean, std = (torch.tensor(x)[:, None, None] for x in (MEAN, STD))
    with torch.no_grad():
        hidden = net.forward_features((image[None] / 255 - mean) / std)
        pooled: Tensor = net.forward_head(hidden, pre_logits=True)
    return pooled


def test_a_folder_gives_its_weights_and_its_preparation(folder: Path) -> None:
    encoder: Any = create_encoder("image", f"timm/{folder}")
    preparation = encoder.preparation
    assert (preparation.size, preparation.mean, preparation.std) == ((64, 64), MEAN, STD)
    assert preparation.resized == (80, 80)
    torch.testing.assert_close(features(encoder, pixels()), expected(folder, pixels()))
    random = create_encoder("image", f"timm/{folder}", pretrained=False)
    assert not torch.allclose(features(random, pixels()), expected(folder, pixels()))


def test_a_trained_model_answers_alike_once_it_is_loaded(folder: Path) -> None:
    CHECKS["a_trained_model_answers_alike_once_it_is_loaded"](maker(f"timm/{folder}"))


def test_a_model_folder_needs_the_source_no_more(folder: Path, tmp_path: Path) -> None:
    source = shutil.copytree(folder, tmp_path / "source")
    model = fusionzoo.create_model("concat", {"image": f"timm/{source}"}, 2)
    saved = model.save(tmp_path / "saved")
    shutil.rmtree(source)
    loaded: Any = fusionzoo.load(saved)
    assert str(tmp_path) not in (saved / "config.json").read_text()
    assert torch.equal(
        features(loaded.encoders["image"], pixels()), features(model.encoders["image"], pixels())
    )
    (saved / "image" / "config.json").unlink()
    (saved / "digests.json").unlink()
    with pytest.raises(FusionZooError, match=r"image/config.json is missing: the model folder is"):
        fusionzoo.load(saved)


def edit(folder: Path, **changes: Any) -> None:
    about = json.loads((folder / "config.json").read_text())
    about.update(changes)
    (folder / "config.json").write_text(json.dumps(about))


def keep_weights(folder: Path, keeps: Callable[[str], bool]) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({k: x for k, x in weights.items() if keeps(k)}, folder / "model.safetensors")


def config(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "config.json").write_text(text)


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, r"there is no folder .*; timm/hf-hub:<owner>/<model> takes a"),
    "no config.json": (lambda x: (x / "config.json").unlink(), r"the folder has no config.json"),
    "no JSON": (config("{"), r"cannot be read as JSON"),
    "another library's": (config('{"model_type": "vit"}'), r"names no architecture of timm"),
    "an unknown architecture": (lambda x: edit(x, architecture="test_vti"), r"Did you mean 'test"),
    "an argument that it does not take": (lambda x: edit(x, model_args={"a": 1}), r"cannot build"),
    "no weights": (lambda x: (x / "model.safetensors").unlink(), r"No suitable checkpoints"),
    "a weight less": (
        lambda x: keep_weights(x, lambda name: name != "norm.weight"),
        r"norm.weight",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_that_makes_no_model_is_one_line(
    fault: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fusionzoo.encoders.weights.is_reachable", None)  # no hub is asked
    source = shutil.copytree(folder, tmp_path / "source")
    spoil, says = FAULTS[fault]
    spoil(source)
    with pytest.raises(FusionZooError, match=says) as caught:
        create_encoder("image", f"timm/{source}")
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_prefix_is_told_its_prefix(folder: Path) -> None:
    with pytest.raises(FusionZooError, match=f"Did you mean 'timm/{folder}'"):
        create_encoder("image", str(folder))


def test_a_model_of_the_hub_is_downloaded_and_cached(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.publish(folder, "me/mine", tmp_path, monkeypatch)
    for _ in range(2):  # the second time from the cache: the hub has no such model any more
        encoder = create_encoder("image", "timm/hf-hub:me/mine")
        torch.testing.assert_close(features(encoder, pixels()), expected(folder, pixels()))
        monkeypatch.setitem(hub.REPOS, "me/mine", None)
    with pytest.raises(FusionZooError, match="the hub did not return the weights of 'timm/hf-hub"):
        create_encoder("image", "timm/hf-hub:me/other")
