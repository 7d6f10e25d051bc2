"""Models of libraries whose folders could once not be written or read: saved, loaded, equal."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fusionzoo
from fusionzoo.encoders import create_encoder
from fusionzoo.errors import FusionZooError
from fusionzoo.model.loading import SIZES, SPARE, TENSOR, bounded_allocation
from fusionzoo.testing.encoders import CHECKS, features_of, maker
from helpers import hub_stand_in as hub
from helpers import tiny_models as tiny
from helpers.tiny_models import SMALL, TEXT, tokenizer

DECODER = {**TEXT, "num_key_value_heads": 2, "head_dim": 8}
CONFIGS: dict[str, dict[str, Any]] = {
    "NomicBert": TEXT,  # transformers splits its weights: parameters are views of one tensor
    "T5Gemma": {part: DECODER for part in ("encoder", "decoder")},  # its encoder has a config alone
    "Canine": {**SMALL, "num_hash_buckets": 16},  # it takes no fewer than four tokens
    "Reformer": {  # its tokens are twice as wide as config.hidden_size
        **{"hidden_size": 16, "attn_layers": ["local"], "num_attention_heads": 2},
        **{"attention_head_size": 8, "feed_forward_size": 16, "vocab_size": 16, "pad_token_id": 0},
        **{"axial_pos_shape": [4, 32], "axial_pos_embds_dim": [8, 8]},
    },
    "XLNet": {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16, "vocab_size": 16},
}
RANDOM: dict[str, Any] = {"pretrained": False}
CAUSES: dict[str, tuple[str, dict[str, Any]]] = {  # what once kept a model from being used or read
    "rows that depend on padding": ("hf/FNet", {"kind": "text"}),
    "four tokens at least": ("hf/Canine", {"kind": "text"}),
    "weights that are views of one tensor": ("hf/NomicBert", {"kind": "text"}),
    "a width that is not hidden_size": ("hf/XLNet", {"kind": "text"}),
    "half of an encoder-decoder": ("hf/T5Gemma", {"kind": "text"}),
    "features as long as the clip": ("hf/moonshine", {"kind": "audio"}),
    "a mask of the features": ("hf/audioflamingo3_encoder", {"kind": "audio"}),
    "a tower among others": ("hf-clip/blip", {"kind": "text"}),
    "a mel spectrogram for a model of one size": ("mel/test_vit", RANDOM),
    "a dropped classifier of ten times the rest": ("torchvision/alexnet", RANDOM),
    "a class that wants its weights' version": ("torchvision/mnasnet0_5", RANDOM),
    "a head that nothing calls": ("timm/mobilenetv3_small_050", {**RANDOM, "size": 64}),
    "a net that reads its layers' weights": (
        "timm/eva02_tiny_patch14_224",
        {**RANDOM, "img_size": 56, "lora": {"r": 2}},
    ),
}


def text_folder(folder: Path, family: str) -> Path:
    """Write a tiny model of transformers with its tokenizer."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**CONFIGS.get(family, TEXT))
    transformers.AutoModel.from_config(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "cause",
    [
        pytest.param(x, marks=[pytest.mark.needs("peft")] * ("lora" in settings))
        for x, (_, settings) in CAUSES.items()
    ],
)
def test_a_trained_model_answers_alike_once_it_is_loaded(cause: str, tmp_path: Path) -> None:
    target, settings = CAUSES[cause]
    library, _, family = target.partition("/")
    if library == "hf":
        write = text_folder if settings["kind"] == "text" else tiny.save_sound
        target = f"hf/{write(tmp_path, family)}"
    elif library == "hf-clip":
        target = f"hf-clip/{tiny.save_joint(tmp_path, family)}"
    CHECKS["a_trained_model_answers_alike_once_it_is_loaded"](maker(target, settings))


