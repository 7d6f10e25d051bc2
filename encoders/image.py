"""Image encoders: any timm model, any torchvision classification model, and their preprocessing."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from einops import rearrange
from torch import Tensor, nn

from fusionzoo.errors import FusionZooError, check_choice, did_you_mean, explained, one_line
from fusionzoo.ground.compiler import compiler_later
from fusionzoo.structures import Features

from .base import ENCODERS, Encoder, Item, Processor, called_modules, one_token, unmasked
from .hf import read_json
from .weights import PYTORCH_HUB, from_hub, resolve

# What a frozen encoder runs at once on a CPU: so many rows, of small images so many pixels. More
# needs memory, and at 224 x 224 time; 64 images of 32 x 32 by eights take 3 times one call's time.
FROZEN_ROWS, FROZEN_PIXELS = 8, 8 * 224 * 224
# Pixels (200 MB) of an image after padding, and after resizing before a crop: larger ones shrink
# before, and of longer ones only the middle is resized.
LARGEST = 1 << 26
TIMM_HUB = "hf-hub:"  # before <owner>/<model>, with @<revision> or without
TIMM_CONFIG = "config.json"  # architecture and pretrained_cfg, as timm saves a model
INCEPTIONS = ("googlenet", "inception_v3")  # of torchvision
AUGMENT = ("none", "crop", "crop_flip")
FIT = ("crop", "pad", "squash")
# How torch resizes tensors; by Lanczos' filter only newer ones.
RESIZES: tuple[str, ...] = ("nearest", "nearest-exact", "bilinear", "bicubic")
if hasattr(torch.ops.aten, "_upsample_lanczos2d_aa"):
    RESIZES = (*RESIZES, "lanczos")
CROP_MODES = {"center": "crop", "squash": "squash"}  # timm's word -> ours


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """How images become the input of a network; mean and std are of pixels in [0, 1].

    `fit`: `crop` the centre after resizing the shorter side (as timm and torchvision evaluate),
    `pad` to the target's aspect with white, or `squash` to it, also before a crop of the centre.
    """

    size: tuple[int, int]  # (H, W) of the input
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    interpolation: str = "bilinear"
    fit: str = "crop"
    resized: tuple[int, int] | None = None  # (H, W) that is covered or squashed to before a crop
    rounds_down: bool = False  # the crop's corner, as transformers; torchvision rounds half to even

    def __post_init__(self) -> None:
        if self.interpolation not in RESIZES:
            known = ", ".join(RESIZES)
            raise FusionZooError(
                f"interpolation {self.interpolation!r} is none of those of torch"
                f" {torch.__version__}: {known}"
            )

    @property
    def before_crop(self) -> tuple[int, int]:
        """Height and width that `crop` covers and `squash` makes before the centre is cropped."""
        height, width = (max(x) for x in zip(self.size, self.resized or self.size, strict=True))
        return height, width


class ImageProcessor(Processor):
    """Resize images, uint8 (3, H, W), to uint8 (3, *size); the encoder normalises them.

    `augment`, in training only: `none`, a random `crop` of 60 to 100 % of the area, or `crop_flip`,
    which also mirrors half of them.
    """

    def __init__(
        self, preparation: Preparation, augment: str = "none", antialias: bool = True
    ) -> None:
        self.preparation, self.augment, self.antialias = preparation, augment, antialias

    def __call__(self, value: Tensor, generator: torch.Generator | None = None) -> Item:
        fit, size = self.preparation.fit, self.preparation.size
        if fit == "pad":
            value = _pad_to_aspect(self._shrink_if_huge(value), size)
        if generator is not None and self.augment != "none":
            return {"pixels": self._resize(randomly_cropped(value, self.augment, generator), size)}
        if fit == "pad":
            return {"pixels": self._resize(value, size)}
        if fit == "squash":
            return {"pixels": self._center(self._resize(value, self.preparation.before_crop))}
        value = self._crop_long_side(value)
        return {"pixels": self._center(self._resize(value, self._covering(value.shape[-2:])))}

    def varies(self, value: Tensor) -> bool:
        return self.augment != "none"

    def blank(self) -> Item:
        return {"pixels": torch.zeros(3, *self.preparation.size, dtype=torch.uint8)}

    def _covering(self, shape: torch.Size) -> tuple[int, int]:
        """Return the size of an image that covers the one before the crop, with its own aspect.

        Sides are rounded as torchvision and transformers do for a square, and timm for others.
        """
        (height, width), (h, w) = shape, self.preparation.before_crop
        if h == w:
            return (h, int(h * width / height)) if height <= width else (int(w * height / width), w)
        ratio = min(height / h, width / w)
        return max(h, round(height / ratio)), max(w, round(width / ratio))

    def _center(self, image: Tensor) -> Tensor:
        """Crop the centre to the size of the input."""
        size = self.preparation.size
        if self.preparation.rounds_down:  # of an odd number of spare rows, one more below
            rows, columns = (a - (a - b) % 2 for a, b in zip(image.shape[-2:], size, strict=True))
            image = image[:, :rows, :columns]
        return _center_crop(image, size)

    def _crop_long_side(self, image: Tensor) -> Tensor:
        """Crop a very long image around its middle, as resizing all of it could exhaust memory."""
        shape, target = image.shape[-2:], self.preparation.before_crop
        height, width = self._covering(shape)
        if height * width <= LARGEST:
            return image
        scale = max(x / side for x, side in zip(target, shape, strict=True))
        sides = []
        for x, side in zip(target, shape, strict=True):
            # Twice the final crop plus the filter's margin; an even cut keeps the middle in place.
            enough = math.ceil(2 * x / scale) + 8
            sides.append(side if enough >= side else enough + (side - enough) % 2)
        return _center_crop(image, (sides[0], sides[1]))

    def _shrink_if_huge(self, image: Tensor) -> Tensor:
        """Shrink an image that would have more than `LARGEST` pixels once padded."""
        height, width = image.shape[-2:]
        padded_height, padded_width = _padded_size(image.shape[-2:], self.preparation.size)
        factor = (LARGEST / (padded_height * padded_width)) ** 0.5
        if factor >= 1:
            return image
        return self._resize(image, (max(1, int(height * factor)), max(1, int(width * factor))))

    def _resize(self, image: Tensor, size: tuple[int, int]) -> Tensor:
        with compiler_later("torchvision.tv_tensors"):
            from torchvision.transforms import InterpolationMode
            from torchvision.transforms.v2.functional import resize

        mode = InterpolationMode(self.preparation.interpolation)
        return resize(image, list(size), interpolation=mode, antialias=self.antialias)


def randomly_cropped(image: Tensor, augment: str, generator: torch.Generator) -> Tensor:
    """Apply `augment` to an image (3, H, W): a random crop, and mirroring with `crop_flip`."""
    if augment == "none":
        return image
    area, across, down, flip = torch.rand(4, generator=generator).tolist()
    side = (0.6 + 0.4 * area) ** 0.5
    height, width = image.shape[-2:]
    h, w = max(1, round(side * height)), max(1, round(side * width))
    top, left = round(down * (height - h)), round(across * (width - w))
    image = image[:, top : top + h, left : left + w]
    return image.flip(-1) if augment == "crop_flip" and flip < 0.5 else image


def _padded_size(shape: torch.Size, size: tuple[int, int]) -> tuple[int, int]:
    """Return height and width after padding to the aspect of `size`."""
    scale = max(side / target for side, target in zip(shape, size, strict=True))
    height, width = (max(s, round(t * scale)) for s, t in zip(shape, size, strict=True))
    return height, width


def _pad_to_aspect(image: Tensor, size: tuple[int, int]) -> Tensor:
    """Centre the image on a white canvas with the aspect of `size`."""
    height, width = image.shape[-2:]
    h, w = _padded_size(image.shape[-2:], size)
    canvas = image.new_full((3, h, w), 255)
    top, left = (h - height) // 2, (w - width) // 2
    canvas[:, top : top + height, left : left + width] = image
    return canvas


def _center_crop(image: Tensor, size: tuple[int, int]) -> Tensor:
    top, left = (round((a - b) / 2) for a, b in zip(image.shape[-2:], size, strict=True))
    return image[:, top : top + size[0], left : left + size[1]]


@contextmanager
def without(package: str) -> Iterator[None]:
    """Make imports of an optional package fail inside the block.

    timm imports wandb if it is installed, only for its own training script, which takes a second.
    """
    was_imported = package in sys.modules
    if not was_imported:
        sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if not was_imported:
            del sys.modules[package]


def timm_library() -> Any:
    """Import timm."""
    with without("wandb"), compiler_later("timm"):
        import timm

    return timm


def torchvision_models() -> Any:
    """Import torchvision's models."""
    with compiler_later("torchvision"):
        import torchvision.models as zoo

    return zoo


