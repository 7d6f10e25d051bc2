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
from .weights import from_hub

AUGMENT = ("none", "crop", "crop_flip")
FIT = ("crop", "pad", "squash")


class ImageEncoder(Encoder):
    """What timm's and torchvision's models share: pixels in, normalised on the model's device."""

    kind = "image"
    # Pictures of one size give feature maps of one size, so parts of a batch can be joined again.
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
        """Fix how pictures are prepared; mean and std are of pixels in [0, 1]."""
        for name, chosen, known in (("augment", augment, AUGMENT), ("fit", fit, FIT)):
            if chosen not in known:
                raise FusionZooError(f"{name}={chosen!r} is none of {', '.join(known)}")
        self.settings = ((size[0], size[1]), crop_pct, interpolation, fit, augment)
        std, mean = (torch.tensor(x, dtype=torch.float32)[:, None, None] for x in (std, mean))
        self.register_buffer("scale", 1 / (255 * std), persistent=False)
        self.register_buffer("shift", -mean / std, persistent=False)

    def processor(self, train: bool) -> ImageProcessor:
        size, crop_pct, interpolation, fit, augment = self.settings
        return ImageProcessor(size, crop_pct, interpolation, fit, augment if train else "none")

    def normalise(self, pixels: Tensor) -> Tensor:
        """Turn uint8 into what the network was trained on, in one fused multiply-add."""
        return torch.addcmul(self.shift, pixels.to(self.scale.dtype), self.scale)

    def measure(self) -> None:
        """Run two blank pictures, so that a model which does not fit is refused here."""
        self.eval()
        with torch.no_grad():
            pixels = self.processor(False).blank()["pixels"]
            features = self.encode({"pixels": torch.stack([pixels, pixels])})
        self.train()
        self.dim = features.tokens.shape[-1]


@ENCODERS.register("timm", family="image")
class TimmImage(ImageEncoder):
    """Any timm model; size, mean, std and interpolation come from the model's own configuration.

    Further settings go to `timm.create_model` (`img_size`, `drop_path_rate`, `embed_dim`, ...). The
    pooled vector is the model's own head pooling where that is as wide as the tokens, else their
    mean.

    Shapes (T = cells of the final feature map, or patches; D = model.num_features):
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
        own = resolve_model_data_config(self.net)
        side = size or model_settings.get("img_size")
        self.set_processing(
            (side, side) if isinstance(side, int) else side or own["input_size"][1:],
            mean or own["mean"],
            std or own["std"],
            interpolation=interpolation or own["interpolation"],
            crop_pct=own["crop_pct"],
            fit=fit,
            augment=augment,
        )
        self.measure()

    def encode(self, inputs: Mapping[str, Tensor]) -> Features:
        return timm_features(self.net, self.normalise(inputs["pixels"]))


@ENCODERS.register("torchvision", family="image")
class TorchvisionImage(ImageEncoder):
    """Any torchvision classification model but GoogLeNet and Inception (timm has those).

    Tokens are the final feature map's cells, or a ViT's patches; pooled is their mean, for a ViT
    the class token. Further settings go to `torchvision.models.get_model`.

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

        hub = "https://download.pytorch.org"
        name = f"torchvision/{model}"
        self.net = from_hub(name, lambda: build(weights), hub) if pretrained else build(None)
        self.vit = isinstance(self.net, zoo.VisionTransformer)
        self.trunk = self._trim()
        own = weights.transforms()
        side = model_settings.get("image_size", own.crop_size[0])
        self.set_processing(
            (side, side),
            own.mean,
            own.std,
            interpolation=own.interpolation.value,
            crop_pct=min(1.0, own.crop_size[0] / own.resize_size[0]),
            fit=fit,
            augment=augment,
        )
        self.measure()

    def _trim(self) -> list[str]:
        """Drop the classifier; return the names of the parts before the pooling."""
        names = [name for name, _ in self.net.named_children()]
        ends = ("avgpool", "fc", "classifier", "head", "heads", "permute")
        first = next(i for i, name in enumerate(names) if name in ends)
        for name in names[first:]:
            setattr(self.net, name, nn.Identity())
        return names[:first]

    def encode(self, inputs: Mapping[str, Tensor]) -> Features:
        x = self.normalise(inputs["pixels"])
        tokens, pooled = self._vit(x) if self.vit else self._cells(x)
        mask = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        return Features(tokens, mask, masked_mean(tokens, mask) if pooled is None else pooled)

    def _cells(self, x: Tensor) -> tuple[Tensor, None]:
        for name in self.trunk:
            part = getattr(self.net, name)
            for layer in part if isinstance(part, nn.ModuleList) else [part]:
                x = layer(x)
        if type(self.net).__name__ == "DenseNet":
            x = x.relu()
        last = "norm" in self.trunk  # Swin's map is channels-last
        return rearrange(x, "b h w d -> b (h w) d" if last else "b d h w -> b (h w) d"), None

    def _vit(self, x: Tensor) -> tuple[Tensor, Tensor]:
        patches = self.net._process_input(x)
        cls = self.net.class_token.expand(len(x), -1, -1)
        tokens = self.net.encoder(torch.cat([cls, patches], dim=1))
        return tokens[:, 1:], tokens[:, 0]