@pytest.mark.parametrize(
    ("family", "by_length"), [("FNet", True), ("Canine", True), ("Bert", False)]
)
def test_a_text_is_encoded_alike_beside_a_longer_one(
    family: str, by_length: bool, tmp_path: Path
) -> None:
    """FNet mixes all positions of a row, the padding too."""
    encoder = create_encoder("text", f"hf/{text_folder(tmp_path, family)}").eval()
    assert encoder.one_length == by_length
    long = "a red cat on a warm old wall by the sea"
    alone, both = (features_of(encoder, x) for x in (["a red cat"], ["a red cat", long]))
    torch.testing.assert_close(both.pooled[0], alone.pooled[0], rtol=1e-5, atol=1e-6)
    length = alone.tokens.shape[1]
    torch.testing.assert_close(both.tokens[0, :length], alone.tokens[0], rtol=1e-5, atol=1e-6)
    assert both.mask[0].sum() == length


def test_tensors_that_are_dropped_do_not_count_against_the_bound(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(8)}, tmp_path / "weights")
    with bounded_allocation(tmp_path / "weights"):
        for _ in range(8):  # HaloNet pads in each of its layers
            assert F.pad(torch.zeros(8), (0, SPARE // 2)).sum() == 0
        nn.Linear(2 * SPARE, 8)  # a classifier that is not kept
        assert torch.zeros(8).sum() == 0


@pytest.mark.parametrize(
    ("name", "args"),
    [("randn", ([2, 3],)), ("hann_window", (5, False)), ("linspace", (0.0, 1.0, 7))],
)
def test_sizes_are_those_that_torch_makes(name: str, args: tuple[Any, ...]) -> None:
    make = getattr(torch.ops.aten, name)
    assert {x.__name__ for x in SIZES} == {"randn", "hann_window", "linspace"}
    assert [*SIZES[make](*args)] == [*make(*args).shape]


@pytest.mark.parametrize(
    "build",
    [
        lambda: torch.zeros(2 * SPARE),
        lambda: torch.zeros(2 * SPARE) + torch.ones(1),
        lambda: nn.Parameter(torch.zeros(2 * SPARE).exp()[:2]),
        lambda: float(torch.zeros(2 * SPARE).sum()),
        lambda: [torch.zeros(8) for _ in range(SPARE // TENSOR)],
        lambda: torch.randn(2, SPARE),
        lambda: torch.hann_window(2 * SPARE),
        lambda: torch.linspace(0, 1, 2 * SPARE),
        lambda: [torch.zeros(2 * SPARE) for _ in range(SPARE // TENSOR)],
    ],
)
def test_what_is_kept_or_computed_with_is_refused(build: Callable[[], Any], tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "weights")
    too_large = r"config.json: the settings ask for far larger tensors than weights holds"
    with pytest.raises(FusionZooError, match=too_large), bounded_allocation(tmp_path / "weights"):
        kept = build()  # noqa: F841


def test_models_that_cannot_be_trained_or_read_no_text_alone_say_so(tmp_path: Path) -> None:
    # It trains on texts of one length alone.
    source = text_folder(tmp_path / "first", "Reformer")
    encoder = create_encoder("text", f"hf/{source}")
    assert encoder.dim == 2 * 16
    prepare = encoder.processor(True)
    inputs = prepare.collate([prepare("a red cat")])
    with pytest.raises(FusionZooError, match=r"ReformerModel encodes texts, but cannot be trained"):
        encoder.train()(inputs)
    encoder.freeze("all")
    assert encoder.train()(inputs).pooled.shape == (1, 32)
    source = text_folder(tmp_path / "source", "Xmod")  # it wants to know the language
    with pytest.raises(FusionZooError, match=r"XmodModel does not encode a text alone: Input lang"):
        create_encoder("text", f"hf/{source}")


def test_a_peft_that_cannot_be_imported_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "peft.py").write_text("raise OSError('torchaudio was built for CUDA 13.0')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [x for x in sys.modules if x.partition(".")[0] == "peft"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(FusionZooError, match=r"installed but cannot be imported: torchaudio was b"):
        create_encoder("image", "timm/test_vit", pretrained=False, lora={"r": 2})


# ---- saved by timm


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


def test_a_trained_model_of_timm_answers_alike_once_it_is_loaded(folder: Path) -> None:
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