def in_timm(model: str) -> bool:
    """Return whether timm lists a model of this name."""
    return bool(timm_library().is_model(model.partition(".")[0]))


def build_timm(model: str, pretrained: bool, **settings: Any) -> Any:
    """Build a timm model without its classifier."""
    timm = timm_library()
    if not in_timm(model):
        near = did_you_mean(model, timm.list_models())
        raise FusionZooError(f"timm has no model {model!r}.{near} timm.list_models() lists them.")

    def build(pretrained: bool) -> Any:
        return timm.create_model(model, pretrained=pretrained, num_classes=0, **settings)

    problem = f"timm cannot build {model!r} with {settings}"
    with explained(problem, TypeError, RuntimeError, ValueError):
        net = build(False)
    return from_hub(f"timm/{model}", lambda: build(True)) if pretrained else net


def find_timm_config(model: str, assets: Path | None) -> Path | None:
    """Return timm's configuration of a model in a folder or on the hub; None: timm lists it.

    `assets` is where a saved model holds it.
    """
    if assets is not None and (assets / TIMM_CONFIG).is_file():
        return assets / TIMM_CONFIG
    if in_timm(model):
        return None
    if assets is not None:
        raise FusionZooError(f"{assets / TIMM_CONFIG} is missing: the model folder is not complete")
    if model.startswith(TIMM_HUB):
        from huggingface_hub import hf_hub_download

        name, _, revision = model.removeprefix(TIMM_HUB).partition("@")

        def download() -> str:
            return hf_hub_download(name, TIMM_CONFIG, revision=revision or None)

        return Path(from_hub(f"timm/{model}", download))
    folder = resolve(model)
    if not folder.is_dir():
        if "/" not in model:
            return None  # a mistyped name, for which `build_timm` knows near ones
        raise FusionZooError(
            f"timm/{model}: there is no folder {folder}; timm/{TIMM_HUB}<owner>/<model> takes a"
            " model of the hub"
        )
    if not (folder / TIMM_CONFIG).is_file():
        raise FusionZooError(
            f"timm/{model}: the folder has no {TIMM_CONFIG}, which timm.models.save_for_hf writes"
        )
    return folder / TIMM_CONFIG


