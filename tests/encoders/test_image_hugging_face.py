"""Vision models of transformers: images prepared as by their processors, patches as tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fusionzoo.encoders import create_encoder
from fusionzoo.encoders.hf_image import CheckpointImage
from fusionzoo.errors import FusionZooError
from helpers import tiny_models as tiny
from helpers.pictures import SHAPES, off, picture

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
