"""Image encoders: any timm model, any torchvision classification model.

Shapes: `B` batch, `H` x `W` pixels, `T` cells of the final feature map or patches, `D` width.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from einops import rearrange
from torch import Tensor, nn

from fusionzoo.errors import FusionZooError, did_you_mean
from fusionzoo.structures import Features, masked_mean

from .base import ENCODERS, Encoder, Item, Processor
from .weights import from_hub

AUGMENT = ("none", "crop", "crop_flip")
FIT = ("crop", "pad", "squash")
LONGEST = 16  # times the aspect of what is cropped; of a longer picture only the middle is resized
LARGEST_SQUARE = 1 << 26  # pixels (200 MB) of a picture after padding; larger ones shrink before


class ImageProcessor(Processor):
    """Resize uint8 (3, H, W) to uint8 (3, size, size); normalising is left to the model's device.

    `fit`: `crop` the centre after resizing the shorter side (as timm and torchvision evaluate),
    `pad` to a square with white, or `squash`. `augment` in training: a random crop of 60 to 100 %
    of the area, and a horizontal flip.
    """

    def __init__(
        self, size: tuple[int, int], crop_pct: float, interpolation: str, fit: str, augment: str
    ) -> None:
        self.size, self.crop_pct, self.interpolation = size, crop_pct, interpolation
        self.fit, self.augment = fit, augment

    def __call__(self, value: Tensor, generator: torch.Generator | None = None) -> Item:
        if self.fit == "pad":
            value = _pad_to_square(self._small_enough(value), self.size)
        if generator is not None and self.augment != "none":
            value = self._augment(value, generator)
            return {"pixels": self._resize(value, self.size)}
        if self.fit == "crop":
            value = self._middle(value)
            value = self._resize(value, self._before_crop(value.shape[-2:]))
            return {"pixels": _center_crop(value, self.size)}
        return {"pixels": self._resize(value, self.size)}

    def blank(self) -> Item:
        return {"pixels": torch.zeros(3, *self.size, dtype=torch.uint8)}

    def _before_crop(self, shape: torch.Size) -> tuple[int, int]:
        """Return the size at which the crop covers `crop_pct` of the shorter side."""
        scale = self._scale(shape)
        height, width = (max(w, round(s * scale)) for w, s in zip(self.size, shape, strict=True))
        return height, width

    def _scale(self, shape: torch.Size) -> float:
        return max(
            wanted / self.crop_pct / own for wanted, own in zip(self.size, shape, strict=True)
        )

    def _middle(self, image: Tensor) -> Tensor:
        """Cut off most of what the crop leaves out anyway; resized, it might fill the memory."""
        height, width = self._before_crop(image.shape[-2:])
        if height * width <= LONGEST * self.size[0] * self.size[1] / self.crop_pct**2:
            return image
        scale = self._scale(image.shape[-2:])
        sides = []
        for wanted, side in zip(self.size, image.shape[-2:], strict=True):
            # Twice the crop, and more for the filter; as much from one end as from the other.
            enough = math.ceil(2 * wanted / self.crop_pct / scale) + 8
            sides.append(side if enough >= side else enough + (side - enough) % 2)
        return _center_crop(image, (sides[0], sides[1]))

    def _small_enough(self, image: Tensor) -> Tensor:
        """Shrink a picture whose padded square would be larger than any picture should be."""
        height, width = image.shape[-2:]
        padded_height, padded_width = _padded(image.shape[-2:], self.size)
        factor = (LARGEST_SQUARE / (padded_height * padded_width)) ** 0.5
        if factor >= 1:
            return image
        return self._resize(image, (max(1, int(height * factor)), max(1, int(width * factor))))

    def _augment(self, image: Tensor, generator: torch.Generator) -> Tensor:
        area, across, down, flip = torch.rand(4, generator=generator).tolist()
        side = (0.6 + 0.4 * area) ** 0.5
        height, width = image.shape[-2:]
        h, w = max(1, round(side * height)), max(1, round(side * width))
        top, left = round(down * (height - h)), round(across * (width - w))
        image = image[:, top : top + h, left : left + w]
        return image.flip(-1) if self.augment == "crop_flip" and flip < 0.5 else image

    def _resize(self, image: Tensor, size: tuple[int, int]) -> Tensor:
        from torchvision.transforms import InterpolationMode
        from torchvision.transforms.v2.functional import resize

        mode = InterpolationMode(self.interpolation)
        return resize(image, list(size), interpolation=mode, antialias=True)


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


@ENCODERS.register("timm", family="image", takes_model=True)
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


@contextmanager
def without(package: str) -> Iterator[None]:
    """Let imports of an optional package fail for a moment.

    timm imports wandb, where that is installed, for a helper of its own training script: a second.
    """
    loaded = package in sys.modules
    if not loaded:
        sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if not loaded:
            del sys.modules[package]


def build_timm(model: str, pretrained: bool, **settings: Any) -> Any:
    """Build a timm model without its classifier."""
    with without("wandb"):
        import timm

    if not timm.is_model(model.partition(".")[0]):
        near = did_you_mean(model, timm.list_models())
        raise FusionZooError(f"timm has no model {model!r}.{near} timm.list_models() lists them.")

    def build(pretrained: bool) -> Any:
        return timm.create_model(model, pretrained=pretrained, num_classes=0, **settings)

    try:
        net = build(False)
    except (TypeError, RuntimeError, ValueError) as error:
        raise FusionZooError(f"timm cannot build {model!r} with {settings}: {error}") from error
    return from_hub(f"timm/{model}", lambda: build(True)) if pretrained else net


def timm_features(net: Any, x: Tensor) -> Features:
    """Return tokens, an all-True mask and the model's own pooling."""
    found = net.forward_features(x)
    if not isinstance(found, Tensor) or found.ndim not in (3, 4):
        raise FusionZooError(f"timm's {type(net).__name__} gives no single feature map")
    tokens = timm_tokens(net, found)
    mask = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    if net.head_hidden_size == net.num_features:
        return Features(tokens, mask, net.forward_head(found, pre_logits=True))
    return Features(tokens, mask, masked_mean(tokens, mask))