def build_saved_timm(model: str, config: Path, pretrained: bool, **settings: Any) -> Any:
    """Build a timm model without its classifier by its configuration, from a folder or the hub.

    All of its weights must be in the checkpoint: timm itself, when it leaves the classifier out,
    takes one that lacks any.
    """
    timm, about = timm_library(), read_json(config)
    architecture = str(about.get("architecture")) if isinstance(about, dict) else "None"
    if architecture == "None":
        raise FusionZooError(
            f"{config} names no architecture of timm: a model of transformers is hf/{model}"
        )
    if not in_timm(architecture):
        near = did_you_mean(architecture, timm.list_models())
        raise FusionZooError(f"{config}: timm has no architecture {architecture!r}.{near}")
    folder = f"local-dir:{config.parent}"

    def build(source: str, pretrained: bool, **options: Any) -> Any:
        try:
            return timm.create_model(source, pretrained, **options, **settings)
        except Exception as error:
            if source != folder:
                raise  # `from_hub` explains errors of the hub
            what = "its weights do not make a" if pretrained else "timm cannot build"
            reason = one_line(error) or type(error).__name__
            raise FusionZooError(f"timm/{model}: {what} {architecture}: {reason}") from error

    net = build(folder, False, num_classes=0)
    if pretrained and model.startswith(TIMM_HUB):
        whole = from_hub(f"timm/{model}", lambda: build(model, True))
    elif pretrained:
        whole = build(folder, True)
    else:
        return net
    missing = net.load_state_dict(whole.state_dict(), strict=False).missing_keys
    if missing:
        raise FusionZooError(f"timm/{model}: its weights lack {missing[0]}")
    return net


def timm_features(net: Any, x: Tensor) -> Features:
    """Return tokens, an all-True mask and the model's own pooled vector.

    Where that is not as wide as the tokens, the tokens' mean replaces it. Of a model with several
    feature maps (CoaT, CrossViT, EfficientViM) the pooled vector is the only token.
    """
    feature_map = net.forward_features(x)
    if not isinstance(feature_map, Tensor):
        pooled = net.forward_head(feature_map, pre_logits=True)
        return one_token(pooled)
    if feature_map.ndim not in (3, 4):
        raise FusionZooError(f"timm's {type(net).__name__} gives no single feature map")
    tokens = timm_tokens(net, feature_map)
    if net.head_hidden_size == net.num_features:
        pooled = net.forward_head(feature_map, pre_logits=True)
        if pooled.ndim == 2:  # else built with global_pool=''
            return unmasked(tokens, pooled)
    return unmasked(tokens)


