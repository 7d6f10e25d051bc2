"""Image encoders: any timm model, any torchvision classification model.

Shapes: `B` batch, `H` x `W` pixels, `T` cells of the final feature map or patches, `D` width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from einops import rearrange
from torch import Tensor, nn

from fusionzoo.errors import FusionZooError, did_you_mean
from fusionzoo.structures import Features, masked_mean

from ._image_processor import ImageProcessor
from ._timm import build_timm, timm_features
from .base import ENCODERS, Encoder
from .weights import PYTORCH_HUB, from_hub

AUGMENT = ("none", "crop", "crop_flip")
FIT = ("crop", "pad", "squash")


class ImageEncoder(Encoder):
    """Base of the image encoders: uint8 pixels in, normalised on the model's device."""

    kind = "image"
    # Images of one size give feature maps of one size, so parts of a batch can be concatenated.
    frozen_rows = 8
    scale: Tensor
    shift: Tensor

    def set_processing(
        self,
        size: tuple[int, int],
        mean: Any,
        std: Any,
        *,
        interpolation: str,
        crop_pct: float,
        fit: str,
        augment: str,
    ) -> None:
        """Set how images are prepared; `mean` and `std` are of pixels in [0, 1]."""
        for name, value, known in (("augment", augment, AUGMENT), ("fit", fit, FIT)):
            if value not in known:
                raise FusionZooError(f"{name}={value!r} is none of {', '.join(known)}")
        self.settings = ((size[0], size[1]), crop_pct, interpolation, fit, augment)
        std, mean = (torch.tensor(x, dtype=torch.float32)[:, None, None] for x in (std, mean))
        self.register_buffer("scale", 1 / (255 * std), persistent=False)
        self.register_buffer("shift", -mean / std, persistent=False)

    def processor(self, train: bool) -> ImageProcessor:
        size, crop_pct, interpolation, fit, augment = self.settings
        return ImageProcessor(size, crop_pct, interpolation, fit, augment if train else "none")

    def normalise(self, pixels: Tensor) -> Tensor:
        """Normalise uint8 pixels as in the network's training, in one fused multiply-add."""
        return torch.addcmul(self.shift, pixels.to(self.scale.dtype), self.scale)

    def measure(self) -> None:
        """Set `dim` by running two blank images; a model that cannot run them fails here."""
        self.eval()
        with torch.no_grad():
            pixels = self.processor(False).blank()["pixels"]
            features = self.encode({"pixels": torch.stack([pixels, pixels])})
        self.train()
        self.dim = features.tokens.shape[-1]


@ENCODERS.register("timm", family="image", takes_model=True)
class TimmImage(ImageEncoder):
    """Encode images with any timm model, prepared as its configuration says.

    The pooled vector is that of the model's own head if it is as wide as the tokens, else the
    tokens' mean. Further settings go to `timm.create_model` (`img_size`, `drop_path_rate`, ...).

    Settings:
        pretrained: load the weights that timm publishes
        size: side of the square input in pixels, instead of the model's
        mean: of pixels in [0, 1], per channel, for normalising, instead of the model's
        std: of pixels in [0, 1], per channel, for normalising, instead of the model's
        interpolation: for resizing, such as `bilinear` or `bicubic`, instead of the model's
        fit: `crop` the centre after resizing the shorter side, `pad` to a square with white, or
            `squash` to a square
        augment: in training only, a random `crop` of 60 to 100 % of the area; `crop_flip` also
            mirrors half of the images

    Shapes: (T = cells of the final feature map, or patches; D = model.num_features)
        inputs["pixels"]: uint8 (B, 3, H, W)
        returns: Features of (B, T, D), (B, T), (B, D)
    """

    def __init__(
        self,
        model: str,
        *,
        pretrained: bool = True,
        size: int | None = None,
        mean: tuple[float, float, float] | None = None,
        std: tuple[float, float, float] | None = None,
        interpolation: str | None = None,
        fit: Literal["crop", "pad", "squash"] = "crop",
        augment: Literal["none", "crop", "crop_flip"] = "none",
        **model_settings: Any,
    ) -> None:
        super().__init__()
        from timm.data import resolve_model_data_config

        self.net = build_timm(model, pretrained, **model_settings)
        config = resolve_model_data_config(self.net)
        side = size or model_settings.get("img_size")
        self.set_processing(
            (side, side) if isinstance(side, int) else side or config["input_size"][1:],
            mean or config["mean"],
            std or config["std"],
            interpolation=interpolation or config["interpolation"],
            crop_pct=config["crop_pct"],
            fit=fit,
            augment=augment,
        )
        self.measure()

    def encode(self, inputs: Mapping[str, Tensor]) -> Features:
        return timm_features(self.net, self.normalise(inputs["pixels"]))