def channels_last(net: Any) -> bool:
    """Whether a timm model's feature map is (B, H, W, D), as Swin's."""
    return str(getattr(net, "output_fmt", "NCHW")).endswith("NHWC")


def timm_tokens(net: Any, found: Tensor) -> Tensor:
    """Arrange a feature map, channels first or last, or a token sequence as (B, T, D)."""
    if found.ndim == 3:
        return found[:, getattr(net, "num_prefix_tokens", 0) :]
    layout = "b h w d" if channels_last(net) else "b d h w"
    return rearrange(found, f"{layout} -> b (h w) d")


@ENCODERS.register("torchvision", family="image", takes_model=True)
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


def _padded(shape: torch.Size, size: tuple[int, int]) -> tuple[int, int]:
    """Return height and width after padding to the aspect of `size`."""
    scale = max(side / wanted for side, wanted in zip(shape, size, strict=True))
    height, width = (max(s, round(w * scale)) for s, w in zip(shape, size, strict=True))
    return height, width


def _pad_to_square(image: Tensor, size: tuple[int, int]) -> Tensor:
    """Put the picture in the middle of a white square (or of the wanted aspect)."""
    height, width = image.shape[-2:]
    h, w = _padded(image.shape[-2:], size)
    out = image.new_full((3, h, w), 255)
    top, left = (h - height) // 2, (w - width) // 2
    out[:, top : top + height, left : left + width] = image
    return out


def _center_crop(image: Tensor, size: tuple[int, int]) -> Tensor:
    top, left = (image.shape[-2] - size[0]) // 2, (image.shape[-1] - size[1]) // 2
    return image[:, top : top + size[0], left : left + size[1]]