@torch.no_grad()
def remove_unused_head(net: Any, run: Callable[[], object]) -> None:
    """Replace the parts of a timm model that `run` does not use by identities.

    These follow the features, such as MobileNetV3's `conv_head` where tokens are averaged instead.
    State dicts that still hold them load all the same.
    """
    net.eval()
    called = called_modules(net, run)
    unused = [
        name
        for name, part in net.named_children()
        if any(True for _ in part.parameters()) and not called.intersection(part.modules())
    ]
    for name in unused:
        setattr(net, name, nn.Identity())

    def forget(_: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        for key in [x for x in state if x.startswith(tuple(f"{prefix}{n}." for n in unused))]:
            del state[key]

    if unused:
        net.register_load_state_dict_pre_hook(forget)


def channels_last(net: Any) -> bool:
    """Return whether a timm model's feature map is (B, H, W, D), like Swin's."""
    return str(getattr(net, "output_fmt", "NCHW")).endswith("NHWC")


def timm_tokens(net: Any, feature_map: Tensor) -> Tensor:
    """Arrange a feature map as tokens (B, T, D); a sequence loses its class tokens."""
    if feature_map.ndim == 3:
        return feature_map[:, getattr(net, "num_prefix_tokens", 0) :]
    layout = "b h w d" if channels_last(net) else "b d h w"
    return rearrange(feature_map, f"{layout} -> b (h w) d")


class ImageEncoder(Encoder):
    """Base of the image encoders: uint8 pixels in, normalised on the model's device."""

    kind = "image"
    preparation: Preparation
    augment: str
    scale: Tensor
    shift: Tensor

    def set_processing(self, preparation: Preparation, augment: str) -> None:
        """Set how images are prepared, and augmented in training."""
        check_choice("augment", augment, AUGMENT)
        check_choice("fit", preparation.fit, FIT)
        self.preparation, self.augment = preparation, augment
        mean, std = (
            torch.tensor(x, dtype=torch.float32)[:, None, None]
            for x in (preparation.mean, preparation.std)
        )
        self.register_buffer("scale", 1 / (255 * std), persistent=False)
        self.register_buffer("shift", -mean / std, persistent=False)
        height, width = preparation.size
        # Images of one size give feature maps of one size, so parts of a batch can be concatenated.
        self.frozen_rows = max(FROZEN_ROWS, round(FROZEN_PIXELS / (height * width)))

    def processor(self, train: bool) -> ImageProcessor:
        return ImageProcessor(self.preparation, self.augment if train else "none")

    def normalise(self, pixels: Tensor) -> Tensor:
        """Normalise uint8 pixels as in the network's training, in one fused multiply-add."""
        x = pixels.to(self.scale.dtype)
        # The copy of integers is overwritten: fresh memory costs more than the arithmetic.
        out = None if pixels.is_floating_point() or torch.compiler.is_exporting() else x
        return torch.addcmul(self.shift, x, self.scale, out=out)


@ENCODERS.register("timm", family="image", takes_model=True)
class TimmImage(ImageEncoder):
    """Encode images with any timm model, prepared as its configuration says.

    `timm/<folder>` and `timm/hf-hub:<owner>/<model>` take a model that timm saved. The pooled
    vector is that of the model's own head if it is as wide as the tokens, else the tokens' mean,
    and the head is removed. Further settings go to `timm.create_model` (`img_size`,
    `drop_path_rate`, ...).

    Settings:
        pretrained: load the weights that timm publishes
        size: side of the square input in pixels, instead of the model's
        mean: of pixels in [0, 1], per channel, for normalising, instead of the model's
        std: of pixels in [0, 1], per channel, for normalising, instead of the model's
        interpolation: for resizing, such as `bilinear` or `bicubic`, instead of the model's
        fit: instead of the model's, `crop` the centre after resizing the shorter side, `pad` to a
            square with white, or `squash` to a square
        augment: in training only, a random `crop` of 60 to 100 % of the area; `crop_flip` also
            mirrors half of the images
        assets: folder that `save_assets` wrote; set when a saved model is loaded

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
        fit: Literal["crop", "pad", "squash"] | None = None,
        augment: Literal["none", "crop", "crop_flip"] = "none",
        assets: Path | None = None,
        **model_settings: Any,
    ) -> None:
        super().__init__()
        source = find_timm_config(model, assets)
        if source is None:
            self.net = build_timm(model, pretrained, **model_settings)
        else:
            self.net = build_saved_timm(model, source, pretrained, **model_settings)
        self.timm_config = None if source is None else source.read_text("utf-8")
        from timm.data import resolve_model_data_config

        config = resolve_model_data_config(self.net)
        side = size or model_settings.get("img_size") or config["input_size"][1:]
        height, width = (side, side) if isinstance(side, int) else side
        crop_mode = config["crop_mode"]
        if fit is None and crop_mode not in CROP_MODES:
            raise FusionZooError(
                f"timm/{model}: timm prepares images by crop_mode {crop_mode!r}, which is not"
                f" supported; fit= sets another way: {', '.join(FIT)}"
            )
        crop_pct = config["crop_pct"]
        resized = math.floor(height / crop_pct), math.floor(width / crop_pct)
        preparation = Preparation(
            size=(height, width),
            mean=tuple(mean or config["mean"]),
            std=tuple(std or config["std"]),
            interpolation=interpolation or config["interpolation"],
            fit=fit or CROP_MODES[crop_mode],
            resized=None if fit == "squash" else resized,
        )
        self.set_processing(preparation, augment)
        problem = f"timm/{model} cannot encode images of {height} x {width} in three channels with"
        problem += f" {model_settings or 'its settings'}"
        if size is not None and "img_size" not in model_settings:
            problem += f" (a model of one size is built for another by img_size={size})"
        with explained(problem):
            remove_unused_head(self.net, self.measure)

    def save_assets(self, folder: Path) -> None:
        if self.timm_config is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / TIMM_CONFIG).write_text(self.timm_config, "utf-8")

    def encode(self, inputs: Mapping[str, Tensor]) -> Features:
        return timm_features(self.net, self.normalise(inputs["pixels"]))


def build_torchvision(model: str, weights: Any, **settings: Any) -> Any:
    """Build a torchvision model, with published weights or with random ones (None)."""

    def build() -> Any:
        return torchvision_models().get_model(model, weights=weights, **settings)

    return build() if weights is None else from_hub(f"torchvision/{model}", build, PYTORCH_HUB)


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

    net: Any

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
        zoo = torchvision_models()
        if model not in zoo.list_models(module=zoo):
            near = did_you_mean(model, zoo.list_models(module=zoo))
            if model in zoo.list_models(module=zoo.video):
                near = f" torchvision-video/{model} reads the frames of a clip together."
            raise FusionZooError(f"torchvision has no classification model {model!r}.{near}")
        weights = zoo.get_model_weights(model).DEFAULT
        transforms = weights.transforms()
        crop, resize = transforms.crop_size[0], transforms.resize_size[0]
        if model.startswith("vit_"):  # with and without weights of the size that these have
            model_settings.setdefault("image_size", crop)

        mean, std = tuple(transforms.mean), tuple(transforms.std)
        if model in INCEPTIONS:  # which normalise once more, so that both together are this
            mean = std = (0.5, 0.5, 0.5)
            model_settings.setdefault("init_weights", not pretrained)
        self.net = build_torchvision(model, weights if pretrained else None, **model_settings)
        self.is_vit = isinstance(self.net, zoo.VisionTransformer)
        self.is_densenet = isinstance(self.net, zoo.DenseNet)
        self._remove_classifier()
        side = model_settings.get("image_size", crop)
        shorter = side * resize // crop
        preparation = Preparation(
            size=(side, side),
            mean=mean,
            std=std,
            interpolation=transforms.interpolation.value,
            fit=fit,
            resized=(shorter, shorter) if fit == "crop" else None,
        )
        self.set_processing(preparation, augment)
        self.measure()

    def _remove_classifier(self) -> None:
        """Remove pooling and classifier; of all but a ViT only the parts before them are kept.

        They are run one after another, and load as any module does: MNASNet's own class refuses
        weights without a version number, which no safetensors file has.
        """
        names = [name for name, _ in self.net.named_children()]
        tail = ("avgpool", "fc", "classifier", "head", "heads", "permute")
        first = next(i for i, name in enumerate(names) if name in tail)
        if self.is_vit:
            for name in names[first:]:
                setattr(self.net, name, nn.Identity())
        else:
            kept = [name for name in names[:first] if not name.lower().startswith("aux")]
            self.net = nn.ModuleDict({name: getattr(self.net, name) for name in kept})

    def encode(self, inputs: Mapping[str, Tensor]) -> Features:
        x = self.normalise(inputs["pixels"])
        if self.is_vit:
            patches = self.net._process_input(x)
            cls = self.net.class_token.expand(x.shape[0], -1, -1)
            tokens = self.net.encoder(torch.cat([cls, patches], dim=1))
            return unmasked(tokens[:, 1:], tokens[:, 0])
        for part in self.net.values():
            for layer in part if isinstance(part, nn.ModuleList) else [part]:
                x = layer(x)
        if self.is_densenet:
            x = x.relu()
        layout = "b h w d" if "norm" in self.net else "b d h w"  # Swin's channels are last
        return unmasked(rearrange(x, f"{layout} -> b (h w) d"))