@ENCODERS.register("torchvision", family="image", takes_model=True)
class TorchvisionImage(ImageEncoder):
    """Encode images with any torchvision classification model but GoogLeNet and Inception.

    Tokens are the final feature map's cells, or a ViT's patches; pooled is their mean, for a ViT
    the class token. timm has GoogLeNet and Inception. Further settings go to
    `torchvision.models.get_model`.

    Settings:
        pretrained: load the weights that torchvision publishes
        fit: `crop` the centre after resizing the shorter side, `pad` to a square with white, or
            `squash` to a square
        augment: in training only, a random `crop` of 60 to 100 % of the area; `crop_flip` also
            mirrors half of the images

    Shapes: as `TimmImage`.
    """

    def __init__(
        self,
        model: str,
        *,
        pretrained: bool = True,
        fit: Literal["crop", "pad", "squash"] = "crop",
        augment: Literal["none", "crop", "crop_flip"] = "none",
        **model_settings: Any,
    ) -> None:
        super().__init__()
        import torchvision.models as zoo

        if model in ("googlenet", "inception_v3"):
            raise FusionZooError(f"torchvision's {model} is not supported: timm has it")
        if model not in zoo.list_models(module=zoo):
            near = did_you_mean(model, zoo.list_models(module=zoo))
            raise FusionZooError(f"torchvision has no classification model {model!r}.{near}")
        weights = zoo.get_model_weights(model).DEFAULT

        def build(weights: Any) -> Any:
            return zoo.get_model(model, weights=weights, **model_settings)

        if pretrained:
            self.net = from_hub(f"torchvision/{model}", lambda: build(weights), PYTORCH_HUB)
        else:
            self.net = build(None)
        self.is_vit = isinstance(self.net, zoo.VisionTransformer)
        self.trunk = self._remove_classifier()
        transforms = weights.transforms()
        side = model_settings.get("image_size", transforms.crop_size[0])
        self.set_processing(
            (side, side),
            transforms.mean,
            transforms.std,
            interpolation=transforms.interpolation.value,
            crop_pct=min(1.0, transforms.crop_size[0] / transforms.resize_size[0]),
            fit=fit,
            augment=augment,
        )
        self.measure()

    def _remove_classifier(self) -> list[str]:
        """Replace pooling and classifier by identities; return the names of the parts before."""
        names = [name for name, _ in self.net.named_children()]
        tail = ("avgpool", "fc", "classifier", "head", "heads", "permute")
        first = next(i for i, name in enumerate(names) if name in tail)
        for name in names[first:]:
            setattr(self.net, name, nn.Identity())
        return names[:first]

    def encode(self, inputs: Mapping[str, Tensor]) -> Features:
        x = self.normalise(inputs["pixels"])
        tokens, pooled = self._encode_vit(x) if self.is_vit else self._encode_cnn(x)
        mask = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        return Features(tokens, mask, masked_mean(tokens, mask) if pooled is None else pooled)

    def _encode_cnn(self, x: Tensor) -> tuple[Tensor, None]:
        for name in self.trunk:
            part = getattr(self.net, name)
            for layer in part if isinstance(part, nn.ModuleList) else [part]:
                x = layer(x)
        if type(self.net).__name__ == "DenseNet":
            x = x.relu()
        is_last = "norm" in self.trunk  # Swin's feature map has its channels last
        return rearrange(x, "b h w d -> b (h w) d" if is_last else "b d h w -> b (h w) d"), None

    def _encode_vit(self, x: Tensor) -> tuple[Tensor, Tensor]:
        patches = self.net._process_input(x)
        cls = self.net.class_token.expand(len(x), -1, -1)
        tokens = self.net.encoder(torch.cat([cls, patches], dim=1))
        return tokens[:, 1:], tokens[:, 0]
