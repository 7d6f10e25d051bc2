"""Towers of open_clip's models: they answer, prepare and tokenise as open_clip does."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import fusionzoo
from fusionzoo.encoders import create_encoder
from fusionzoo.errors import FusionZooError
from fusionzoo.structures import Sample
from fusionzoo.testing.encoders import CHECKS, features_of, maker
from helpers import hub_stand_in as hub
from helpers import tiny_models as tiny
from helpers.pictures import SHAPES, off

pytestmark = pytest.mark.needs("open_clip", extra="open-clip")
TEXTS = ["a red cat", "a much longer line of text!!", "", "text " * 40]
QUICK = [("clip", "image"), ("clip", "text"), ("bert", "text")]  # the others are slow tests
PILLOW = 2.01 / 255  # by which its resizing differs from torch's


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: tiny.save_open_clip(tmp_path_factory.mktemp("open_clip") / name, name)
        for name in tiny.OPEN_CLIP
    }


def pillow(image: Tensor) -> Image.Image:
    return Image.fromarray(np.asarray(image.permute(1, 2, 0)))


def whole(folder: Path) -> Any:
    import open_clip

    changes: dict[str, Any] = {}
    if folder.name == "bert":
        text = open_clip.get_model_config(f"local-dir:{folder}")["text_cfg"]
        changes["text_cfg"] = {**text, "hf_model_name": str(folder), "hf_model_pretrained": False}
    return open_clip.create_model(f"local-dir:{folder}", **changes).eval()


@pytest.mark.parametrize("name", tiny.OPEN_CLIP)
def test_pooled_vectors_are_those_of_open_clip(name: str, folders: dict[str, Path]) -> None:
    import open_clip

    folder = folders[name]
    model, tokenizer = whole(folder), open_clip.get_tokenizer(f"local-dir:{folder}")
    options = {"normalize": False}
    image: Any = create_encoder("image", f"open_clip/{folder}").eval()
    text = create_encoder("text", f"open_clip/{folder}").eval()
    pictures = torch.randint(256, (2, 3, *image.preparation.size), dtype=torch.uint8)
    from_text = features_of(text, TEXTS)
    with torch.no_grad():
        from_image = image({"pixels": pictures})
        pixels = image.normalise(pictures)
        torch.testing.assert_close(
            from_image.pooled, model.encode_image(pixels, **options), rtol=0, atol=1e-5
        )
        torch.testing.assert_close(
            from_text.pooled, model.encode_text(tokenizer(TEXTS), **options), rtol=0, atol=1e-5
        )
    assert from_image.tokens.shape == (2, {"resnet": 1, "bert": 100}.get(name, 4), 12)
    if name == "timm":  # it pools by the mean
        torch.testing.assert_close(from_image.tokens.mean(1), from_image.pooled)
    assert from_text.tokens.shape[1] == tokenizer(TEXTS).shape[1]


@pytest.mark.parametrize("name", ["clip", "bert"])
def test_the_token_that_is_pooled_is_the_pooled_vector(name: str, folders: dict[str, Path]) -> None:
    """CLIP pools the last real token, BERT the first."""
    encoder = create_encoder("text", f"open_clip/{folders[name]}").eval()
    out = features_of(encoder, TEXTS)
    last = out.mask.sum(1) - 1 if name == "clip" else torch.zeros(4, dtype=torch.long)
    torch.testing.assert_close(out.tokens[torch.arange(4), last], out.pooled)


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_images_are_prepared_as_open_clip_prepares_them(
    name: str, folders: dict[str, Path]
) -> None:
    import open_clip

    folder = folders[name]
    _, transform = open_clip.create_model_from_pretrained(f"local-dir:{folder}")
    encoder: Any = create_encoder("image", f"open_clip/{folder}")
    for shape in SHAPES:
        assert off(encoder, lambda x: transform(pillow(x)), shape) < PILLOW


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=[pytest.mark.slow] * ((name, kind) not in QUICK))
        for name in tiny.OPEN_CLIP
        for kind in ("image", "text")
    ],
)
def test_a_trained_model_answers_alike_once_it_is_loaded(
    name: str, kind: str, folders: dict[str, Path]
) -> None:
    make = maker(f"open_clip/{folders[name]}", {"kind": kind})
    CHECKS["a_trained_model_answers_alike_once_it_is_loaded"](make)


@pytest.mark.parametrize("name", ["clip", "bert"])
def test_both_towers_come_from_one_reading_and_need_the_source_no_more(
    name: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import open_clip

    source = shutil.copytree(folders[name], tmp_path / name)
    create = Mock(wraps=open_clip.create_model)
    monkeypatch.setattr(open_clip, "create_model", create)
    spec = f"open_clip/{source}"
    model = fusionzoo.create_model("concat", {"image": spec, "text": spec}, 2).eval()
    assert create.call_count == 1
    picture = torch.randint(256, (3, 40, 50), dtype=torch.uint8)
    values: list[dict[str, Any]] = [
        {"image": picture, "text": TEXTS[0]},
        {"image": None, "text": TEXTS[1]},
        {"image": picture, "text": None},
    ]
    batch = model.collate()([Sample(str(n), "", None, x) for n, x in enumerate(values)])
    saved = model.save(tmp_path / "saved")
    shutil.rmtree(source)
    loaded = fusionzoo.load(saved)
    assert create.call_count == 1
    with torch.no_grad():
        assert torch.equal(loaded(batch).logits, model(batch).logits)
    again, before = (dict(x.named_encoders())["text"].processor(False) for x in (loaded, model))
    for text in TEXTS:
        assert torch.equal(again(text)["input_ids"], before(text)["input_ids"])


@pytest.mark.parametrize("is_listed", [True, False])
def test_weights_of_the_hub_are_downloaded_and_cached(
    is_listed: bool, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import open_clip

    folder = folders["clip"]
    hub.publish(folder, "me/mine", tmp_path, monkeypatch)
    spec: dict[str, Any] = {"name": "open_clip/hf-hub:me/mine"}
    if is_listed:
        config = open_clip.get_model_config(f"local-dir:{folder}")
        about = {"hf_hub": "me/mine/", "mean": (0.1, 0.2, 0.3), "quick_gelu": True}
        monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, "mine", config)
        monkeypatch.setitem(open_clip.pretrained._PRETRAINED, "mine", {"first": about})
        spec = {"name": "open_clip/mine", "tag": "first"}
    expected = create_encoder("text", f"open_clip/{folder}").state_dict()
    for _ in range(2):  # the second time from the cache: the hub has no such model any more
        state = create_encoder("text", **spec).state_dict()
        assert all(torch.equal(state[name], x) for name, x in expected.items())
        monkeypatch.setitem(hub.REPOS, "me/mine", None)
    encoder: Any = create_encoder("image", **spec)
    assert encoder.preparation.mean[0] == (0.1 if is_listed else 0.48145466)


def edit(folder: Path, part: str, **changes: Any) -> None:
    path = folder / "open_clip_config.json"
    about = json.loads(path.read_text())
    (about[part] if part else about).update(changes)
    path.write_text(json.dumps(about))


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, r"open_clip has no model .* and there is no such folder"),
    "no configuration": (lambda x: (x / "open_clip_config.json").unlink(), r"is missing: which"),
    "no model_cfg": (lambda x: edit(x, "", model_cfg=1), r"has no model_cfg with vision_cfg and"),
    "no weights": (lambda x: (x / "open_clip_model.safetensors").unlink(), r"Required pretrained"),
    "another width": (lambda x: edit(x, "model_cfg", embed_dim=10), r"cannot be loaded: .*size mi"),
    "bars at the sides": (lambda x: edit(x, "preprocess_cfg", resize_mode="longest"), r"'longest'"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_that_makes_no_model_is_one_line(
    fault: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fusionzoo.encoders.weights.is_reachable", None)  # no hub is asked
    source = shutil.copytree(folders["clip"], tmp_path / "source")
    spoil, says = FAULTS[fault]
    spoil(source)
    with pytest.raises(FusionZooError, match=says) as caught:
        create_encoder("image", f"open_clip/{source}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"image_size": 8}, r"cannot encode what it prepares: "),
        ({"timm_model_name": "hf-hub:me/mine"}, r"timm has no model 'hf-hub:me/mine'"),
    ],
)
def test_a_tower_that_cannot_run_is_one_line(
    changes: dict[str, Any], says: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    source = shutil.copytree(folders["bert"], tmp_path / "source")
    config = json.loads((source / "open_clip_config.json").read_text())["model_cfg"]
    edit(source, "model_cfg", vision_cfg={**config["vision_cfg"], **changes})
    with pytest.raises(FusionZooError, match=says) as caught:
        create_encoder("image", f"open_clip/{source}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "settings", "says"),
    [
        ("ViT-B-32", {}, r"needs tag=, the name of its weights. There are: openai, .*laion2b_s34b"),
        ("ViT-B-32", {"tag": "laion2b"}, r"has no tag 'laion2b'. Did you mean 'laion2b_e16'"),
        ("ViT-B-32", {"tag": "openai"}, r"another activation: name open_clip/ViT-B-32-quickgelu"),
        ("ViT-B-23", {}, r"open_clip has no model 'ViT-B-23', .* Did you mean 'ViT-B-32'"),
        ("ViT-B-32", {"tag": "laion2b_s34b_b79k"}, r"cannot reach .* 'open_clip/ViT-B-32'"),
        ("hf-hub:me/mine", {}, r"cannot reach .* 'open_clip/hf-hub:me/mine'"),
    ],
)
def test_a_name_without_weights_is_one_line(
    model: str, settings: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fusionzoo.encoders.weights.is_reachable", lambda _: False)
    with pytest.raises(FusionZooError, match=says) as caught:
        create_encoder("image", f"open_clip/{model}", **settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
@pytest.mark.parametrize("kind", ["image", "text"])
def test_code_in_a_folder_never_runs_even_if_standard_input_agrees(
    kind: str, file: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = shutil.copytree(folders["bert"], tmp_path / "source")
    mark = tmp_path / "ran"
    (source / "planted.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Planted: ...\n")
    about = json.loads((source / file).read_text())
    about |= {"tokenizer_class": "Planted", "model_type": "planted"}
    loaders = {"AutoTokenizer": ["planted.Planted"] * 2, "AutoConfig": "planted.Planted"}
    (source / file).write_text(json.dumps({**about, "auto_map": loaders}))
    config = json.loads((source / "open_clip_config.json").read_text())["model_cfg"]["text_cfg"]
    edit(source, "model_cfg", text_cfg={**config, "tokenizer_kwargs": {"trust_remote_code": True}})
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    try:
        create_encoder(kind, f"open_clip/{source}")
    except FusionZooError as error:
        assert "custom code" in str(error) and "\n" not in str(error)
    assert not mark.exists()
